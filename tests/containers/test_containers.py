"""Masks and plans inside containers that other libraries pass around: the same bits afterwards, or an error
that says why.

A row of a law is a sample and a container: a wrapper of a module, a walk over a batch, a copy.
"""

import copy
import dataclasses
import functools
import gc
import io
import itertools
import marshal
import pickle
import types
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.utils import _apply_to_tensors
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only, tree_unflatten
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate, default_convert

from tests.containers.samples import IDS, MASKS, SAMPLES, attend, x_of
from tests.multiprocess import ranks
from tritoncp import alibi, causal, document, mods
from tritoncp.masks.block_mask_interface import BlockMaskInterface

pytestmark = pytest.mark.usefixtures("cpu_engine")
CPU, BF16 = torch.device("cpu"), torch.bfloat16


# -- wrappers of modules -----------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """Attention with a mask among the arguments of forward, by position and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor, batch: Any, *, mask: Any) -> torch.Tensor:
        self.masks = batch["mask"], mask
        return attend(x * self.weight, mask)


def cast(policy: type) -> Any:
    return policy(param_dtype=BF16)


WRAPPERS = {
    "FSDP1": lambda layer: FullyShardedDataParallel(
        layer, device_id=CPU, mixed_precision=cast(MixedPrecision)
    ),
    "FSDP2": lambda layer: fully_shard(
        layer, mesh=init_device_mesh("cpu", (1,)), mp_policy=cast(MixedPrecisionPolicy)
    ),
    "DDP": DistributedDataParallel,
    "checkpoint": lambda layer: partial(checkpoint, layer, use_reentrant=False),
    "reentrant checkpoint": lambda layer: (
        lambda x, batch, mask: checkpoint(
            lambda x, batch, mask: layer(x, batch, mask=mask), x, batch, mask, use_reentrant=True
        )
    ),
}


def trained(call: Callable[..., Any], mask: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the output of a module, and the gradient of its input."""
    x = x_of().to(dtype).requires_grad_()
    out = call(x, {"mask": mask}, mask=mask)
    out.float().square().sum().backward()
    return [out.detach(), x.grad]


def wrapped(group: Any) -> list[str]:
    """Return the samples and wrappers whose output or gradient differs from that of the plain module."""
    masks = {name: make() for name, make in SAMPLES.items()}
    pairs = itertools.product(masks, (torch.float32, BF16))
    want = {(name, dtype): trained(Layer().to(dtype), masks[name], dtype) for name, dtype in pairs}
    wrong = []
    for wrapper in WRAPPERS:
        layer, dtype = Layer(), BF16 if "FSDP" in wrapper else torch.float32
        module = WRAPPERS[wrapper](layer)
        for name, mask in masks.items():
            same = all(map(torch.equal, trained(module, mask, dtype), want[name, dtype]))
            if not same or (name in MASKS and any(seen is not mask for seen in layer.masks)):
                wrong.append(f"{wrapper}: {name}")
    return wrong


@pytest.mark.long
def test_masks_are_arguments_of_wrapped_modules():
    """Masks and plans come through as the same object, with its caches."""
    assert ranks.run(1, wrapped) == [[]]


def test_a_score_mod_is_not_cast_with_the_arguments_of_its_module():
    """With captures of another dtype, a translated score_mod would be a different one."""
    mod = mods.score_mod(alibi(2))
    assert _apply_to_tensors(lambda x: x.to(BF16), {"mod": mod})["mod"] is mod


# -- walks over batches, and copies ------------------------------------------------------------------------


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    mask: Any


def moved(batch: Any) -> Any:
    """Move a batch as Lightning and accelerate do: by ``to``, else into containers and dataclasses."""
    if hasattr(batch, "to"):
        return batch.to(CPU, non_blocking=True)
    if isinstance(batch, Mapping):
        return type(batch)({name: moved(value) for name, value in batch.items()})
    if dataclasses.is_dataclass(batch):
        changes = {item.name: moved(getattr(batch, item.name)) for item in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **changes)
    return batch


def saved(batch: Any) -> Any:
    file = io.BytesIO()
    torch.save(batch, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def flattened(batch: Any) -> Any:
    """Take a tree apart and put it together from copies of its leaves; the original is gone by then."""
    leaves, spec = tree_flatten(batch)
    return tree_unflatten([leaf.clone() for leaf in leaves], spec)


def cast_floats(batch: Any) -> Any:
    return tree_map(lambda x: x.to(BF16) if x.is_floating_point() else x.to(CPU, copy=True), batch)


WALKS: dict[str, Callable[[Any], Any]] = {
    "FSDP's cast": partial(_apply_to_tensors, lambda x: x.to(BF16) if x.is_floating_point() else x),
    "tree_map": cast_floats,
    "tree_map_only": partial(tree_map_only, torch.Tensor, torch.clone),
    "clones of leaves": flattened,
    "to": moved,
    "dataclass": lambda batch: moved(Batch(x_of(), batch)).mask,
    "asdict": lambda batch: dataclasses.asdict(Batch(x_of(), batch))["mask"],
    "replace": lambda batch: dataclasses.replace(Batch(x_of(), batch), x=x_of(1)).mask,
    "default_convert": default_convert,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda batch: pickle.loads(pickle.dumps(batch)),
    "old pickle": lambda batch: pickle.loads(pickle.dumps(batch, protocol=2)),
    "torch.save": saved,
    "worker": lambda batch: pickle.loads(ForkingPickler.dumps(batch)),
}
PICKLES = ("pickle", "old pickle", "torch.save", "worker")
COPIES = ("to", "asdict", "replace", "default_convert", "copy", "deepcopy", "tree_map_only", "FSDP's cast")


@functools.cache
def answer(name: str) -> torch.Tensor:
    return attend(x_of(), SAMPLES[name]())


@pytest.mark.sample(1)
@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_over_a_batch_does_not_change_masks(walk):
    for name, make in SAMPLES.items():
        mask = make()
        batch = {"mask": mask, "more": [mask, x_of()]}
        if walk in PICKLES and name == "mask with a capture":  # its mask_mod is a function within another
            with pytest.raises(
                pickle.PicklingError, match=r"near_table.mod .*samples.py:\d+.* top of a module"
            ):
                WALKS[walk](batch)
            continue
        other = WALKS[walk](batch)
        assert torch.equal(attend(x_of(), other["mask"]), answer(name)), name
        assert type(other["more"][0]) is type(mask)
        if name in MASKS and walk in COPIES:
            assert other["mask"] is mask  # with its caches
        del mask, batch


class Batches(torch.utils.data.Dataset):
    """Batches of masks that its owner made, and the same masks made where a batch is read."""

    def __init__(self, names: list[str]) -> None:
        self.names, self.masks = names, [SAMPLES[name]() for name in names]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        return self.names[index], self.masks[index], SAMPLES[self.names[index]]()


@pytest.mark.long
def test_spawned_workers_of_a_loader_take_and_give_masks():
    names = [name for name in SAMPLES if name != "mask with a capture"]  # refused by a test above
    loader = torch.utils.data.DataLoader(
        Batches(names), batch_size=None, num_workers=1, multiprocessing_context="spawn"
    )
    seen = []
    for name, taken, made in loader:
        for mask in (taken, made):
            assert torch.equal(attend(x_of(), mask), answer(name)), name
        seen.append(name)
    assert seen == names


@pytest.mark.long
def test_a_copy_of_the_last_reference_has_the_same_mask():
    """This holds also for a copy of its leaf on another device: the original is freed when the tree is put
    together."""
    flat = {name: tree_flatten(make()) for name, make in MASKS.items()}
    gc.collect()
    for name, (leaves, spec) in flat.items():
        assert torch.equal(attend(x_of(), tree_unflatten(leaves, spec)), answer(name))


CASTS = {"a cast": lambda x: x.to(BF16), "a stack": lambda x: torch.stack([x, x]), "a sum": lambda x: x + 1}


@pytest.mark.parametrize("cast", CASTS)
def test_a_walk_that_changes_numbers_raises(cast):
    """No mask is made from ids in bfloat16, or from the number of another mask."""
    neighbours = [MASKS["mask"]() for _ in range(3)]
    for mask in (neighbours[1], MASKS["plan"](), document(ids=IDS), causal() & document(ids=IDS)):
        if cast == "a cast" or isinstance(mask, BlockMaskInterface):
            with pytest.raises((TypeError, RuntimeError), match=r"floating-point tensors only|other process"):
                tree_map(CASTS[cast], mask)


def test_default_collate_says_how_to_batch_masks():
    for name in ("mask", "plan", "documents", "and"):
        with pytest.raises(TypeError, match="collate_fn= that makes one mask of the whole batch"):
            default_collate([{"mask": SAMPLES[name]()} for _ in range(2)])


def test_torch_load_says_how_to_load_masks():
    file = io.BytesIO()
    torch.save(MASKS["mask"](), file)
    with pytest.raises(pickle.UnpicklingError, match=r"add_safe_globals|weights_only"):
        torch.load(io.BytesIO(file.getvalue()))


class CopiesFunctions(pickle.Pickler):
    """A pickler that copies functions by their code, like cloudpickle's."""

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, types.FunctionType) or "<locals>" not in thing.__qualname__:
            return NotImplemented
        cells = [cell.cell_contents for cell in thing.__closure__ or ()]
        return remade, (marshal.dumps(thing.__code__), cells)


def remade(code: bytes, cells: list[Any]) -> Any:
    return types.FunctionType(marshal.loads(code), globals(), closure=tuple(map(types.CellType, cells)))


def test_picklers_that_copy_functions_may_do_so():
    file = io.BytesIO()
    pickler = CopiesFunctions(file)
    pickler.dump(MASKS["mask with a capture"]())
    other = pickle.loads(file.getvalue())
    assert torch.equal(attend(x_of(), other), answer("mask with a capture"))

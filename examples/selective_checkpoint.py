"""Memory, messages and repeated attention of activation checkpointing, as a table.

    torchrun --nproc-per-node 2 examples/selective_checkpoint.py

Attention that is computed again sends its keys again. COMPILE=1 compiles the layers.
"""

import gc
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from train_loop import LAYERS, SIZE, Decoder, Result, add_up, batch_of, launch, loss_sum

import tritoncp

Function = Callable[..., Tensor]
TORCH_FLEX, LINEAR = torch.ops.higher_order.flex_attention, torch.ops.aten.addmm.default


def repeat(contexts: Any, function: Function) -> Function:
    """Wrap a function in a checkpoint that saves the results of some ops and repeats all other ops."""
    return partial(checkpoint, function, use_reentrant=False, context_fn=contexts)


def contexts_of(ops: list[Any]) -> Any:
    """Return the contexts that save ops and every second linear layer, as torchtitan's do."""
    saved = cycle([True, False])
    return create_selective_checkpoint_contexts(
        lambda ctx, op, *args, **kwargs: next(saved) if op is LINEAR else op in ops
    )


WAYS: dict[str, Callable[[Function], Function]] = {  # of running a layer
    "no checkpoint": lambda layer: layer,
    "nothing saved": lambda layer: partial(checkpoint, layer, use_reentrant=False),
    "checkpoint_policy()": partial(
        repeat, partial(create_selective_checkpoint_contexts, tritoncp.checkpoint_policy())
    ),
    "half of linear": partial(repeat, partial(contexts_of, [])),
    "half of linear and SAVE_OPS": partial(repeat, partial(contexts_of, list(tritoncp.SAVE_OPS))),
    "half of linear and torch's op": partial(repeat, partial(contexts_of, [TORCH_FLEX])),
}


class KeptMemory(TorchDispatchMode):
    """Counts the bytes of results of ops that are in use, also by a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        self.found[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return x

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in filter(torch.is_tensor, tree_leaves(result)):
            if x.untyped_storage()._cdata not in inputs:
                self.add(x)
        return result


class Figures(NamedTuple):  # all-gathers and runs of attention are those of the backward pass
    bytes_kept: int
    gathers: int
    attention_runs: int
    loss: float
    gradients: list[Tensor]


def measure(
    wrap: Callable[[Function], Function], mesh: dist.ProcessGroup | None = None, device: str = "cpu",
    compiled: bool = False,
) -> Figures:  # fmt: skip
    torch.manual_seed(0)
    model = Decoder().to(device)
    mask = tritoncp.create_block_mask(tritoncp.causal(), 1, 1, SIZE, SIZE)
    plan = tritoncp.make_plan(mask, mesh, schedule="allgather")
    positions = tritoncp.positions(plan).to(device)
    attend = partial(tritoncp.flex_attention, block_mask=plan, mesh=mesh)
    labels = tritoncp.shard(batch_of(0)[:, 1:], plan, dim=1, pad=-100).to(device)
    x = model.embed(tritoncp.shard(batch_of(0)[:, :-1], plan, dim=1).to(device))
    layers, memory = list(map(wrap, model.layers)), KeptMemory()
    if compiled:  # no dispatch mode sees inside; a graph keeps what it saves for its backward graph
        torch.compiler.reset()  # graphs have no guard on policies: that of another way would be used
        layers = [torch.compile(layer, fullgraph=True) for layer in layers]
        kept = {x.untyped_storage()._cdata for x in (*model.parameters(), positions)}
        pack: Any = lambda x: x if x.untyped_storage()._cdata in kept else memory.add(x)  # noqa: E731
    with saved_tensors_hooks(pack, lambda x: x) if compiled else memory:
        for layer in layers:
            x = layer(x, positions, attend)
    gc.collect()  # what cycles of a checkpoint keep
    bytes_kept = sum(size for storage, size in memory.found.values() if not storage.expired())
    loss = loss_sum(model.head(x), labels) / SIZE
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss.backward()
    counts = Counter(event.name.partition("/")[2].removeprefix("backward ") for event in profile.events())
    gradients = [weight.grad for weight in model.parameters()]
    add_up([loss := loss.detach(), *gradients], mesh)
    return Figures(bytes_kept, counts["start AllGather"], counts["step 0"], loss.item(), gradients)


def train(mesh: dist.ProcessGroup | None = None, device: str = "cpu") -> Result:
    """Print the table. Return the loss of each way, and the gradients without a checkpoint."""
    compiled = bool(int(os.environ.get("COMPILE", "0")))
    table = {name: measure(wrap, mesh, device, compiled) for name, wrap in WAYS.items()}
    if mesh is None or mesh.rank() == 0:
        print(f"{f'{LAYERS} layers' + ', compiled' * compiled:34} KiB kept  all-gathers  attention again")
        for name, row in table.items():
            print(f"{name:34} {row.bytes_kept / 1024:8.0f} {row.gathers:12} {row.attention_runs:16}")
    return [row.loss for row in table.values()], table["no checkpoint"].gradients


if __name__ == "__main__":
    launch(train)

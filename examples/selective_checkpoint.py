"""Memory, messages and repeated attention of activation checkpointing, eagerly and compiled, as a table.

    torchrun --nproc-per-node 2 examples/selective_checkpoint.py
    COMPILE=1 torchrun --nproc-per-node 2 examples/selective_checkpoint.py

Attention that is computed again sends its keys again. `checkpoint_policy` saves its out and lse, so that it
runs once; it also saves a list of other ops. `SAVE_OPS` is the list for a policy of your own.
"""

import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from train_loop import LAYERS, SIZE, Decoder, Result, add_up, batch_of, launch, loss_sum

import tritoncp

Function = Callable[..., Tensor]
TORCH_FLEX, LINEAR = torch.ops.higher_order.flex_attention, torch.ops.aten.addmm.default


def save(policy: Any, function: Function) -> Function:
    """Wrap a function in a checkpoint with a policy, or a list of ops to save; the rest runs again."""
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return partial(checkpoint, function, use_reentrant=False, context_fn=contexts)


def save_half_of_linear(ops: list[Any], function: Function) -> Function:
    """Wrap a function in a checkpoint that saves a list of ops, and every second linear layer, as
    torchtitan's does."""

    def contexts() -> Any:
        calls = 0

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            nonlocal calls
            calls += op is LINEAR
            is_saved = calls % 2 if op is LINEAR else op in ops
            return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return partial(checkpoint, function, use_reentrant=False, context_fn=contexts)


WAYS: dict[str, Callable[[Function], Function]] = {  # of running a layer
    "no checkpoint": lambda layer: layer,
    "nothing saved": lambda layer: partial(checkpoint, layer, use_reentrant=False),
    "checkpoint_policy()": partial(save, tritoncp.checkpoint_policy()),
    "half of linear": partial(save_half_of_linear, []),
    "half of linear and SAVE_OPS": partial(save_half_of_linear, list(tritoncp.SAVE_OPS)),
    "half of linear and torch's op": partial(save_half_of_linear, [TORCH_FLEX]),
}


class KeptMemory(TorchDispatchMode):
    """Finds results of ops whose memory is in use, also those that a checkpoint keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        self.results[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return x

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in inputs:
                self.add(x)
        return result

    def count_bytes(self) -> int:
        return sum(size for storage, size in self.results.values() if not storage.expired())


class Figures(NamedTuple):
    """Of one way, on this rank: bytes kept between the passes; in the backward pass, all-gathers of keys and
    forward runs of attention; loss and gradients."""

    bytes_kept: int
    gathers: int
    repeated: int
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
    text = batch_of(0)
    labels = tritoncp.shard(text[:, 1:], plan, dim=1, pad=-100).to(device)
    x = model.embed(tritoncp.shard(text[:, :-1], plan, dim=1).to(device))
    layers, memory = [wrap(layer) for layer in model.layers], KeptMemory()
    if compiled:  # no dispatch mode sees inside; a graph keeps what it saves for its backward graph
        torch.compiler.reset()  # graphs have no guard on policies: that of another way would be used
        layers = [torch.compile(layer, fullgraph=True) for layer in layers]
        weights = {weight.untyped_storage()._cdata for weight in (*model.parameters(), positions)}
        recorded: Any = saved_tensors_hooks(
            lambda x: x if x.untyped_storage()._cdata in weights else memory.add(x), lambda x: x
        )
    else:
        recorded = memory
    with recorded:
        for layer in layers:
            x = layer(x, positions, attend)
    kept = memory.count_bytes()
    loss = loss_sum(model.head(x), labels) / SIZE
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss.backward()
    counts = Counter(event.name.partition("/")[2].removeprefix("backward ") for event in profile.events())
    gradients = [weight.grad for weight in model.parameters()]
    add_up([loss := loss.detach(), *gradients], mesh)
    return Figures(kept, counts["start AllGather"], counts["step 0"], loss.item(), gradients)


def train(mesh: dist.ProcessGroup | None = None, device: str = "cpu") -> Result:
    """Print the table. Return the loss of each way, and the gradients without a checkpoint."""
    compiled = bool(int(os.environ.get("COMPILE", "0")))
    table = {name: measure(wrap, mesh, device, compiled) for name, wrap in WAYS.items()}
    if mesh is None or mesh.rank() == 0:
        print(f"{f'{LAYERS} layers' + ', compiled' * compiled:34} KiB kept  all-gathers  attention again")
        for name, row in table.items():
            print(f"{name:34} {row.bytes_kept / 1024:8.0f} {row.gathers:12} {row.repeated:16}")
    return [row.loss for row in table.values()], table["no checkpoint"].gradients


if __name__ == "__main__":
    launch(train)

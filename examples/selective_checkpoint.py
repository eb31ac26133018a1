"""Memory and repeated work of activation checkpointing, for whole layers and for parts of them, as a table.

    torchrun --nproc-per-node 2 examples/selective_checkpoint.py

Attention that is computed again sends its keys again. `checkpoint_policy` saves its out and lse, so that it
runs once; it also saves a list of other ops. `SAVE_OPS` is the list for a policy of your own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from train_loop import SIZE, Attention, Decoder, Layer, Result, add_up, batch_of, launch, loss_sum

import tritoncp

ATTENTION, LINEAR = tritoncp.SAVE_OPS[0], torch.ops.aten.addmm.default
Function = Callable[..., Tensor]


def repeat_all(function: Function) -> Function:
    """Wrap a function in a checkpoint that runs all of it again."""
    return partial(checkpoint, function, use_reentrant=False)


def save_attention(function: Function, ops: list[Any] | None = None) -> Function:
    """Wrap a function in a checkpoint that saves attention and these ops, and runs the rest again."""
    contexts = partial(create_selective_checkpoint_contexts, tritoncp.checkpoint_policy(ops))
    return partial(checkpoint, function, use_reentrant=False, context_fn=contexts)


def run_parts(
    layer: Layer, x: Tensor, positions: Tensor, attend: Attention, *, attention: Any = None, mlp: Any = None
) -> Tensor:
    """Run a layer whose parts are checkpointed apart."""
    first, second = (wrap or (lambda part: part) for wrap in (attention, mlp))
    return second(layer.mlp)(first(layer.attention)(x, positions, attend))


WAYS: dict[str, Function] = {  # of running a layer: (layer, x, positions, attend) -> x
    "no checkpoint": lambda layer, *args: layer(*args),
    "layer": lambda layer, *args: repeat_all(layer)(*args),
    "layer, attention saved": lambda layer, *args: save_attention(layer)(*args),
    "layer, attention and linear saved": lambda layer, *args: save_attention(layer, [LINEAR])(*args),
    "attention part": partial(run_parts, attention=repeat_all),
    "attention part, attention saved": partial(run_parts, attention=save_attention),
    "MLP part": partial(run_parts, mlp=repeat_all),
    "both parts, attention saved": partial(run_parts, attention=save_attention, mlp=repeat_all),
}


class Recorder(TorchDispatchMode):
    """Counts forward runs of attention and of linear layers, and finds results whose memory is in use."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = {ATTENTION: 0, LINEAR: 0}
        self.results: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self.runs:
            self.runs[func] += 1
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        storages = (x.untyped_storage() for x in tree_leaves(result) if isinstance(x, Tensor))
        self.results += [(StorageWeakRef(s), s.nbytes()) for s in storages if s._cdata not in inputs]
        return result

    def bytes_in_use(self) -> int:
        return sum(size for storage, size in self.results if not storage.expired())


class Figures(NamedTuple):
    """Of one way, on this rank: forward runs in both passes, bytes kept between them; loss and gradients."""

    attention_runs: int
    linear_runs: int
    bytes_kept: int
    loss: float
    gradients: list[Tensor]


def measure(run_layer: Function, mesh: dist.ProcessGroup | None = None, device: str = "cpu") -> Figures:
    torch.manual_seed(0)
    model = Decoder().to(device)
    plan = tritoncp.make_plan(tritoncp.create_block_mask(tritoncp.causal(), 1, 1, SIZE, SIZE), mesh)
    positions = tritoncp.positions(plan).to(device)
    attend = partial(tritoncp.flex_attention, block_mask=plan, mesh=mesh)
    text = batch_of(0)
    labels = tritoncp.shard(text[:, 1:], plan, dim=1, pad=-100).to(device)
    x = model.embed(tritoncp.shard(text[:, :-1], plan, dim=1).to(device))
    with Recorder() as recorder:
        for layer in model.layers:
            x = run_layer(layer, x, positions, attend)
    memory = recorder.bytes_in_use()
    loss = loss_sum(model.head(x), labels) / SIZE
    with recorder:
        loss.backward()
    gradients = [weight.grad for weight in model.parameters()]
    add_up([loss := loss.detach(), *gradients], mesh)
    return Figures(*recorder.runs.values(), memory, loss.item(), gradients)


def train(mesh: dist.ProcessGroup | None = None, device: str = "cpu") -> Result:
    """Print the table. Return the loss of each way, and the gradients without a checkpoint."""
    table = {name: measure(run_layer, mesh, device) for name, run_layer in WAYS.items()}
    if mesh is None or mesh.rank() == 0:
        print(f"{'checkpoint':34} attention runs  linear runs  KiB kept")
        for name, row in table.items():
            print(f"{name:34} {row.attention_runs:14} {row.linear_runs:12} {row.bytes_kept / 1024:9.1f}")
    return [row.loss for row in table.values()], table["no checkpoint"].gradients


if __name__ == "__main__":
    launch(train)

"""Wrappers for training loops: context parallelism as a ParallelStyle, and a checkpoint policy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils.checkpoint import CheckpointPolicy

from tritoncp.api.attention import flex_attention
from tritoncp.frontend import dynamo
from tritoncp.ops.autograd import forward_op
from tritoncp.ops.graph.key_exchange import send_keys_op

SAVE_OPS = (forward_op, dynamo.plan_op, dynamo.part_op, send_keys_op)

MASK_NAMES = ("block_mask", "attention_masks", "attention_mask", "mask")
NAMES = {
    **dict.fromkeys(MASK_NAMES, "block_mask"),
    **{
        name: name
        for name in ("score_mod", "scale", "enable_gqa", "return_lse", "kernel_options", "return_aux")
    },
}


def checkpoint_policy(
    otherwise: Callable[..., CheckpointPolicy | bool] | Sequence[Any] | None = None,
) -> Callable[..., CheckpointPolicy | bool]:
    """Return a policy for selective activation checkpointing under which recomputation never communicates.

    It saves attention's out and lse, whose recomputation would send K and V again. ``otherwise`` decides
    about every other op: a policy of yours, a list of ops to save, or None, which recomputes them.

    >>> from functools import partial
    >>> from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
    >>> from tritoncp import causal, flex_attention
    >>> contexts = partial(create_selective_checkpoint_contexts, checkpoint_policy())
    >>> q = torch.randn(1, 1, 32, 16, requires_grad=True)
    >>> layer = lambda x: flex_attention(x.sin(), x, x, causal())
    >>> checkpoint(layer, q, use_reentrant=False, context_fn=contexts).sum().backward()
    """
    if otherwise is not None and not callable(otherwise):
        ops = frozenset(otherwise)
        for op in ops:
            if not isinstance(op, torch._ops.OpOverload):
                raise TypeError(f"ops to save are overloads, as torch.ops.aten.mm.default; got {op!r}")

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy | bool:
        if op in SAVE_OPS:
            return CheckpointPolicy.MUST_SAVE
        if callable(otherwise):
            return otherwise(ctx, op, *args, **kwargs)
        save = otherwise is not None and op in ops
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


class ContextParallel(ParallelStyle):
    """A ParallelStyle that makes a flex-attention module context parallel, through ``parallelize_module``.

    For a module whose forward takes query, key and value first, then any of flex_attention's arguments by
    their names (``block_mask`` may be called ``attention_masks``, ``attention_mask`` or ``mask``); their
    defaults hold. Its forward is replaced by :func:`tritoncp.flex_attention` over the 1-D mesh that is passed
    to parallelize_module. It changes no global state, no context manager and no other module.

    plan:     Plan or global mask for calls that pass none; shards are in its order
    seq_dim:  the sequence's dimension: 2 for [B, H, S_local, D], 1 for [B, S_local, H, D], in and out
    always:   arguments of flex_attention that the module's forward fixes itself, as ``enable_gqa=True``

    Tensors are this rank's shards: plain, or DTensors sharded along the sequence over this mesh alone.

    >>> import torch.distributed as dist
    >>> from torch.distributed.tensor.parallel import parallelize_module
    >>> from tritoncp import causal, create_block_mask, make_plan, shard
    >>> class Attention(nn.Module):
    ...     def forward(self, q, k, v, *, block_mask=None, scale=None):
    ...         return nn.attention.flex_attention.flex_attention(q, k, v, block_mask=block_mask, scale=scale)
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    >>> attention = parallelize_module(Attention(), mesh["cp"], ContextParallel())
    >>> plan = make_plan(create_block_mask(causal(), 1, 1, 64, 64), mesh["cp"])
    >>> q = shard(torch.randn(1, 2, 64, 16), plan, dim=2)
    >>> attention(q, q, q, block_mask=plan).shape
    torch.Size([1, 2, 64, 16])
    >>> dist.destroy_process_group()
    """

    def __init__(self, plan: Any = None, *, seq_dim: int = 2, **always: Any) -> None:
        super().__init__()
        unknown = set(always) - set(NAMES.values())
        if unknown:
            raise TypeError(f"flex_attention has no argument {', '.join(sorted(unknown))}")
        if seq_dim not in (1, 2):
            raise ValueError(f"seq_dim is 2 for [B, H, S, D] or 1 for [B, S, H, D]; got {seq_dim}")
        self.plan, self.seq_dim, self.always = plan, seq_dim, always

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        names, defaults = _parameters(module)
        plan, transposed, always = self.plan, self.seq_dim == 1, self.always

        def forward(*args: Any, **kwargs: Any) -> Any:
            arguments = {**defaults, **dict(zip(names, args)), **kwargs}
            inputs = [arguments.pop(name) for name in names[:3]]
            options = {"block_mask": None, **_rename_arguments(arguments), **always}
            if options["block_mask"] is None:
                options["block_mask"] = plan
            q, k, v = [_local(x, device_mesh, 1 if transposed else 2) for x in inputs]
            if transposed:
                q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            result = flex_attention(q, k, v, **options, mesh=device_mesh)
            out, rest = (result[0], result[1:]) if isinstance(result, tuple) else (result, ())
            out = _as(inputs[0], out.transpose(1, 2) if transposed else out)
            return (out, *rest) if rest else out

        module.forward = forward
        return module

    def __repr__(self) -> str:
        arguments = [f"seq_dim={self.seq_dim}", *(f"{name}={value!r}" for name, value in self.always.items())]
        return f"ContextParallel({', '.join(arguments if self.plan is None else ['plan', *arguments])})"


def _parameters(module: nn.Module) -> tuple[list[str], dict[str, Any]]:
    """Return the positional names of a module's forward, and the defaults of all its parameters."""
    parameters = inspect.signature(module.forward).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    positional = [p.name for p in named if p.kind is not p.KEYWORD_ONLY]
    fits = [(p.name in NAMES) == (place >= 3) for place, p in enumerate(named)]
    if len(positional) < 3 or not all(fits):
        raise TypeError(
            f"{type(module).__name__}.forward takes ({', '.join(p.name for p in parameters)}); "
            "ContextParallel is for the module that takes query, key and value, then arguments of "
            "flex_attention by their names: put it on the inner module that calls flex_attention"
        )
    return positional, {p.name: p.default for p in named[3:] if p.default is not p.empty}


def _rename_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments under flex_attention's own names. Raises TypeError for an unknown name."""
    for name in arguments:
        if name not in NAMES:
            raise TypeError(f"flex_attention has no argument {name!r}; it has {', '.join(sorted(NAMES))}")
    return {NAMES[name]: value for name, value in arguments.items()}


def _local(x: Tensor, mesh: DeviceMesh, seq_dim: int) -> Tensor:
    if not isinstance(x, DTensor):
        return x
    if x.device_mesh != mesh or tuple(x.placements) != (Shard(seq_dim),):
        raise ValueError(
            f"a DTensor {tuple(x.shape)} placed {x.placements} over {x.device_mesh}: ContextParallel takes "
            f"plain shards, or DTensors placed (Shard({seq_dim}),) over the context-parallel mesh alone. "
            "Pass x.to_local(); where heads are sharded too, mods count this rank's heads from 0"
        )
    return x.to_local()


def _as(like: Tensor, out: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return out
    return DTensor.from_local(out, like.device_mesh, like.placements, run_check=False)

"""Wrappers for training loops: context parallelism as a ParallelStyle, and a checkpoint policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils.checkpoint import CheckpointPolicy

from tritoncp.api import dynamo
from tritoncp.api.inner_attention import LAYOUTS, OPTIONS, Signature, run_inner_attention
from tritoncp.ops.autograd import forward_op
from tritoncp.ops.graph.key_exchange import send_keys_op
from tritoncp.ops.reshard import reshard_op

SAVE_OPS = (forward_op, dynamo.plan_op, dynamo.part_op, dynamo.batch_rows_op, send_keys_op, reshard_op)


def checkpoint_policy(
    otherwise: Callable[..., CheckpointPolicy | bool] | Sequence[Any] | None = None,
) -> Callable[..., CheckpointPolicy | bool]:
    """Return a policy for selective activation checkpointing under which recomputation never communicates.

    It saves attention's out and lse, whose recomputation would send K and V again, and what ``reshard``
    returns. ``otherwise`` decides about every other op: a policy of yours, a list of ops to save, or None,
    which recomputes them.

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
    """A ParallelStyle that makes an inner attention module context parallel, through ``parallelize_module``.

    For a module whose forward takes query, key and value first, then any of flex_attention's arguments by
    their names (``block_mask`` may be called ``attention_masks``, ``attention_mask``, ``attn_mask`` or
    ``mask``), ``is_causal`` and ``out_transform``; their defaults hold. Other parameters are passed over as
    long as they are None or have their defaults; what forward's own ``**kwargs`` takes is ignored, but names
    that change attention are refused, as ``dropout_p=0.1`` is. A forward of ``(*args, **kwargs)`` takes
    flex_attention's arguments in its order. forward is replaced by :func:`tritoncp.flex_attention` over the
    mesh that is passed to parallelize_module. Global state, context managers and other modules stay as they
    are.

    plan:     Plan or global mask for calls that pass none; shards are in its order
    seq_dim:  the sequence's dimension: 2 for [B, H, S_local, D], 1 for [B, S_local, H, D], 0 for
              [S_local, H, D], in and out
    always:   arguments that the module's forward fixes itself, as ``enable_gqa=True`` or ``is_causal=True``

    A module with ``is_causal`` is one that calls scaled_dot_product_attention: its mask is causal or full. Of
    a Plan, its own or the call's, it takes the order of tokens alone, so that one plan serves a model whose
    other layers call flex_attention. ``out_transform(out, lse)`` gets both in the module's layout, lse
    without the last dimension.

    Tensors are this rank's shards: plain, or DTensors sharded along the sequence over this mesh, or over a
    mesh that has it as a dimension. Heads may then be sharded along another one (tensor parallelism): mods
    and the plan's mask count the heads of the whole layer.

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
        unknown = set(always) - {*OPTIONS, "block_mask", "is_causal", "out_transform"}
        if unknown:
            raise TypeError(f"flex_attention has no argument {', '.join(sorted(unknown))}")
        if seq_dim not in LAYOUTS:
            raise ValueError(
                f"seq_dim is 2 for [B, H, S, D], 1 for [B, S, H, D] or 0 for [S, H, D]; got {seq_dim}"
            )
        self.plan, self.seq_dim, self.always = plan, seq_dim, always

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        signature, plan, seq_dim, always = Signature.of(module), self.plan, self.seq_dim, self.always

        def forward(*args: Any, **kwargs: Any) -> Any:
            inputs, options = signature.sort(args, kwargs)
            return run_inner_attention(inputs, {**options, **always}, device_mesh, seq_dim, plan)

        module.forward = forward
        return module

    def __repr__(self) -> str:
        arguments = [f"seq_dim={self.seq_dim}", *(f"{name}={value!r}" for name, value in self.always.items())]
        return f"ContextParallel({', '.join(arguments if self.plan is None else ['plan', *arguments])})"

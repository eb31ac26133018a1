"""Wrappers for training loops: context parallelism as a ParallelStyle, and a checkpoint policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils.checkpoint import CheckpointPolicy

from tritoncp.api.inner_attention import LAYOUTS, OPTIONS, Signature, run_inner_attention
from tritoncp.api.plans import MaskLike
from tritoncp.api.selected_keys import select_keys_op
from tritoncp.call import traced
from tritoncp.call.autograd import forward_op
from tritoncp.call.key_exchange import send_keys_op
from tritoncp.call.selected.probabilities import probabilities_op
from tritoncp.core.suggestions import advice
from tritoncp.graph import handle_ops
from tritoncp.graph.reshard import reshard_op
from tritoncp.graph.roll import roll_op

SAVE_OPS = (
    forward_op, probabilities_op, traced.plan_op, handle_ops.part_op, handle_ops.batch_rows_op, send_keys_op,
    reshard_op, roll_op, select_keys_op,
)  # fmt: skip


def checkpoint_policy(
    otherwise: Callable[..., CheckpointPolicy | bool] | Sequence[Any] | None = None,
) -> Callable[..., CheckpointPolicy | bool]:
    """Return a policy for selective activation checkpointing that never communicates in recomputation.

    >>> from functools import partial
    >>> from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
    >>> from tritoncp import causal, flex_attention
    >>> contexts = partial(create_selective_checkpoint_contexts, checkpoint_policy())
    >>> q = torch.randn(1, 1, 32, 16, requires_grad=True)
    >>> layer = lambda x: flex_attention(x.sin(), x, x, causal())
    >>> checkpoint(layer, q, use_reentrant=False, context_fn=contexts).sum().backward()
    >>> policy = checkpoint_policy([torch.ops.aten.mm.default])     # also saves matrix products

    It saves attention's out and lse, whose recomputation would send K and V again, and the results of
    ``reshard`` and ``roll``.

    Args:
        otherwise: decides about all other ops: a policy, or a list of ops to save; None: recompute them.

    Returns:
        A policy ``(ctx, op, *args, **kwargs)`` for ``create_selective_checkpoint_contexts``.

    Raises:
        TypeError: for a list of anything but op overloads.
    """
    if otherwise is not None and not callable(otherwise):
        ops = frozenset(otherwise)
        for op in ops:
            if not isinstance(op, torch._ops.OpOverload):
                raise TypeError(
                    f"otherwise lists {op!r}; op overloads are needed, for example torch.ops.aten.mm.default"
                )

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy | bool:
        if op in SAVE_OPS:
            return CheckpointPolicy.MUST_SAVE
        if callable(otherwise):
            return otherwise(ctx, op, *args, **kwargs)
        save = otherwise is not None and op in ops
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


class ContextParallel(ParallelStyle):
    """Make an inner attention module context parallel: a ParallelStyle for ``parallelize_module``.

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
    >>> attention = parallelize_module(Attention(), mesh["cp"], ContextParallel(plan))  # plan of all calls
    >>> attention(q, q, q).shape
    torch.Size([1, 2, 64, 16])
    >>> dist.destroy_process_group()

    It replaces the module's forward by :func:`tritoncp.flex_attention` over the mesh of parallelize_module;
    no global state, context manager or other module is changed. forward has to begin with query, key and
    value. Other parameters are matched by name with flex_attention's arguments (``block_mask`` may be called
    ``attention_masks``, ``attention_mask``, ``attn_mask`` or ``mask``), ``is_causal`` and ``out_transform``,
    and keep their defaults. An argument of any other name is an error, also in forward's ``**kwargs``, unless
    it is None or the parameter's default: a misspelled mask would be full attention. A forward of ``(*args,
    **kwargs)`` has flex_attention's arguments in its order.

    A module with ``is_causal`` is taken to call scaled_dot_product_attention: its mask is causal or full, and
    only the order of tokens is read from a Plan, so that one plan serves all layers of a model that has both
    kinds. ``out_transform(out, lse)`` gets both in the module's layout, lse without the last dimension.

    Tensors are this rank's shards: plain, or DTensors sharded along the sequence over this mesh, or over a
    mesh that has it as a dimension. Another dimension may shard the heads (tensor parallelism): head indices
    of mods and of the plan's mask are indices in the whole layer.

    Args:
        plan: Plan or global mask for calls that pass none; shards are in its order.
        seq_dim: sequence dimension of inputs and out: 2 for [B, H, S_local, D], 1 for [B, S_local, H, D], 0
            for [S_local, H, D].
        always: arguments for every call, for example ``enable_gqa=True`` or ``is_causal=True``.

    Raises:
        TypeError: for an argument in ``always`` that flex_attention does not have.
        ValueError: for another seq_dim.
    """

    def __init__(self, plan: MaskLike | None = None, *, seq_dim: int = 2, **always: Any) -> None:
        super().__init__()
        known = [*OPTIONS, "block_mask", "is_causal", "out_transform"]
        for name in always:
            if name not in known:
                raise TypeError(
                    f"ContextParallel has no argument {name!r}{advice(name, known)}. It has plan, seq_dim "
                    f"and, for every call, {', '.join(known)}"
                )
        if seq_dim not in LAYOUTS:
            raise ValueError(
                f"seq_dim={seq_dim}: pass 2 for [B, H, S, D], 1 for [B, S, H, D] or 0 for [S, H, D]"
            )
        self.plan, self.seq_dim, self.always = plan, seq_dim, always

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        signature, plan, seq_dim, always = Signature.of(module), self.plan, self.seq_dim, self.always

        def forward(*args: Any, **kwargs: Any) -> Any:
            return run_inner_attention(signature, args, kwargs, device_mesh, seq_dim, plan, always=always)

        module.forward = forward
        return module

    def __repr__(self) -> str:
        arguments = [f"seq_dim={self.seq_dim}", *(f"{name}={value!r}" for name, value in self.always.items())]
        return f"ContextParallel({', '.join(arguments if self.plan is None else ['plan', *arguments])})"

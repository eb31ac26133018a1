"""Adapter from a model's inner attention module to flex_attention: argument names, tensor layouts, DTensors,
and the is_causal argument of scaled_dot_product_attention."""

from __future__ import annotations

import functools
import inspect
import reprlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tritoncp.api.attention import flex_attention
from tritoncp.api.dtensors import mask_of_heads, score_of_head
from tritoncp.api.group_call import group_call
from tritoncp.core.dynamo_boundary import constant_result
from tritoncp.core.suggestions import INSTEAD, advice
from tritoncp.graph import handle_ops
from tritoncp.masks.closed_forms import causal
from tritoncp.masks.traced_mask import TracedMask
from tritoncp.planning.plan import Plan

MASK_NAMES = ("block_mask", "attention_masks", "attention_mask", "attn_mask", "mask")
OPTIONS = ("score_mod", "scale", "enable_gqa", "return_lse", "kernel_options", "return_aux")
# Parameters that a forward(*args, **kwargs) is assumed to have: flex_attention's, in its order.
CALL = (
    "query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa", "return_lse", "kernel_options",
)  # fmt: skip
KNOWN = (*OPTIONS, *MASK_NAMES, "is_causal", "out_transform")


class Signature(NamedTuple):
    """The parameters of an inner attention module's forward.

    names:    names of positional arguments; the first three are query, key and value
    defaults: defaults of the other parameters
    """

    names: tuple[str, ...]
    defaults: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> Signature:
        """Read a module's signature. Raises TypeError unless forward begins with query, key and value."""
        parameters = list(inspect.signature(module.forward).parameters.values())
        kinds = {p.kind for p in parameters}
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        if not named and inspect.Parameter.VAR_POSITIONAL in kinds:
            return cls(CALL, {})
        positional = tuple(p.name for p in named if p.kind is not p.KEYWORD_ONLY)
        fits = len(positional) >= 3 and not any(name in KNOWN for name in positional[:3])
        owned = sum(1 for _ in module.parameters())
        if not fits or owned:
            also = f" and has {owned} parameters of its own" if fits else ""
            raise TypeError(
                f"{type(module).__name__}.forward takes ({', '.join(p.name for p in parameters)}){also}; "
                "ContextParallel is for the module that takes query, key and value, then arguments of "
                "flex_attention by their names: put it on the inner module that calls flex_attention"
            )
        defaults = {p.name: p.default for p in named[3:] if p.default is not p.empty}
        return cls(positional, defaults)

    def sort(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return ([query, key, value], {name: other argument that is not None}). Raises TypeError for an
        unknown argument, unless it is None or equals the parameter's default. (If it were ignored, a
        misspelled mask would be full attention.)"""
        if len(args) > len(self.names):
            raise TypeError(f"{len(args)} positional arguments; forward takes {', '.join(self.names)}")
        arguments = {**self.defaults, **dict(zip(self.names, args)), **kwargs}
        missing = [name for name in self.names[:3] if name not in arguments]
        if missing:
            raise TypeError(f"forward needs {', '.join(self.names[:3])}; without {', '.join(missing)}")
        inputs = [arguments.pop(name) for name in self.names[:3]]
        options: dict[str, Any] = {}
        for name, value in arguments.items():
            if value is None or self._is_ignored(name, value):
                continue
            if name not in KNOWN:
                raise TypeError(
                    f"{name}={reprlib.repr(value)}: ContextParallel has no argument {name!r}"
                    f"{advice(name, KNOWN)}. It has {', '.join(KNOWN)}; others of forward have to be None or "
                    "their defaults"
                )
            name = "block_mask" if name in MASK_NAMES else name
            if name in options and options[name] is not value:
                raise TypeError(f"{name} and another mask in one call: pass one of them")
            options[name] = value
        return inputs, options

    def _is_ignored(self, name: str, value: Any) -> bool:
        """Return whether an argument that ContextParallel does not have may be ignored: it is the default, or
        a value with which a keyword of INSTEAD changes nothing."""
        if name in KNOWN:
            return False
        is_plain = isinstance(value, bool | int | float | str)
        if name in INSTEAD:
            return (is_plain and not value) or (isinstance(value, tuple) and value == (-1, -1))
        default = self.defaults.get(name, inspect.Parameter.empty)
        return value is default or (is_plain and value == default)


class Layout(NamedTuple):
    """The indices of the batch, head and sequence dimensions of a module's tensors; channels come last."""

    batch: int | None
    seq: int
    heads: int

    def to_call(self, x: Tensor) -> Tensor:
        """Return a tensor as [B, H, S, D]."""
        if x.ndim != (3 if self.batch is None else 4):
            needed = {0: "[T, H, D]", 1: "[B, S, H, D]", 2: "[B, H, S, D]"}[self.seq]
            raise ValueError(f"the tensor is {tuple(x.shape)}; with seq_dim={self.seq}, {needed} is needed")
        if self.batch is None:
            return x.transpose(0, 1).unsqueeze(0)
        return x.transpose(1, 2) if self.seq == 1 else x

    def from_call(self, x: Tensor) -> Tensor:
        """Return a tensor [B, H, S, ...] in this layout."""
        if self.batch is None:
            return x.squeeze(0).transpose(0, 1)
        return x.transpose(1, 2) if self.seq == 1 else x


LAYOUTS = {0: Layout(None, 0, 1), 1: Layout(0, 1, 2), 2: Layout(0, 2, 1)}


@group_call
def run_inner_attention(
    signature: Signature, args: Sequence[Any], kwargs: dict[str, Any], mesh: DeviceMesh | None, seq_dim: int,
    plan: Any = None, first_head: int | None = None, always: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Run flex_attention on the arguments of an inner module's forward: in its layout, plain or DTensors.

    args, kwargs: query, key and value, arguments of flex_attention, is_causal of
        scaled_dot_product_attention, and out_transform, which is called with plain tensors out and lse [...,
        heads] in the module's layout
    mesh: the context-parallel mesh; may be None for DTensors whose mesh has a dimension "cp"
    plan: Plan or mask for calls that pass none
    first_head: index in the layer of the tensors' first head, for plain tensors with a part of the heads
    always: arguments that replace the call's arguments
    """
    inputs, options = signature.sort(args, kwargs)
    layout, options = LAYOUTS[seq_dim], {**options, **(always or {})}
    is_causal, out_transform = options.pop("is_causal", None), options.pop("out_transform", None)
    mask = resolve_mask(options.pop("block_mask", None), plan, is_causal)
    q = inputs[0]
    if any(isinstance(x, DTensor) for x in inputs):
        mesh, head_dim = _check_placements(inputs, mesh, layout)
        if head_dim is not None:
            first_head = _first_head(q.device_mesh, head_dim, q.shape[layout.heads])
        inputs = [x.to_local() for x in inputs]
    if first_head is not None:
        mask = mask_of_heads(mask, first_head, inputs[0].shape[layout.heads])
        if options.get("score_mod") is not None:
            options["score_mod"] = functools.partial(score_of_head, options["score_mod"], first_head)
    query, key, value = [layout.to_call(x) for x in inputs]
    if out_transform is not None:
        if options.get("return_lse") or options.get("return_aux") is not None:
            raise TypeError("out_transform with return_lse or return_aux: pass one (out_transform gets lse)")
        options["return_lse"] = True
    result = flex_attention(query, key, value, block_mask=mask, mesh=mesh, **options)
    if out_transform is not None:
        return _as(q, out_transform(*map(layout.from_call, result)))
    if isinstance(result, tuple):
        return (_as(q, layout.from_call(result[0])), *result[1:])
    return _as(q, layout.from_call(result))


def resolve_mask(mask: Any, plan: Any, is_causal: bool | None) -> Any:
    """Return the mask of a call: ``mask``, else ``plan``. If is_causal is not None, the module calls
    scaled_dot_product_attention: the mask is causal or full, in the order of the Plan if there is one."""
    mask = plan if mask is None else mask
    if is_causal is None:
        return mask
    if mask is None:
        return causal() if is_causal else None
    if isinstance(mask, Plan):
        if torch.compiler.is_dynamo_compiling():
            return TracedMask(handle_ops.view_op(mask.handle, 0, 0, int(is_causal)))
        return mask.of_sdpa(bool(is_causal))
    if is_causal:
        raise ValueError(
            "is_causal=True and a mask in one call, which scaled_dot_product_attention refuses too: pass "
            "is_causal=False with the mask, or a Plan, of which is_causal=True uses the order of tokens alone"
        )
    return mask


def _check_placements(
    inputs: Sequence[Any], mesh: DeviceMesh | None, layout: Layout
) -> tuple[DeviceMesh | None, int | None]:
    """Check the placements of DTensors; return their context-parallel mesh, and the dimension of their mesh
    that shards heads."""
    q = inputs[0]
    for x in inputs:
        if not isinstance(x, DTensor) or x.device_mesh != q.device_mesh:
            raise ValueError(
                "query, key and value are a mixture of plain tensors and DTensors, or on different meshes: "
                "pass three plain tensors, or DTensors over one mesh"
            )
    context = _context_dim(q.device_mesh, mesh)
    if mesh is None and context >= 0:
        mesh = q.device_mesh["cp"]
    heads = None
    for x in inputs:
        for dim, placement in enumerate(x.placements):
            on_heads = placement == Shard(layout.heads)
            of_batch = layout.batch is not None and placement == Shard(layout.batch)
            fits = placement == Shard(layout.seq) if dim == context else (
                on_heads or of_batch or placement == Replicate()
            )  # fmt: skip
            if not fits or placement != q.placements[dim] or (on_heads and heads not in (None, dim)):
                raise ValueError(
                    f"query, key or value is a DTensor {tuple(x.shape)} placed {x.placements} over "
                    f"{x.device_mesh}: ContextParallel needs plain shards, or three DTensors of equal "
                    f"placement, (Shard({layout.seq}),) over the context-parallel mesh, or over a mesh of "
                    "which that is a dimension and another one shards heads "
                    f"(Shard({layout.heads})) or the batch"
                )
            heads = dim if on_heads else heads
    return mesh, heads


@constant_result
def _context_dim(mesh: DeviceMesh, context: DeviceMesh | None) -> int:
    """Return which dimension of a mesh is the context-parallel mesh, -1 if none is."""
    if context is None:
        names = mesh.mesh_dim_names or ()
        return names.index("cp") if "cp" in names else -1
    if context.ndim > 1:
        return -1
    name = context.get_group().group_name
    return next((i for i in range(mesh.ndim) if mesh.get_group(i).group_name == name), -1)


@constant_result
def _first_head(mesh: DeviceMesh, dim: int, heads: int) -> int:
    """Return the index of this rank's first head if mesh dimension ``dim`` shards the heads."""
    if heads % mesh.size(dim):
        raise ValueError(
            f"{heads} heads cannot be sharded evenly over {mesh.size(dim)} ranks: use a degree of tensor "
            "parallelism that divides them"
        )
    return mesh.get_local_rank(dim) * (heads // mesh.size(dim))


def _as(like: Any, out: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return out
    return DTensor.from_local(out, like.device_mesh, like.placements, run_check=False)

"""The arguments of one call of `flex_attention`, sorted, and their sizes."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from tritoncp.call import call_mods
from tritoncp.call.expand import Expansion
from tritoncp.call.sinks import with_sinks
from tritoncp.distributed import groups
from tritoncp.masks.mask import Mask
from tritoncp.masks.mask_mod import MaskMod
from tritoncp.masks.traced_mask import TracedMask
from tritoncp.planning.plan import Plan
from tritoncp.selection.selection import Selection, SelectionAuxOutput, SelectionAuxRequest

MASKS = (BlockMask, Mask, MaskMod, Plan, TracedMask)


class Arguments(NamedTuple):
    """The arguments of one call of `flex_attention`, as they were passed but sorted (:func:`sort_arguments`).

    :func:`tritoncp.call.check_arguments.check_call` replaces ``expand`` by its record, and adds the kind of
    the call; None: one of a graph, or of a simulated world.
    """

    query: Any
    key: Any
    value: Any
    score_mod: Any = None
    block_mask: Any = None
    mesh: Any = None
    scale: float | None = None
    enable_gqa: bool = False
    return_lse: bool = False
    kernel_options: dict[str, Any] | None = None
    return_aux: AuxRequest | SelectionAuxRequest | None = None
    positions: Tensor | None = None
    sinks: Tensor | None = None
    batch_offset: int | None = None
    expand: Any = None
    selected: Any = None
    kind: CallKind | None = None

    @property
    def returns(self) -> tuple[str, ...]:
        """Names of the requested results besides out."""
        aux, sinks = self.return_aux, ("sinks",) * (self.sinks is not None)
        if aux is None:
            return ("lse", *sinks) if self.return_lse else sinks
        names = ("lse",) * (self.return_lse or aux.lse) + ("max_scores",) * aux.max_scores
        return names + ("probabilities",) * self.wants_probabilities + sinks

    @property
    def wants_probabilities(self) -> bool:
        """Whether the probabilities of the selected keys are requested."""
        aux = self.return_aux
        return isinstance(aux, SelectionAuxRequest) and aux.probabilities

    def results(self, outs: Sequence[Tensor]) -> Any:
        """Return the requested results, sinks included: out, (out, lse) or (out, aux). outs: out, lse, and
        max_scores and probabilities if they were requested"""
        out, lse, *rest = outs
        if self.sinks is not None:
            out, lse = with_sinks(out, lse, self.sinks, bool((self.kernel_options or {}).get("invariant")))
        if (aux := self.return_aux) is not None:
            found = lse if aux.lse else None, rest[0] if aux.max_scores else None
            if isinstance(aux, SelectionAuxRequest):
                return out, SelectionAuxOutput(*found, rest[-1] if aux.probabilities else None)
            return out, AuxOutput(*found)
        return (out, lse) if self.return_lse else out


class ShardSizes(NamedTuple):
    """Sizes of a rank's query [batch, heads, rows, dim] and key [.., kv_heads, kv_rows, dim].

    latent:   channels per token of the latent from which ``expand=`` computes keys and values, 0 without it
    selected: max keys that a query selects with ``selected=``, 0 without it
    """

    batch: int
    heads: int
    rows: int
    dim: int
    kv_heads: int
    kv_rows: int
    latent: int = 0
    selected: int = 0

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, expand: Expansion | None = None, selected: Any = None
    ) -> ShardSizes:
        batch, heads, rows, dim = query.shape
        count = 0 if selected is None else count_selected(selected)
        if expand is None:
            return cls(batch, heads, rows, dim, key.shape[1], key.shape[2], 0, count)
        latent = key.shape[1] * key.shape[3]
        return cls(batch, heads, rows, dim, expand.sizes[0], key.shape[2], latent, count)

    @property
    def layer(self) -> dict[str, int] | None:
        """Sizes of a layer with latents or selected keys, for the choice of a schedule; None: a standard
        layer. Selected keys are rounded up to a power of two: few plans serve all numbers of keys, and
        one plan a choice of keys and the attention to them."""
        layer = {}
        if self.latent:
            names = "heads", "kv_heads", "head_dim", "latent"
            sizes = self.heads, self.kv_heads, self.dim, self.latent
            layer = dict(zip(names, sizes, strict=True))
        if self.selected:
            layer["selected"] = 1 << (self.selected - 1).bit_length()
        return layer or None


def count_selected(selected: Any) -> int:
    """Return the max keys that a query selects; 0 for what is no selection, which a later check refuses."""
    if not isinstance(selected, Selection) or not isinstance(selected.block_size, int):
        return 0
    indices = selected.indices
    return indices.shape[3] * selected.block_size if isinstance(indices, Tensor) and indices.ndim == 4 else 0


class CallKind:
    """Properties of calls that one check covers. Kinds are compared by identity.

    sizes:        sizes of the shards
    shares_batch: whether keys or values of batch size 1 serve several batch rows of queries
    ranks:        weak reference to their process group; None: all ranks are in this process
    is_kept:      whether later calls have this kind too, so that results for it are worth caching
    """

    __slots__ = "is_kept", "ranks", "shares_batch", "sizes"

    def __init__(self, call: Arguments, group: Any, is_kept: bool) -> None:
        q, k, v = call[:3]
        self.sizes = ShardSizes.of(q, k, call.expand, call.selected)
        self.shares_batch = not q.shape[0] == k.shape[0] == v.shape[0]
        self.ranks, self.is_kept = group and weakref.ref(group), is_kept


def sort_arguments(score_mod: Any, block_mask: Any, mesh: Any) -> tuple[Any, Any, Any]:
    """Return (score_mod, block_mask, mesh) from the fourth and fifth argument and mesh=: calls are
    ``(q, k, v, block_mask, mesh)`` or torch's ``(q, k, v, score_mod, block_mask, mesh=mesh)``."""
    if type(score_mod) is not FunctionType and isinstance(score_mod, MASKS):
        if block_mask is None:
            return None, score_mod, mesh
        if isinstance(block_mask, MASKS):
            raise TypeError(
                "block_mask: the fourth and the fifth argument are both masks; pass one of them (a score_mod "
                "is the fourth argument)"
            )
        if mesh is not None:
            raise TypeError("mesh is both the fifth argument and mesh=: pass one of them")
        return None, score_mod, block_mask
    if callable(score_mod):
        if not torch.compiler.is_dynamo_compiling():  # would recompile for every function
            call_mods.check_score_mod(score_mod)
    elif score_mod is not None:
        raise TypeError(
            f"score_mod, the fourth argument, is a {type(score_mod).__name__}; a score_mod, a mask or a Plan "
            f"is needed{_hint(score_mod)}"
        )
    if block_mask is None or isinstance(block_mask, MASKS):
        return score_mod, block_mask, mesh
    if callable(block_mask):
        raise TypeError(
            "block_mask is a function; a mask is needed: make it with create_block_mask(mask_mod, B, H, "
            "Q_LEN, KV_LEN)"
        )
    if isinstance(block_mask, Tensor):
        raise TypeError(f"block_mask is a Tensor; a mask or a Plan is needed{_hint(block_mask)}")
    if score_mod is not None:
        raise TypeError(
            f"block_mask, after a score_mod, is a {type(block_mask).__name__}; a mask or a Plan is needed: "
            "pass a mesh by name, mesh=..."
        )
    if not groups.is_mesh(block_mask):
        raise TypeError(
            f"block_mask, the fifth argument, is a {type(block_mask).__name__}; a mask, a Plan or a mesh is "
            f"needed{_hint(block_mask)}"
        )
    return None, None, block_mask


def _hint(argument: Any) -> str:
    """Return the end of an error about an argument that is not a mask: how to get one."""
    if isinstance(argument, Mapping):
        return f": pass the value of this layer, of {', '.join(map(repr, argument))}"
    if isinstance(argument, Tensor):
        return "; a dense mask becomes one by create_block_mask(lambda b, h, q, kv: mask[q, kv], ...)"
    return ""

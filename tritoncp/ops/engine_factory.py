"""Choice of the engine of a call (Triton kernels or the CPU engine), and the form of its mods."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from tritoncp.core.tracing import WideGradients
from tritoncp.core.upload import upload
from tritoncp.cpu.engine import CpuEngine
from tritoncp.cpu.pointwise import adds_only
from tritoncp.mods import Mod
from tritoncp.mods.mod import arguments, structure_of
from tritoncp.mods.translate import deterministic_sum
from tritoncp.ops import call_mods


@dataclass(frozen=True)
class Spec:
    """The constant part of a call. Captures of the score_mod are arguments; the plan has the mask_mod."""

    score: str | None  # digest of a Mod that the caller keeps alive
    graph_score: str | None  # or structure of a score_mod in a compiled graph, see ops/graph/inputs.py
    wants: tuple[int, ...]  # indices of captured tensors that require gradients
    numbers: tuple[str, ...]  # kinds of the numbers that the score_mod captures, "i" or "f"
    want_max: bool
    world: str | None  # process group by name; "" = all ranks in lockstep
    options: tuple[tuple[str, Any], ...] = ()
    returns: tuple[str, ...] = ()  # results besides out: "lse", "max_scores"; "sinks" if the call has some

    @classmethod
    @lru_cache(256)
    def encoded(cls, *fields: Any) -> str:
        """Encode a spec with these fields; cached, as every call needs it."""
        return cls(*fields).encode()

    def encode(self) -> str:
        """Write the spec as JSON text, which ops take as an argument."""
        return json.dumps(vars(self))

    @classmethod
    @lru_cache(256)
    def decode(cls, text: str) -> Spec:
        """Read the spec of :meth:`encode`; cached, as every call needs it."""
        raw = json.loads(text)
        raw["options"] = tuple((name, value) for name, value in raw["options"])
        return cls(**raw | {name: tuple(raw[name]) for name in ("wants", "numbers", "returns")})


def score_structure(spec: str) -> Mod | None:
    """Return the score_mod that a spec names, without captures. The caller keeps it alive as long as the spec
    may run."""
    digest = Spec.decode(spec).score
    return None if digest is None else structure_of(digest)


def score_kind(spec: Spec) -> int:
    """Return the kind of score_mod by which tiles are looked up: 0 for none, 2 for one that loads a value for
    each score, else 1, as for every score_mod in a compiled graph, which is not translated yet."""
    if spec.score is None:
        return int(spec.graph_score is not None)
    return 2 if structure_of(spec.score).loads == 2 else 1


def uses_triton(device: torch.device) -> bool:
    """Return whether calls on a device run Triton kernels: on GPUs, and on the CPU if TRITON_INTERPRET=1."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET", "0") == "1"


def make_engine(
    spec: Spec,
    scale: float,
    mask: Mod | None,
    q: Tensor,
    captures: Sequence[Tensor],
    ints: Sequence[int],
    floats: Sequence[float],
    grads: Sequence[Tensor] = (),
    measured: Mapping[str, Any] = MappingProxyType({}),
    cache: dict[Any, Any] | None = None,
    first_row: int = 0,
) -> Any:
    """Make the engine of one call. ``grads``: a buffer for each capture in ``spec.wants``; ``measured``:
    options for which the caller passed no value; ``cache``, ``first_row``: see TritonEngine."""
    score, grads = _score(spec, q, captures, ints, floats, grads)
    if score and score.graph is None and any(grad.dtype is torch.int64 for grad in grads):
        raise ValueError(
            "this score_mod is hand-written @triton.jit code whose gradient adds floats with atomics, and "
            "deterministic results are asked for; write it in Python, or pass captures that need no gradient"
        )
    if uses_triton(q.device):
        from tritoncp.kernels.engine import TritonEngine
        from tritoncp.kernels.options import check_options
        from tritoncp.kernels.tile_rules import architecture

        by_hand = any(mod is not None and mod.graph is None for mod in (mask, score))
        # Hand-written mods get one head at a time (h is a scalar), so GQA heads cannot be packed.
        unpacked = {"PACK_GQA": False} if by_hand else {}
        options = {**measured, **unpacked, **dict(spec.options)}
        if spec.options:  # options of a compiled call are not checked before
            check_options(dict(spec.options), architecture(q.device))
        mods = kernel_mods(mask, score, q.device, grads)
        return TritonEngine(mods, scale, options, first_row=first_row, launch_cache=cache)
    _warn_eager()
    if score is None:
        return CpuEngine(scale, _bind_mask(mask), first_row=first_row)
    dtype = torch.promote_types(q.dtype, torch.float32)
    return replace(_differentiable(scale, mask, score, dtype, grads), first_row=first_row)


def _differentiable(
    scale: float, mask: Mod | None, score: Mod, dtype: torch.dtype, grads: Sequence[Tensor]
) -> CpuEngine:
    """Make a CPU engine that sums gradients of captures in ``dtype``, also those of narrower dtypes."""
    graph, targets = _graph_of(score), [score.tensors[i] for i in score.wants]
    call: Callable[..., Any] = graph
    if any(x.dtype.itemsize < dtype.itemsize for x in targets):
        call = WideGradients(graph, dtype).run
        targets = [x.to(torch.promote_types(x.dtype, dtype)) for x in targets]

    def bind(captures: Sequence[Tensor]) -> Any:
        inner = list(score.tensors)
        for index, tensor in zip(score.wants, captures, strict=True):
            inner[index] = tensor
        return _bind(call, inner, score.numbers)

    return CpuEngine(scale, _bind_mask(mask), bind, targets, grads, adds_only=adds_only(graph))


def rebind(
    engine: Any,
    spec: Spec,
    device: torch.device,
    captures: Sequence[Tensor],
    ints: Sequence[int],
    floats: Sequence[float],
    grads: Sequence[Tensor],
) -> Any:
    """Return a cached TritonEngine with the captures of this call."""
    if not (captures or ints or floats):
        return engine
    caps = arguments(upload(captures, device), _numbers(spec, ints, floats))
    return engine.with_captures(caps, _bind_score(spec, captures, ints, floats).dcaps(grads) if grads else ())


def kernel_mods(
    mask: Mod | None, score: Mod | None, device: torch.device, grads: Sequence[Tensor] = ()
) -> Any:
    """Make the kernels' form of user functions. mask: a mod whose captures are on the device; ``grads``: a
    buffer for each capture that requires a gradient.

    A score_mod may capture 0-d CPU tensors, which torch combines with tensors on any device. They may be
    edited between calls, so every call copies them.
    """
    from tritoncp.kernels.operands import Mods

    if score is not None:
        score.check_kernels()
    return Mods(
        mask=mask and mask.fn,
        mask_caps=mask.caps() if mask else (),
        score=score and score.fn,
        score_grad=score and score.grad,
        score_back=score and score.back,
        score_caps=score.caps(upload(score.tensors, device)) if score else (),
        score_loads=score.loads if score else 0,
        score_dcaps=score.dcaps(grads) if score and grads else (),
    )


def gradient_buffers(spec: Spec, captures: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    """Allocate zeros for the gradients of captures: floats that kernels add to in any order, or, for
    deterministic results, integers, whose sum does not depend on the order."""
    deterministic = dict(spec.options).get("deterministic", torch.are_deterministic_algorithms_enabled())
    if deterministic and uses_triton(like.device):
        return [deterministic_sum.buffer(captures[i], like.device) for i in spec.wants]
    return [torch.zeros(captures[i].shape, dtype=like.dtype, device=like.device) for i in spec.wants]


def sum_gradients(spec: Spec, captures: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Convert the sums in the buffers to gradients of captures, in their own dtypes."""
    totals = [deterministic_sum.total(grad) if grad.dtype is torch.int64 else grad for grad in grads]
    return [total.to(captures[i].dtype) for total, i in zip(totals, spec.wants, strict=True)]


def _warn_eager() -> None:
    """Warn once that the CPU engine runs instead of the kernels."""
    if not _WARNED:
        _WARNED.append(True)
        warnings.warn(
            "tensors on the CPU run in plain torch (the CPU engine). "
            "To run the Triton kernels here, interpreted, set TRITON_INTERPRET=1 before Python starts",
            stacklevel=2,
        )


_WARNED: list[bool] = []


def score_of(
    spec: Spec, q: Tensor, captures: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float]
) -> Mod | None:
    """Return the score_mod of a call with its captures."""
    return _score(spec, q, captures, ints, floats, ())[0]


def _score(
    spec: Spec,
    q: Tensor,
    captures: Sequence[Tensor],
    ints: Sequence[int],
    floats: Sequence[float],
    grads: Sequence[Tensor],
) -> tuple[Mod | None, Sequence[Tensor]]:
    """Return the score_mod with the captures of this call, and the buffers in the order of its ``wants``."""
    if spec.graph_score is not None:
        leaves = [tensor.detach().requires_grad_(i in spec.wants) for i, tensor in enumerate(captures)]
        from tritoncp.ops.graph import inputs  # loads Dynamo, which plans do without

        mod = call_mods.score_of(inputs.rebuild(spec.graph_score, leaves, ints), q)
        assert mod is not None
        buffers = {id(leaves[i]): grad for i, grad in zip(spec.wants, grads)}
        return mod, [buffers[id(mod.tensors[i])] for i in mod.wants] if grads else ()
    return (_bind_score(spec, captures, ints, floats), grads) if spec.score is not None else (None, ())


def _bind_score(spec: Spec, captures: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float]) -> Mod:
    """Return the score_mod that the spec names, with the captures of this call."""
    assert spec.score is not None
    return structure_of(spec.score).with_captures(captures, _numbers(spec, ints, floats))


def _numbers(spec: Spec, ints: Sequence[int], floats: Sequence[float]) -> tuple[int | float, ...]:
    """Return the numbers that a score_mod captures, in its order."""
    if not spec.numbers:
        return ()
    integers, real = iter(ints), iter(floats)
    return tuple([next(integers) if kind == "i" else next(real) for kind in spec.numbers])


def _bind_mask(mod: Mod | None) -> Any:
    """Return a mask_mod for the CPU engine: its torch graph with its captures."""
    if mod is None:
        return None
    return _bind(_graph_of(mod), mod.tensors, mod.numbers)


def _graph_of(mod: Mod) -> GraphModule:
    """Return the torch graph of a mod. Raises ValueError for a hand-written Triton function."""
    if mod.graph is None:
        raise ValueError(
            "a hand-written @triton.jit mod needs Triton: run on a GPU, or interpreted with "
            "TRITON_INTERPRET=1"
        )
    return mod.graph


def _bind(graph: Callable[..., Any], tensors: Sequence[Tensor], numbers: Sequence[int | float]) -> Any:
    """Return a function of indices that calls a graph with these captures."""
    return lambda *indices: graph(*indices, *tensors, *numbers)


def name_functions() -> None:
    """Have Triton hash all functions that kernels call, in a fixed order. Called before the first launch.

    The key of a compiled kernel depends on what the process has hashed before: a caller's hash holds the
    global constants of its callees, but only of those that were hashed already (triton 3.7.1, in
    ``DependenciesFinder._update_hash``). Without this, one process misses the cached kernels of another.
    """
    from tritoncp.kernels import (
        backward,
        forward,
        forward_gluon,
        forward_specialised,
        scores,
        tile_runs,
        tiles,
    )
    from tritoncp.mods.translate import triton_helpers

    modules = tiles, tile_runs, scores, triton_helpers, forward, forward_specialised, backward
    for module in modules if tiles.INTERPRETED else (*modules, forward_gluon):  # Gluon cannot be interpreted
        for function in vars(module).values():
            if getattr(function, "__module__", "") == module.__name__:
                _ = getattr(function, "cache_key", None)  # jit functions have one

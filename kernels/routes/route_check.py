"""Verification of alternative forward routes before their first use.

Compilers have miscompiled such loops without an error (triton#8311, fla#988), and a route may never have run
on this kind of GPU. The first step of each kind in a process runs by the route and by the loops, and the
results are compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton.errors import TritonError

from tritoncp.core.bounded_cache import BoundedCache
from tritoncp.core.log_lines import area_logger, log_decision
from tritoncp.kernels.options import WRONG_ROUTE
from tritoncp.kernels.tiles import INTERPRETED

if TYPE_CHECKING:
    from tritoncp.kernels.engine import TritonEngine

COMPILED = not INTERPRETED  # interpreted kernels cannot be miscompiled
OUT_TOLERANCE = 2  # rounding errors of the inputs' dtype, relative to the max of a row of out
STATS_TOLERANCE = 1e-3  # allowed errors of lse and max_scores, absolute and relative

engine_log = area_logger("engine")
_VERDICTS: BoundedCache[Any, str] = BoundedCache(256)  # faults by kind of step; "" if the results agree


def verify_route(engine: TritonEngine, launch: Callable[..., Any], step: Any) -> str | None:
    """Compare a route with the loops at the first step of each kind. Returns None if the results agree, else
    the reason why the route must not be used. Leaves the tensors as they are.

    launch: prepares a step by the route, with the engine and the step of :meth:`TritonEngine.forward`
    """
    if not COMPILED:
        return None
    q, k, v, tables, *results, load_state, store_state = step
    flags = *(x is None for x in results), load_state, store_state
    blocks = tables.mask, tables.has_masked, bool(tables.window), tables.q_block, tables.kv_block
    dims = q.shape[3], v.shape[3], q.shape[1] // k.shape[1]
    kind = engine.kernel_set, q.device, q.dtype, dims, flags, blocks
    verdict = _VERDICTS.get(kind)
    if verdict is None:
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            return "its first call of a kind is compared with 'loops', which a graph cannot capture"
        uncached = replace(engine, launches={})  # the results below have different layouts
        verdict = _compare_with_loops(partial(launch, uncached), uncached.loops, step) or ""
        _VERDICTS[kind] = verdict
        outcome = verdict or "agrees with 'loops'"
        log_decision(engine_log, "route %s on %s: %s", engine.route, q.device, outcome)
    return verdict or None


def _compare_with_loops(launch: Callable[..., Any], loops: Callable[..., Any], step: Any) -> str | None:
    try:
        actual = _run_step(launch, step)
    except (TritonError, RuntimeError) as error:  # RuntimeError: raised by a pass of the compiler
        first: BaseException = error
        while first.__cause__:
            first = first.__cause__
        message = str(first).strip().splitlines() or ["no message"]
        return f"it fails: {type(first).__name__}: {message[-1]}"
    return _describe_difference(actual, _run_step(loops, step), step.q.dtype)


def _run_step(route: Callable[..., Any], step: Any) -> dict[str, Tensor]:
    """Run a step into fresh memory and return its results by name; a stored state is converted to its out and
    lse."""
    names = [name for name in ("out", "lse", "max_scores") if getattr(step, name) is not None]
    results = {name: torch.full_like(getattr(step, name), torch.nan) for name in names}
    state = step.state and [x.clone() for x in step.state]
    route(step._replace(state=state, **results))()
    if not step.store_state:
        return results
    acc, m, l = state
    return {"out": acc.div_(l[..., None]), "lse": l.log2_().add_(m)}


def _describe_difference(
    actual: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype
) -> str | None:
    """Describe the first result that differs by more than rounding; None if all agree."""
    rounding = OUT_TOLERANCE * torch.finfo(dtype).eps
    for key, whole in actual.items():
        wrong: Any = 0
        for at in itertools.product(*map(range, whole.shape[:2])):  # one head at a time, to save memory
            a, b = whole[at].float(), expected[key][at].float()
            size = b.abs().nan_to_num(0, 0)
            tolerance = (
                rounding * size.amax(-1, keepdim=True) if key == "out" else STATS_TOLERANCE * (size + 1)
            )
            equal = ((a - b).abs() <= tolerance) | (a == b) | (a.isnan() & b.isnan())
            wrong += equal.logical_not_().sum()
        if wrong:
            return (
                f"{WRONG_ROUTE}: {key} differs in {int(wrong)} of {whole.numel()} "
                "numbers (miscompiled: please report it, with the output of `tritoncp doctor`)"
            )
    return None

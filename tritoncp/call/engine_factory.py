"""Choice of the engine of a call, Triton kernels or the CPU engine, and conversion of the call's mods for
it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tritoncp.call import call_mods
from tritoncp.call.expand import ExpandingEngine
from tritoncp.call.facts import Call, EngineKey, Facts
from tritoncp.call.selected.engines import look_up, selected_rows
from tritoncp.core.bounded_cache import BoundedCache
from tritoncp.core.environment import cpu_target, executed_target
from tritoncp.core.log_lines import area_logger, log_decision
from tritoncp.core.upload import DeviceCopy, upload
from tritoncp.core.versions import warn_untested
from tritoncp.cpu.engine import CpuEngine
from tritoncp.kernels.layouts import layout_of, specialisation_of
from tritoncp.kernels.options import PINNED, ROUTES, check_options, warn_left_out
from tritoncp.kernels.tile_rules import architecture
from tritoncp.measured_tiles import tile_lookup, tile_tables, tune_on_first_call
from tritoncp.mods import Mod, deterministic_sum
from tritoncp.mods.tracing import OwnGradient, WideGradients
from tritoncp.planning.derived import PlanCache
from tritoncp.planning.step_tables import Engine
from tritoncp.selection.cpu_engine import SelectedCpuEngine

if TYPE_CHECKING:
    from tritoncp.kernels.engine import TritonEngine  # late: it imports all kernels

    KeptEngine = tuple[TritonEngine, DeviceCopy[Mod] | None]

engine_log, cache_log = area_logger("engine"), area_logger("cache")
MAX_ENGINES = 256  # max engines of one plan
MAX_LAUNCHES = 1024  # max launches of one engine, by kernel, tables, first head and flags
MAX_STEPS = 256  # max steps of the CPU engine, for one plan
# Of each plan: engines without the captures of the score_mod, each with its mask_mod on the device; steps of
# the CPU engine, by tables, shapes, first row and head.
ENGINES: PlanCache[BoundedCache[EngineKey, KeptEngine]] = PlanCache(lambda: BoundedCache(MAX_ENGINES))
_CPU_STEPS: PlanCache[BoundedCache[Any, Any]] = PlanCache(lambda: BoundedCache(MAX_STEPS))


CPU_ENGINE_LINE = (
    "tensors on the CPU run on the CPU engine, in plain torch. "
    "To run the Triton kernels here, interpreted, set TRITON_INTERPRET=1 before Python starts"
)


def score_kind(score: Mod | None) -> int:
    """Return the kind of score_mod in tables of tile shapes: 0 for none, 2 if it loads a value for each
    score, else 1."""
    return 0 if score is None else 2 if score.loads == 2 else 1


def uses_triton(device: torch.device) -> bool:
    """Return whether calls on a device run Triton kernels: on GPUs, and on the CPU if kernels are interpreted
    (TRITON_INTERPRET=1) or executed (``tritoncp.executor``)."""
    return device.type == "cuda" or cpu_target() is not None


def engine_of(
    call: Call, q: Tensor, k: Tensor, v: Tensor, extra: Sequence[Tensor] = (), grads: Sequence[Tensor] = ()
) -> Engine:
    """Return the engine for one pass of a call. extra: further tensors of the pass; grads: a buffer for the
    gradient of each capture in ``call.wants``.

    Engines are cached with the plan by :class:`EngineKey`: the facts of the call, the layouts of its tensors
    and what else decides its kernels.
    """
    if call.expand is not None:
        expand, call = call.expand, call._replace(expand=None)
        own, sums = grads[: len(call.wants)], grads[len(call.wants) :]
        return ExpandingEngine.of(
            expand, lambda key, value: engine_of(call, q, key, value, extra, own), q, sums
        )
    warn_left_out(call.options)
    plan, score, device = call.plan, call.score, q.device
    if not uses_triton(device):
        return _cpu_engine_of(call, q, k, grads)
    warn_untested("torch", "triton")
    tensors, mod = call.score_tensors, ()
    if score is not None:
        if 0 in [x.ndim for x in tensors]:  # may be on the CPU: torch combines them with any tensor
            tensors = upload(tensors, device)  # at every call, since they may be edited between calls
        mod = score.digest, *map(specialisation_of, score.number_arguments)
    layouts = tuple(map(layout_of, (q, k, v, *extra, *grads, *tensors)))
    key: Any = (  # equal to the EngineKey of these fields, which takes longer to make
        call.facts or Facts.of(call, q, k, v), mod, layouts, plan.rank,
        call.group and weakref.ref(call.group), device, executed_target(), tile_tables.table_generation,
    )  # fmt: skip
    engines = ENGINES.of(plan.derived)
    kept = engines.get(key)
    if cache_log.isEnabledFor(logging.DEBUG):
        found = f"miss{_why_new(EngineKey(*key), engines)}" if kept is None else "hit"
        cache_log.debug("engines of the plan: %s", found)
    engine, mask_copy = _keep_engine(engines, EngineKey(*key), call, q, v, grads) if kept is None else kept
    # The engine reads the tensors of its mask_mod on this stream.
    mask_mod = None if mask_copy is None else mask_copy.on_current_stream()
    if score is not None and (tensors or score.numbers):
        engine = engine.with_captures(score.caps(tensors), score.dcaps(grads))
    if call.selected is None:
        return engine
    from tritoncp.selection.triton_engine import SelectedTritonEngine  # late: it imports the kernels

    return SelectedTritonEngine(engine, selected_rows(call, q, k), look_up(plan, mask_mod, device))


def _keep_engine(
    engines: BoundedCache[EngineKey, KeptEngine], key: EngineKey, call: Call, q: Tensor, v: Tensor,
    grads: Sequence[Tensor],
) -> KeptEngine:  # fmt: skip
    """Make the engine of a key and keep it; return a copy for its first pass."""
    engine, copy = engines.put(key, _make_engine(call, q, v, grads))
    return replace(engine, is_new=True), copy


def _cpu_engine_of(call: Call, q: Tensor, k: Tensor, grads: Sequence[Tensor]) -> Engine:
    """Return the CPU engine for one pass of a call."""
    warn_untested("torch")
    if call.is_invariant:
        raise ValueError(
            "kernel option invariant=True on the CPU engine, where the bits of matrix products depend on "
            "shapes: omit it, or run the Triton kernels, on a GPU or with TRITON_INTERPRET=1"
        )
    mask = call_mods.translate_mask(call.plan, q)
    on_device = None if mask is None else mask.on_current_stream()
    engine = cpu_engine(call, on_device, q.dtype, grads)
    if call.selected is not None:
        return SelectedCpuEngine(engine, selected_rows(call, q, k), look_up(call.plan, on_device, q.device))
    return engine


def _why_new(key: EngineKey, known: Iterable[EngineKey]) -> str:
    """Describe in which fields a new key differs from the closest key of the same pass."""
    same_pass = [other for other in known if len(other.layouts) == len(key.layouts)]
    if not same_pass:
        return "; the first of this pass"
    differences = min((other.difference(key) for other in same_pass), key=len)
    return "".join([f"; {text}" for text in differences.values()])


def _make_engine(call: Call, q: Tensor, v: Tensor, grads: Sequence[Tensor]) -> KeptEngine:
    """Make the Triton engine of a call, after its tiles are measured if TRITONCP_AUTOTUNE requests it, and
    the mask_mod on its device."""
    from tritoncp.kernels.engine import TritonEngine

    plan, score = call.plan, call.score
    if score and score.graph is None and any(grad.dtype is torch.int64 for grad in grads):
        raise ValueError(
            "score_mod is hand-written @triton.jit code, whose gradient adds floats with atomics, and "
            "deterministic results are requested: write it in Python, or detach its captures"
        )
    (_, heads, rows, d), e, device = q.shape, v.shape[3], v.device
    copy = call_mods.translate_mask(plan, q)
    mask = None if copy is None else copy.on_current_stream()
    properties = tile_lookup.TileKey.of(
        v.dtype, (d, e), tile_lookup.kind_of(plan.mask, mask is not None), score_kind(score)
    )
    tune_on_first_call.tune_if_requested(device, call.group, properties, (heads, v.shape[1], rows))
    if call.options:  # options of a compiled call were not checked yet
        check_options(dict(call.options), architecture(device))
    by_hand = any(mod is not None and mod.graph is None for mod in (mask, score))
    # Hand-written mods get a scalar h, so that the query heads of a KV head cannot be packed in one tile.
    unpacked = {"PACK_GQA": False} if by_hand else {}
    measured = PINNED if call.is_invariant else tile_lookup.measured_options(device, properties)
    options = {**measured, **unpacked, **dict(call.options)}
    mods, launches = kernel_mods(mask, score), BoundedCache[Any, Any](MAX_LAUNCHES)
    engine = TritonEngine(mods, call.scale, options, first_row=plan.first_row, launches=launches)
    engine.route  # noqa: B018 - a cached property: copies with other captures share it
    _log_triton_engine(engine, device, properties)
    return engine, copy


def cpu_engine(call: Call, mask: Mod | None, dtype: torch.dtype, grads: Sequence[Tensor]) -> CpuEngine:
    """Make the CPU engine of one call, for queries of ``dtype``. It accumulates gradients of captures in
    float32 or float64."""
    if engine_log.isEnabledFor(logging.INFO):
        log_decision(engine_log, CPU_ENGINE_LINE)
    plan, score = call.plan, call_mods.check_torch_form(call.score)
    settings: dict[str, Any] = {"first_row": plan.first_row, "steps": _CPU_STEPS.of(plan.derived)}
    if score is None:
        return CpuEngine(call.scale, call_mods.check_torch_form(mask), **settings)
    captures = call.score_tensors
    wide, targets = torch.promote_types(dtype, torch.float32), [captures[i] for i in score.wants]
    from tritoncp.mods.translate.elementwise import elementwise_form  # late: as translation

    graph: Any = score.graph
    own_gradients, back = graph.meta.get("own_gradients", ((), None))
    form = None if own_gradients else elementwise_form(graph, 5)
    graph, settings["elementwise"] = form or graph, form is not None
    run = graph.forward  # not called as a module, since hooks of modules would see it
    if any(x.dtype.itemsize < wide.itemsize for x in targets):
        run = WideGradients(graph, wide).run
        targets = [x.to(torch.promote_types(x.dtype, wide)) for x in targets]
    if own_gradients and score.wants and grads:
        raise NotImplementedError(
            f"score_mod calls {', '.join(own_gradients)}, an autograd.Function, and captures a tensor that "
            "requires grad, for which the CPU engine supports only torch's derivatives: write a custom "
            "gradient with detach(), as x + (f(x) - x).detach(), or run on a GPU"
        )

    def bind(leaves: Sequence[Tensor]) -> Any:
        inner = list(captures)
        for index, tensor in zip(score.wants, leaves, strict=True):
            inner[index] = tensor
        constants = *inner, *score.numbers
        if not own_gradients or score.wants:
            return lambda *indices: run(*indices, *constants)
        pull = back.forward
        return partial(OwnGradient.apply, lambda *x: run(*x, *constants), lambda *x: pull(*x, *constants))

    return CpuEngine(call.scale, call_mods.check_torch_form(mask), bind, targets, grads, **settings)


def kernel_mods(
    mask: Mod | None, score: Mod | None, caps: tuple[Any, ...] = (), dcaps: tuple[Any, ...] = ()
) -> Any:
    """Convert user functions to the form that kernels take. mask: a mod whose captures are on the device;
    caps, dcaps: captures of the score_mod and buffers of their gradients, see :class:`tritoncp.mods.Mod`."""
    from tritoncp.kernels.operands import NO_FUNCTION, Mods
    from tritoncp.kernels.scores import Closure

    mask_closure = Closure(mask.fn, mask.caps()) if mask else NO_FUNCTION
    if score is None:
        return Mods(mask_closure)
    score.check_kernels()
    return Mods(
        mask_closure,
        Closure(score.fn, caps),
        Closure(score.grad, dcaps),
        Closure(score.back),
        score.loads,
    )


def gradient_buffers(call: Call, like: Tensor) -> list[Tensor]:
    """Allocate zeroed buffers for the gradients of captures: floats, to which kernels add in any order; or
    integers for deterministic results, whose sum does not depend on the order."""
    if not call.wants:
        return []
    targets, device, sums = [call.captures[i] for i in call.wants], like.device, []
    deterministic = dict(call.options).get("deterministic", torch.are_deterministic_algorithms_enabled())
    if deterministic and uses_triton(device):
        count = 0 if call.score is None else len(call.score.wants)
        sums = [deterministic_sum.buffer(x, device) for x in targets[:count]]
        targets = targets[count:]  # captures of expand=: their sums have a fixed order
    return sums + [torch.zeros(x.shape, dtype=like.dtype, device=device) for x in targets]


def sum_gradients(call: Call, grads: Sequence[Tensor]) -> list[Tensor]:
    """Convert the buffers of :func:`gradient_buffers` to gradients in the dtypes of the captures."""
    if not grads:
        return []
    totals = [deterministic_sum.total(grad) if grad.dtype is torch.int64 else grad for grad in grads]
    return [total.to(call.captures[i].dtype) for total, i in zip(totals, call.wants, strict=True)]


def _log_triton_engine(engine: TritonEngine, device: torch.device, key: tile_lookup.TileKey) -> None:
    """Log a new engine, the route of its forward pass, and the reason for that route."""
    if not engine_log.isEnabledFor(logging.INFO):
        return
    kind = "Triton kernels, interpreted," if device.type == "cpu" else f"Triton kernels on {device}"
    is_requested, is_measured = bool(engine.options.get("ROUTE")), engine.route != ROUTES[0]
    reason = "kernel option ROUTE" if is_requested else "measured" if is_measured else "default"
    line = "%s run %s, head dims %d and %d, mask of kind %s; route %s (%s)"
    log_decision(engine_log, line, kind, key.dtype, *key.dims, key.mask, engine.route, reason)


def name_functions() -> None:
    """Make Triton hash all functions that kernels call, in a fixed order, before the first launch.

    Without this, a process may miss the cached kernels of another one: a function's hash includes the global
    constants of its callees only if these were hashed before (triton 3.7.1, in
    ``DependenciesFinder._update_hash``).
    """
    from tritoncp.kernels import (
        backward,
        forward,
        opaque_integers,
        scores,
        tile_runs,
        tiles,
    )
    from tritoncp.kernels.routes import forward_gluon
    from tritoncp.kernels.selected import attention, gradients, probabilities
    from tritoncp.mods.translate import triton_helpers

    modules = (
        opaque_integers, tiles, tile_runs, scores, triton_helpers, forward, backward, attention, gradients,
        probabilities,
    )  # fmt: skip
    for module in modules if tiles.INTERPRETED else (*modules, forward_gluon):  # Gluon has no interpreter
        for function in vars(module).values():
            if getattr(function, "__module__", "") == module.__name__:
                _ = getattr(function, "cache_key", None)  # jit functions have one

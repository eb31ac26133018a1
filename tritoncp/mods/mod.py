"""Translated mask_mods and score_mods, and the cache of translations."""

from __future__ import annotations

import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, fx

from tritoncp.core.bounded_cache import BoundedCache
from tritoncp.core.dynamo_boundary import host_only
from tritoncp.core.host_copy import on_host
from tritoncp.core.opaque_integers import opaque
from tritoncp.core.records import record
from tritoncp.mods import source_cache
from tritoncp.mods.errors import Untranslatable
from tritoncp.mods.fingerprint import ModState
from tritoncp.mods.recording import read_state

if TYPE_CHECKING:
    from tritoncp.mods.translate.trace import ModTrace

JITFunction: TypeAlias = Any  # a result of @triton.jit, whose class is another one in the interpreter


@dataclass(frozen=True)
class Refusal:
    """Placeholder for the @triton.jit functions of a mod that only torch can run, with the reason."""

    arg_names: tuple[str, ...]
    error: Untranslatable


@record()
class Mod:
    """A mask_mod or score_mod translated to Triton, and the tensors and numbers that it captures.

    In a kernel, with b, h int32 scalars and q_idx, kv_idx int32 tiles that broadcast to the score tile:

        fn(b, h, q_idx, kv_idx, caps) -> bool                                   # a mask_mod
        fn(score, b, h, q_idx, kv_idx, caps) -> score                           # a score_mod
        grad(dscore, score, b, h, q_idx, kv_idx, keep, caps, dcaps) -> dscore   # gradient of the input score

    Where `keep` (a bool tile of the score's shape) is set, `grad` also adds to `dcaps`, atomically.
    Indices are global and lie in [0, 2^30).

    digest: hash of `source` and of the code of `graph`; Mods with one digest differ only in captures
    fn: a Refusal if there is only a torch form
    wants: indices of the tensors whose gradients `grad` computes, in the order of `dcaps`
    graph: `fn` as a torch graph; None for hand-written Triton
    back: `grad` without additions to dcaps
    loads: number of axes of a score tile (q, kv) on which addresses of loads from `tensors` depend: 0 if only
        on b and h, 2 if each score loads another value
    form: hash that is equal on all ranks: `digest` of the mod whose offsets are all in `numbers`
    """

    digest: str
    source: str
    fn: JITFunction
    grad: JITFunction | None
    tensors: tuple[Tensor, ...]
    numbers: tuple[int | float, ...]
    wants: tuple[int, ...]
    graph: fx.GraphModule | None
    back: JITFunction | None = None
    loads: int = 2
    form: str = ""

    def __call__(self, *arguments: Tensor) -> Tensor:
        """Call the torch form with the current captures, so that a Mod is a mask_mod or score_mod in
        torch."""
        if self.graph is None:
            raise TypeError(
                "a hand-written @triton.jit mod cannot be called in torch: pass it to flex_attention, or "
                "write it in Python"
            )
        return self.graph.forward(*arguments, *self.tensors, *self.numbers)  # without hooks

    def __post_init__(self) -> None:
        vars(self)["form"] = self.form or self.digest
        # `structure_of` finds the Mod without captures while any Mod with its digest is alive.
        if (structure := _STRUCTURES.get(self.digest)) is None:
            copy = object.__new__(Mod)
            vars(copy).update(vars(self), tensors=(), numbers=())
            structure = _STRUCTURES.setdefault(self.digest, copy)
        vars(self).update(graph=structure.graph, _structure=structure)  # all Mods of a digest share a graph

    def with_captures(self, tensors: Sequence[Tensor] = (), numbers: Sequence[int | float] = ()) -> Mod:
        """Copy the mod with other captures (in a fifth of the time of `dataclasses.replace`)."""
        copy = object.__new__(Mod)
        vars(copy).update(vars(self), tensors=tuple(tensors), numbers=tuple(numbers))
        vars(copy).setdefault("_structure", self)
        return copy

    @property
    def is_score(self) -> bool:
        """Whether this is a score_mod."""
        return len(self.fn.arg_names) >= 6

    def check_kernels(self) -> Mod:
        """Return the mod; raise Untranslatable if only torch can run it."""
        if isinstance(self.fn, Refusal):
            raise self.fn.error.with_traceback(None)
        return self

    def caps(self, tensors: Sequence[Tensor] | None = None) -> tuple[Any, ...]:
        """Return the `caps` argument of a kernel: (pointer, sizes, strides) of each tensor, then numbers.

        tensors: instead of the mod's
        """
        tensors = self.tensors if tensors is None else tensors
        return (*[_argument(x, tuple(x.shape), x.stride()) for x in tensors], *self.number_arguments)

    @property
    def number_arguments(self) -> tuple[int | float, ...]:
        """The numbers as arguments of a kernel. Integers of a translated mod are opaque, see
        :mod:`tritoncp.core.opaque_integers`: sizes and strides as such would make kernels spill."""
        if self.graph is None:
            return self.numbers
        return tuple([opaque(n) if type(n) is int else n for n in self.numbers])

    def dcaps(self, grads: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return the `dcaps` argument of a kernel: buffers for the gradients of `tensors[i] for i in wants`.

        grads: zeroed, of the shapes of these tensors, float32 (float64 for float64 captures); or int64
        accumulators of `deterministic_sum.buffer`
        """
        ranks = [g.ndim - (g.dtype is torch.int64) for g in grads]
        pairs = zip(grads, ranks, strict=True)
        return tuple([_argument(g, tuple(g.shape[:rank]), g.stride()[:rank]) for g, rank in pairs])

    @classmethod
    def from_triton(
        cls,
        fn: JITFunction,
        grad: JITFunction | None = None,
        captures: Sequence[Tensor | int | float] = (),
        back: JITFunction | None = None,
    ) -> Mod:
        """Make a Mod from hand-written @triton.jit functions, with the signatures in :class:`Mod`.

        captures: the items of `caps`, tensors first, then numbers. `grad` adds to `dcaps` the gradients of
        the tensors that require grad, in their order; without it a score_mod has no backward pass. back: grad
        without additions to dcaps; needed where captures require grad, since the kernels of dQ and of dK/dV
        both differentiate the score.
        """
        tensors = tuple(c for c in captures if isinstance(c, Tensor))
        numbers = tuple(c for c in captures if not isinstance(c, Tensor))
        if any(isinstance(c, Tensor) for c in tuple(captures)[len(tensors) :]):
            raise ValueError(
                "captures has a number before a tensor: put tensors first, and renumber caps[i] in the "
                "function"
            )
        _check_signature(fn, grad)
        source = "\n\n".join(inspect.getsource(f.fn) for f in (fn, grad) if f is not None)
        learned = tuple(i for i, t in enumerate(tensors) if t.requires_grad and grad is not None)
        structure = [(t.dtype, t.ndim) for t in tensors], [type(n) for n in numbers], learned
        digest = source_cache.digest_of(f"{source}\n{structure}")
        if learned and back is None:
            raise ValueError(
                "back is missing, and captures require grad: pass back=, a copy of grad that adds nothing to "
                "dcaps"
            )
        fn, grad, back = map(_runnable, (fn, grad, back or grad))
        return cls(digest, source, fn, grad, tensors, numbers, learned, None, back, 2 * bool(tensors))


_STRUCTURES: weakref.WeakValueDictionary[str, Mod] = weakref.WeakValueDictionary()


def structure_of(digest: str) -> Mod:
    """Return the Mod of a digest, without captures.

    Raises RuntimeError if all Mods of that digest were freed.
    """
    mod = _STRUCTURES.get(digest)
    if mod is None:
        raise RuntimeError(
            f"the score_mod or mask_mod {digest[:12]} of a recorded call was freed, or was translated in the "
            "process that saved the call: make it here, tritoncp.mods.score_mod(fn), and keep the result for "
            "as long as the call may run again"
        )
    return mod


def _argument(tensor: Tensor, sizes: Sequence[int], strides: Sequence[int]) -> tuple[Any, ...]:
    """Return (pointer, sizes, strides) of a tensor."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    return plain.view(torch.uint8) if plain.dtype is torch.bool else plain, sizes, strides


def _runnable(fn: JITFunction | None) -> JITFunction | None:
    """Give a hand-written function the libdevice functions that Triton's interpreter lacks."""
    if type(fn).__name__ != "InterpretedFunction":
        return fn
    from tritoncp.mods.translate.interpreted_libdevice import with_libdevice  # late: it imports Triton

    return with_libdevice(fn)


_ARGUMENTS = {5: "b, h, q_idx, kv_idx, caps", 6: "score, b, h, q_idx, kv_idx, caps"}
_GRAD_ARGUMENTS = "dscore, score, b, h, q_idx, kv_idx, keep, caps, dcaps"


def _check_signature(fn: JITFunction, grad: JITFunction | None) -> None:
    count = len(fn.arg_names)
    if count not in _ARGUMENTS:
        raise ValueError(
            f"fn has the parameters ({', '.join(fn.arg_names)}); a @triton.jit mod needs ({_ARGUMENTS[5]}) "
            f"or ({_ARGUMENTS[6]})"
        )
    if grad is not None and (count != 6 or len(grad.arg_names) != 9):
        raise ValueError(
            f"grad has the parameters ({', '.join(grad.arg_names)}); ({_GRAD_ARGUMENTS}) are needed"
        )


def is_jit_function(fn: Any) -> bool:
    """Return whether `fn` is a @triton.jit function. Does not import Triton: if it is not imported, `fn` is
    not one."""
    if type(fn) is types.FunctionType:  # the usual case, for speed
        return False
    triton_jit = sys.modules.get("triton.runtime.jit")
    return triton_jit is not None and isinstance(fn, triton_jit.KernelInterface)


def hand_written(fn: Any) -> bool:
    """Return whether `fn` is a hand-written @triton.jit function or a Mod of one, which torch cannot call."""
    return is_jit_function(fn) or (isinstance(fn, Mod) and fn.graph is None)


# -- translation -----------------------------------------------------------------------------------------


_LOCK = threading.RLock()
# (state, number of arguments, dtypes) -> (Mod without captured tensors, `_tensor_sources` of these).
_TRANSLATIONS: BoundedCache[Any, Any] = BoundedCache(256)
# Mod.form -> the offsets of its first Mod, which stay constants of that Mod; other offsets are numbers of a
# second Mod, which serves all values.
_FIRST_OFFSETS: BoundedCache[str, tuple[int, ...]] = BoundedCache(256)


@host_only
def mask_mod(fn: Callable[..., Any] | JITFunction | Mod) -> Mod:
    """Translate `fn(b, h, q_idx, kv_idx) -> bool`, a torch mask_mod, to Triton.

    Raises Untranslatable, with the operation and its line, if an operation cannot run inside a kernel.

    >>> print(mask_mod(lambda b, h, q, kv: q >= kv).source.splitlines()[-1].strip())
    return at_least
    """
    return _translate_whole(fn, 4, torch.float32)


@host_only
def score_mod(fn: Callable[..., Any] | JITFunction | Mod, dtype: torch.dtype = torch.float32) -> Mod:
    """Translate `fn(score, b, h, q_idx, kv_idx) -> score`, a torch score_mod, and its gradient to Triton.

    dtype: of scores in the kernel, float32 or float64. Captured float tensors that require grad get
    gradients.

    Raises Untranslatable, with the operation and its line, if an operation cannot run inside a kernel.
    """
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"scores are float32 or float64 inside kernels; score_mod() was given dtype={dtype}")
    return _translate_whole(fn, 5, dtype)


def _translate_whole(fn: Callable[..., Any] | JITFunction | Mod, arguments: int, dtype: torch.dtype) -> Mod:
    """Return the Mod of :func:`translate` with its captured tensors, if kernels can run it."""
    mod, tensors = translate(fn, arguments, dtype)
    return (mod.with_captures(tensors, mod.numbers) if tensors else mod).check_kernels()


def translate(
    fn: Callable[..., Any] | JITFunction | Mod, arguments: int, dtype: torch.dtype
) -> tuple[Mod, Sequence[Tensor]]:
    """Translate a mask_mod (4 arguments) or score_mod (5), unless a function with equal state was translated.
    Returns the Mod without captured tensors, then the tensors of this call."""
    if type(fn) is not types.FunctionType:
        if is_jit_function(fn):
            fn = Mod.from_triton(fn)
        if isinstance(fn, Mod):
            if fn.is_score != (arguments == 5):
                expected, actual = ("score_mod", "mask_mod") if arguments == 5 else ("mask_mod", "score_mod")
                names = ", ".join(fn.fn.arg_names)
                raise TypeError(f"a {expected} is needed here; got a {actual} ({names})")
            return (fn.with_captures(numbers=fn.numbers) if fn.tensors else fn), fn.tensors
        if not callable(fn):
            raise TypeError(f"a mod is a function or a @triton.jit function; got a {type(fn).__name__}")
    state = read_state(fn, arguments == 5, dtype)
    key = None if state.key is None else (state.key, arguments, dtype, torch.get_default_dtype())
    if key is not None and (entry := _TRANSLATIONS.get(key)) is not None:
        mod, sources = entry
        return mod, [state.tensors[x] if type(x) is int else x for x in sources]
    with _LOCK:  # tracing changes state of the process
        traced, sources = _trace(fn, arguments == 5, dtype, state)
        mod = traced.with_captures(numbers=traced.numbers)
        if key is not None and sources is not None:
            _TRANSLATIONS.put(key, (mod, sources))
    return mod, traced.tensors


@on_host
def _trace(
    fn: Callable[..., Any], is_score: bool, dtype: torch.dtype, state: ModState
) -> tuple[Mod, tuple[int | Tensor, ...] | None]:
    """Trace and translate a mod; return it with its :func:`_tensor_sources`."""
    from tritoncp.mods.translate.trace import trace_mod  # late: it imports Dynamo, which plans do not need

    trace, form = trace_mod(fn, is_score, dtype, state), ""
    sources = _tensor_sources(trace, state.tensors)
    if trace.lifted is not None:
        mod = _build(trace.lifted)
        form = mod.digest
        if (_FIRST_OFFSETS.get(form) or _FIRST_OFFSETS.put(form, trace.offsets)) != trace.offsets:
            return mod, sources
    return _build(trace, form), sources


def _build(trace: ModTrace, form: str = "") -> Mod:
    """Translate a trace. form: of the Mod; "": its digest"""
    try:
        return _build_kernels(trace, form)
    except Untranslatable as error:
        kinds = [(tensor.dtype, tensor.ndim) for tensor in trace.tensors], trace.wants, trace.dtype
        source = f"# {error.operation} is not translated\n{_torch_form(trace)}\n# {kinds}"
        names = _ARGUMENTS[6 if trace.is_score else 5].split(", ")
        refusal = Refusal(tuple(names), error)
        numbers, digest = trace.numbers, source_cache.digest_of(source)
        captures = trace.tensors, numbers, trace.wants
        return Mod(digest, source, refusal, None, *captures, trace.forward, None, form=form)


def _build_kernels(trace: ModTrace, form: str) -> Mod:
    from tritoncp.mods.translate.emit import emit_source  # late: it imports Dynamo

    source, loads = emit_source(trace)
    module = source_cache.load(source)
    fn = module.score_mod if trace.is_score else module.mask_mod
    grad = module.score_grad if trace.is_score else None
    score_only = replace(trace, joint=trace.back, wants=())
    back = source_cache.load(emit_source(score_only)[0]).score_grad if trace.wants else grad
    digest = source_cache.digest_of(f"{source}\n{_torch_form(trace)}")  # it may have many torch forms
    captures = trace.tensors, trace.numbers, trace.wants
    return Mod(digest, source, fn, grad, *captures, trace.forward, back, loads, form)


def _torch_form(trace: ModTrace) -> str:
    """Return the code of the torch form, with the code of derivatives that autograd.Functions define."""
    names, back = trace.forward.meta["own_gradients"]
    return f"{trace.forward.code}\n{names}\n{back.code}" if names else trace.forward.code


def _tensor_sources(trace: ModTrace, state_tensors: Sequence[Tensor]) -> tuple[int | Tensor, ...] | None:
    """Map each captured tensor to its index in `ModState.tensors`, or to itself if the function makes it;
    None if the trace captured any other tensor."""
    sources: list[int | Tensor] = []
    for i, tensor in enumerate(trace.tensors):
        position = next((p for p, candidate in enumerate(state_tensors) if candidate is tensor), None)
        if position is None and i not in trace.constants:
            return None
        sources.append(tensor if position is None else position)
    return tuple(sources)

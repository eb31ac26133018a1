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
from tritoncp.mods import source_cache
from tritoncp.mods.errors import Untranslatable
from tritoncp.mods.fingerprint import ModState
from tritoncp.mods.recording import read_state

if TYPE_CHECKING:
    from tritoncp.mods.translate.trace import ModTrace

JITFunction: TypeAlias = Any  # the result of @triton.jit; its class differs in the interpreter


@dataclass(frozen=True)
class Refusal:
    """In place of the @triton.jit functions of a mod that only torch can run: the reason."""

    arg_names: tuple[str, ...]
    error: Untranslatable


@dataclass(frozen=True, eq=False)
class Mod:
    """A mask_mod or score_mod as Triton source, and the tensors and numbers that it captures.

    In a kernel, with b, h int32 scalars and q_idx, kv_idx int32 tiles that broadcast to the score tile:

        fn(b, h, q_idx, kv_idx, caps) -> bool                                   # a mask_mod
        fn(score, b, h, q_idx, kv_idx, caps) -> score                           # a score_mod
        grad(dscore, score, b, h, q_idx, kv_idx, keep, caps, dcaps) -> dscore   # of the score that went in

    `grad` also adds to `dcaps`, atomically, wherever `keep` (a bool tile of the score's shape) is set.
    Indices are global and lie in [0, 2^30).

    digest: of `source`, and of the code of `graph`; Mods of one digest differ in captures alone
    fn: a Refusal where there is no translation, but a torch form
    wants: positions of the tensors that `grad` adds gradients for, in the order of `dcaps`
    graph: the torch form of `fn`; None for hand-written Triton
    back: `grad` for callers that only want dscore: adds nothing to dcaps
    loads: number of axes of a score tile with which loads from `tensors` vary: 0 where their addresses depend
        on b and h alone, 2 where each score has its own
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

    def __call__(self, *arguments: Tensor) -> Tensor:
        """Call the torch form with the current captures: a Mod is a mask_mod or score_mod for torch too."""
        if self.graph is None:
            raise TypeError("a hand-written @triton.jit mod runs in kernels only; torch cannot call it")
        return self.graph(*arguments, *self.tensors, *self.numbers)

    def __post_init__(self) -> None:
        # `structure_of` finds the Mod without captures as long as a Mod of its digest lives.
        if (structure := _STRUCTURES.get(self.digest)) is None:
            copy = object.__new__(Mod)
            vars(copy).update(vars(self), tensors=(), numbers=())
            structure = _STRUCTURES.setdefault(self.digest, copy)
        vars(self).update(graph=structure.graph, _structure=structure)  # one graph for all of a digest

    def with_captures(self, tensors: Sequence[Tensor] = (), numbers: Sequence[int | float] = ()) -> Mod:
        """Copy the mod with other captures, in a fifth of the time of `dataclasses.replace`."""
        copy = object.__new__(Mod)
        vars(copy).update(vars(self), tensors=tuple(tensors), numbers=tuple(numbers))
        vars(copy).setdefault("_structure", self)
        return copy

    @property
    def is_score(self) -> bool:
        """Whether `fn` takes a score."""
        return len(self.fn.arg_names) >= 6

    def check_kernels(self) -> Mod:
        """Return the mod. Raises Untranslatable if only torch can run it."""
        if isinstance(self.fn, Refusal):
            raise self.fn.error.with_traceback(None)
        return self

    def caps(self, tensors: Sequence[Tensor] | None = None) -> tuple[Any, ...]:
        """The `caps` argument of a kernel: (pointer, sizes, strides) of each tensor, then the numbers.

        `tensors` replace the captured ones: tensors that an autograd function saved, or copies on a device.
        """
        return arguments(self.tensors if tensors is None else tensors, self.numbers)

    def dcaps(self, grads: Sequence[Tensor]) -> tuple[Any, ...]:
        """The `dcaps` argument: buffers to add the gradients of `tensors[i] for i in wants` to.

        grads: float32 (float64 for float64 captures), each of the shape of its tensor, zeroed by the caller;
        or int64 with the slots of `deterministic_sum.buffer` as a last dimension.
        """
        expected = [tuple(self.tensors[i].shape) for i in self.wants]
        shapes = [tuple(g.shape[:-1] if g.dtype is torch.int64 else g.shape) for g in grads]
        if shapes != expected:
            raise ValueError(f"gradient buffers of shapes {expected} are needed; dcaps() was given {shapes}")
        return gradient_arguments(grads)

    @classmethod
    def from_triton(
        cls,
        fn: JITFunction,
        grad: JITFunction | None = None,
        captures: Sequence[Tensor | int | float] = (),
        wants: Sequence[int] | None = None,
        back: JITFunction | None = None,
    ) -> Mod:
        """Make a Mod from hand-written @triton.jit functions, with the signatures in :class:`Mod`.

        captures: the items of `caps`, tensors first, then numbers. wants: which of the tensors `grad` adds
        gradients for, in the order of `dcaps`; by default those that require grad, if there is a `grad`.
        Without `grad` a score_mod runs forward only. back: like grad, but adds nothing to dcaps; needed
        where captures want gradients, since dQ and dK/dV both differentiate the score.
        """
        tensors = tuple(c for c in captures if isinstance(c, Tensor))
        numbers = tuple(c for c in captures if not isinstance(c, Tensor))
        if any(isinstance(c, Tensor) for c in tuple(captures)[len(tensors) :]):
            raise ValueError(
                "captures are tensors first, then numbers; reorder them, and caps[i] in the function"
            )
        _check_signature(fn, grad)
        source = "\n\n".join(inspect.getsource(f.fn) for f in (fn, grad) if f is not None)
        learned = (
            tuple(i for i, t in enumerate(tensors) if t.requires_grad) if wants is None else tuple(wants)
        )
        learned = learned if grad is not None else ()
        structure = [(t.dtype, t.ndim) for t in tensors], [type(n) for n in numbers], learned
        digest = source_cache.digest_of(f"{source}\n{structure}")
        if learned and back is None:
            raise ValueError("captures want gradients: pass back=, which is grad without the adding to dcaps")
        return cls(digest, source, fn, grad, tensors, numbers, learned, None, back or grad, 2 * bool(tensors))


_STRUCTURES: weakref.WeakValueDictionary[str, Mod] = weakref.WeakValueDictionary()


def structure_of(digest: str) -> Mod:
    """Return the Mod of a digest, without captures.

    Raises RuntimeError once every Mod of that digest has been freed.
    """
    mod = _STRUCTURES.get(digest)
    if mod is None:
        raise RuntimeError(
            f"the score_mod or mask_mod {digest[:12]}, which a recorded call names, has been freed; keep the "
            "result of tritoncp.mods.score_mod(fn) for as long as the call may run again"
        )
    return mod


def arguments(tensors: Sequence[Tensor], numbers: Sequence[int | float]) -> tuple[Any, ...]:
    """The `caps` argument of a kernel for these captures, see :meth:`Mod.caps`."""
    return (*map(_argument, tensors), *numbers)


def gradient_arguments(grads: Sequence[Tensor]) -> tuple[Any, ...]:
    """The `dcaps` argument of a kernel for these buffers, see :meth:`Mod.dcaps`."""
    return tuple(
        [
            (g, tuple(g.shape[:-1]), tuple(g.stride()[:-1])) if g.dtype is torch.int64 else _argument(g)
            for g in grads
        ]
    )


def _argument(tensor: Tensor) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    plain = tensor.detach() if tensor.requires_grad else tensor
    plain = plain.view(torch.uint8) if plain.dtype is torch.bool else plain
    return plain, tuple(tensor.shape), tensor.stride()


_ARGUMENTS = {5: "b, h, q_idx, kv_idx, caps", 6: "score, b, h, q_idx, kv_idx, caps"}
_GRAD_ARGUMENTS = "dscore, score, b, h, q_idx, kv_idx, keep, caps, dcaps"


def _check_signature(fn: JITFunction, grad: JITFunction | None) -> None:
    count = len(fn.arg_names)
    if count not in _ARGUMENTS:
        raise ValueError(
            f"a @triton.jit mod takes ({_ARGUMENTS[5]}) or ({_ARGUMENTS[6]}); "
            f"this one takes ({', '.join(fn.arg_names)})"
        )
    if grad is not None and (count != 6 or len(grad.arg_names) != 9):
        raise ValueError(
            f"the gradient of a score_mod takes ({_GRAD_ARGUMENTS}); got ({', '.join(grad.arg_names)})"
        )


def is_jit_function(fn: Any) -> bool:
    """Whether `fn` is a @triton.jit function. There is none before Triton is loaded, and this does not load
    it."""
    if type(fn) is types.FunctionType:  # the usual case, decided at once
        return False
    triton_jit = sys.modules.get("triton.runtime.jit")
    return triton_jit is not None and isinstance(fn, triton_jit.KernelInterface)


def hand_written(fn: Any) -> bool:
    """Whether `fn` is @triton.jit code, alone or as a Mod, which torch cannot call."""
    return is_jit_function(fn) or (isinstance(fn, Mod) and fn.graph is None)


# -- translation -----------------------------------------------------------------------------------------


_LOCK = threading.RLock()
# By state, arguments and dtypes: a Mod without captured tensors, and the `_tensor_sources` of these.
_TRANSLATIONS: BoundedCache[Any, Any] = BoundedCache(256)


@host_only
def mask_mod(fn: Callable[..., Any] | JITFunction | Mod) -> Mod:
    """Translate `fn(b, h, q_idx, kv_idx) -> bool`, a torch mask_mod, to Triton.

    Raises Untranslatable, naming the operation and the line, for what cannot run inside a kernel.

    >>> print(mask_mod(lambda b, h, q, kv: q >= kv).source.splitlines()[-1].strip())
    return at_least
    """
    return _translate_whole(fn, 4, torch.float32).check_kernels()


@host_only
def score_mod(
    fn: Callable[..., Any] | JITFunction | Mod, dtype: torch.dtype = torch.float32, kernels: bool = True
) -> Mod:
    """Translate `fn(score, b, h, q_idx, kv_idx) -> score`, a torch score_mod, and its gradient to Triton.

    dtype: the kernel's scores, float32 or float64. Captured float tensors that require grad get gradients.
    kernels: whether an operation without a translation raises Untranslatable; else the Mod runs in torch
        alone, and `Mod.check_kernels` raises it. Operations that cannot be traced raise it in any case.

    >>> mod = score_mod(lambda s, b, h, q, kv: s + (q * torch.ones(999)).median(), kernels=False)
    >>> float(mod(torch.tensor(1.0), *torch.tensor([0, 0, 5, 0])))
    6.0
    """
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"scores are float32 or float64 inside kernels; score_mod() was given dtype={dtype}")
    mod = _translate_whole(fn, 5, dtype)
    return mod.check_kernels() if kernels else mod


def _translate_whole(fn: Callable[..., Any] | JITFunction | Mod, arguments: int, dtype: torch.dtype) -> Mod:
    """Return the Mod of :func:`translate` with its captured tensors."""
    mod, tensors = translate(fn, arguments, dtype)
    return mod.with_captures(tensors, mod.numbers) if tensors else mod


def translate(
    fn: Callable[..., Any] | JITFunction | Mod, arguments: int, dtype: torch.dtype
) -> tuple[Mod, Sequence[Tensor]]:
    """Translate a mask_mod (4 arguments) or score_mod (5), unless a function of equal state was translated.
    Returns the Mod without its captured tensors, then the tensors, which may be others at each call."""
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
    with _LOCK:  # tracing changes state of the whole process
        traced, sources = _trace(fn, arguments == 5, dtype, state)
        mod = traced.with_captures(numbers=traced.numbers)
        if key is not None and sources is not None:
            _TRANSLATIONS.put(key, (mod, sources))
    return mod, traced.tensors


@on_host
def _trace(
    fn: Callable[..., Any], is_score: bool, dtype: torch.dtype, state: ModState
) -> tuple[Mod, tuple[int | Tensor, ...] | None]:
    """Trace and translate a mod; the sources are those of :func:`_tensor_sources`."""
    from tritoncp.mods.translate.trace import trace_mod  # loads Dynamo, which plans do without

    trace = trace_mod(fn, is_score, dtype, state)
    return _build(trace), _tensor_sources(trace, state.tensors)


def _build(trace: ModTrace) -> Mod:
    try:
        return _build_kernels(trace)
    except Untranslatable as error:
        captures = [(tensor.dtype, tensor.ndim) for tensor in trace.tensors], trace.wants, trace.dtype
        source = f"# {error.operation} is not translated\n{_torch_form(trace)}\n# {captures}"
        names = _ARGUMENTS[6 if trace.is_score else 5].split(", ")
        refusal = Refusal(tuple(names), error)
        numbers, digest = trace.numbers, source_cache.digest_of(source)
        return Mod(digest, source, refusal, None, trace.tensors, numbers, trace.wants, trace.forward, None)


def _build_kernels(trace: ModTrace) -> Mod:
    from tritoncp.mods.translate.emit import emit_source  # loads Dynamo

    source, loads = emit_source(trace)
    module = source_cache.load(source)
    fn = module.score_mod if trace.is_score else module.mask_mod
    grad = module.score_grad if trace.is_score else None
    score_only = replace(trace, joint=trace.back, wants=())
    back = source_cache.load(emit_source(score_only)[0]).score_grad if trace.wants else grad
    digest = source_cache.digest_of(f"{source}\n{_torch_form(trace)}")  # one source, several torch forms
    captures = trace.tensors, trace.numbers, trace.wants
    return Mod(digest, source, fn, grad, *captures, trace.forward, back, loads)


def _torch_form(trace: ModTrace) -> str:
    """Return the code of the torch form, with that of its derivative where autograd.Functions decide it."""
    names, back = trace.forward.meta["own_gradients"]
    return f"{trace.forward.code}\n{names}\n{back.code}" if names else trace.forward.code


def _tensor_sources(trace: ModTrace, state_tensors: Sequence[Tensor]) -> tuple[int | Tensor, ...] | None:
    """Return for each captured tensor its position in `ModState.tensors`, or the tensor if the function makes
    it; None if the trace captured another tensor."""
    sources: list[int | Tensor] = []
    for i, tensor in enumerate(trace.tensors):
        position = next((p for p, candidate in enumerate(state_tensors) if candidate is tensor), None)
        if position is None and i not in trace.constants:
            return None
        sources.append(tensor if position is None else position)
    return tuple(sources)

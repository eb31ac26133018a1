"""`Mod`: a translated mask_mod or score_mod, and how one is found again."""

from __future__ import annotations

import copy
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from tritoncp.mods import source_cache
from tritoncp.mods.recording import read_state
from tritoncp.mods.translate.emit import emit, loads
from tritoncp.mods.translate.trace import Traced, release_source, trace

JITFunction: TypeAlias = Any  # what @triton.jit makes: another class where kernels run interpreted


@dataclass(frozen=True, eq=False)
class Mod:
    """A mask_mod or score_mod as Triton source: structure here, values in `tensors` and `numbers`.

    In a kernel, with b, h int32 scalars and q_idx, kv_idx int32 tiles that broadcast to the score tile:

        fn(b, h, q_idx, kv_idx, caps) -> bool                                   # a mask_mod
        fn(score, b, h, q_idx, kv_idx, caps) -> score                           # a score_mod
        grad(dscore, score, b, h, q_idx, kv_idx, keep, caps, dcaps) -> dscore   # of the score that went in

    `grad` also adds to `dcaps`, atomically, wherever `keep` (a bool tile of the score's shape) is set.
    Indices are global and lie in [0, 2^30). `loads`: with how many sides of a tile varies what fn loads from
    its tensors, 0 where at most b and h choose it, 2 where each score has its own.
    """

    digest: str
    source: str
    fn: JITFunction
    grad: JITFunction | None
    tensors: tuple[Tensor, ...]
    numbers: tuple[int | float, ...]
    wants: tuple[int, ...]
    graph: fx.GraphModule | None
    back: JITFunction | None = None  # grad for callers that only want dscore: adds nothing to dcaps
    loads: int = 2

    def __call__(self, *arguments: Tensor) -> Tensor:
        """Call the torch form with the current captures: a Mod is a mask_mod or score_mod for torch too."""
        if self.graph is None:
            raise TypeError("a hand-written @triton.jit mod runs in kernels only; torch cannot call it")
        return self.graph(*arguments, *self.tensors, *self.numbers)

    def __post_init__(self) -> None:
        # One without captures, which lives as long as any other of its structure.
        if (bare := _STRUCTURES.get(self.digest)) is None:
            copy = object.__new__(Mod)
            vars(copy).update(vars(self), tensors=(), numbers=())
            bare = _STRUCTURES.setdefault(self.digest, copy)
        vars(self)["_bare"] = bare

    def around(self, tensors: Sequence[Tensor] = (), numbers: Sequence[int | float] = ()) -> Mod:
        """Copy the mod with other captures (as `dataclasses.replace` does, in a fifth of the time)."""
        copy = object.__new__(Mod)
        vars(copy).update(vars(self), tensors=tuple(tensors), numbers=tuple(numbers))
        vars(copy).setdefault("_bare", self)
        return copy

    @property
    def is_score(self) -> bool:
        """Whether `fn` takes a score."""
        return len(self.fn.arg_names) == 6

    def caps(self, tensors: Sequence[Tensor] | None = None) -> tuple[Any, ...]:
        """The `caps` argument of a kernel: (pointer, sizes, strides) of each tensor, then the numbers.

        `tensors` replace the captured ones: tensors that an autograd function saved, or copies on a device.
        """
        values = self.tensors if tensors is None else tuple(tensors)
        if len(values) != len(self.tensors):
            raise ValueError(
                f"this mod captures {len(self.tensors)} tensors; {len(values)} were given to caps()"
            )
        return arguments(values, self.numbers)

    def dcaps(self, grads: Sequence[Tensor]) -> tuple[Any, ...]:
        """The `dcaps` argument: buffers to add the gradients of `tensors[i] for i in wants` to.

        grads: float32 (float64 for float64 captures), each of the shape of its tensor, zeroed by the caller;
        or int64 with the slots of `exact.buffer` as a last dimension.
        """
        expected = [tuple(self.tensors[i].shape) for i in self.wants]
        shapes = [tuple(g.shape[:-1] if g.dtype is torch.int64 else g.shape) for g in grads]
        if shapes != expected:
            raise ValueError(f"gradient buffers of shapes {expected} are needed; dcaps() was given {shapes}")
        return tuple(
            (g, tuple(g.shape[:-1]), tuple(g.stride()[:-1])) if g.dtype is torch.int64 else _argument(g)
            for g in grads
        )

    @classmethod
    def from_triton(
        cls,
        fn: JITFunction,
        grad: JITFunction | None = None,
        captures: Sequence[Tensor | int | float] = (),
        wants: Sequence[int] | None = None,
        back: JITFunction | None = None,
    ) -> Mod:
        """A Mod from hand-written @triton.jit functions with the signatures above.

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
        source = "\n\n".join(_source(f) for f in (fn, grad) if f is not None)
        wanted_grads = (
            tuple(i for i, t in enumerate(tensors) if t.requires_grad) if wants is None else tuple(wants)
        )
        wanted_grads = wanted_grads if grad is not None else ()
        structure = [(t.dtype, t.ndim) for t in tensors], [type(n) for n in numbers], wanted_grads
        digest = source_cache.digest_of(f"{source}\n{structure}")
        if wanted_grads and back is None:
            raise ValueError("captures want gradients: pass back=, which is grad without the adding to dcaps")
        return cls(
            digest, source, fn, grad, tensors, numbers, wanted_grads, None, back or grad, 2 * bool(tensors)
        )


_STRUCTURES: weakref.WeakValueDictionary[str, Mod] = weakref.WeakValueDictionary()


def structure_of(digest: str) -> Mod:
    """The Mod of this digest, without captures. RuntimeError once nothing holds a Mod of that digest."""
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


def _source(fn: JITFunction) -> str:
    return inspect.getsource(fn.fn)


def is_jit_function(fn: Any) -> bool:
    """Whether `fn` is a @triton.jit function. There is none before Triton is loaded, and this does not load
    it."""
    triton_jit = sys.modules.get("triton.runtime.jit")
    return triton_jit is not None and isinstance(fn, triton_jit.KernelInterface)


def hand_written(fn: Any) -> bool:
    """Whether `fn` is @triton.jit code, alone or as a Mod, which torch cannot call."""
    return is_jit_function(fn) or (isinstance(fn, Mod) and fn.graph is None)


# -- from Python -----------------------------------------------------------------------------------------


@dataclass
class _Known:
    """A translation without the values: each tensor is one of the fingerprint's, by place, or made inside.
    One that was found again since it was the oldest gets a second chance."""

    mod: Mod
    tensors: tuple[int | Tensor, ...]
    again: bool = False


_LOCK = threading.RLock()
_KNOWN: dict[Any, _Known] = {}  # oldest first
_MOST_KNOWN = 256


def mask_mod(fn: Callable[..., Any] | JITFunction | Mod) -> Mod:
    """Translate `fn(b, h, q_idx, kv_idx) -> bool`, a torch mask_mod, to Triton.

    Raises Untranslatable, naming the operation and the line, for what cannot run inside a kernel.

    >>> print(mask_mod(lambda b, h, q, kv: q >= kv).source.splitlines()[-1].strip())
    return at_least
    """
    return _translate(fn, 4, torch.float32)


def score_mod(fn: Callable[..., Any] | JITFunction | Mod, dtype: torch.dtype = torch.float32) -> Mod:
    """Translate `fn(score, b, h, q_idx, kv_idx) -> score`, a torch score_mod, and its gradient to Triton.

    dtype: the kernel's scores, float32 or float64. Captured float tensors that require grad get gradients.
    """
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"scores are float32 or float64 inside kernels; score_mod() was given dtype={dtype}")
    return _translate(fn, 5, dtype)


def _translate(fn: Callable[..., Any] | JITFunction | Mod, arguments: int, dtype: torch.dtype) -> Mod:
    if is_jit_function(fn):
        fn = Mod.from_triton(fn)
    if isinstance(fn, Mod):
        _check_kind(fn, arguments)
        return fn
    if not callable(fn):
        raise TypeError(f"a mod is a function or a @triton.jit function; got a {type(fn).__name__}")
    if torch.compiler.is_dynamo_compiling():
        raise RuntimeError(
            "a mod is being translated inside torch.compile; do that outside the compiled function, or pass "
            "the plain function to flex_attention"
        )
    state = read_state(fn, arguments == 5, dtype)
    key = None if state.key is None else (state.key, arguments, dtype, torch.get_default_dtype())
    if key is not None and (known := _KNOWN.get(key)) is not None:
        known.again, mod = True, known.mod
        return mod.around(_now(known, state.tensors), mod.numbers) if known.tensors else mod
    with _LOCK:  # tracing changes what is global to the process
        traced = trace(fn, arguments == 5, dtype, state)
        mod = _build(traced)
        origins = _origins(traced, state.tensors)
        if key is not None and origins is not None:
            _KNOWN[key] = _Known(mod.around(numbers=mod.numbers), origins)
            while len(_KNOWN) > _MOST_KNOWN:
                known = _KNOWN.pop(oldest := next(iter(_KNOWN)))
                if known.again:
                    known.again, _KNOWN[oldest] = False, known
    return mod


def _check_kind(mod: Mod, arguments: int) -> None:
    if mod.is_score != (arguments == 5):
        expected, actual = ("score_mod", "mask_mod") if arguments == 5 else ("mask_mod", "score_mod")
        raise TypeError(f"a {expected} is needed here; got a {actual} ({', '.join(mod.fn.arg_names)})")


def _build(traced: Traced) -> Mod:
    source = emit(traced)
    module = source_cache.load(source)
    fn = module.score_mod if traced.is_score else module.mask_mod
    grad = module.score_grad if traced.is_score else None
    back = source_cache.load(emit(_score_only(traced))).score_grad if traced.wants else grad
    return Mod(
        source_cache.digest_of(source),
        source,
        fn,
        grad,
        traced.tensors,
        traced.numbers,
        traced.wants,
        traced.forward,
        back,
        loads(traced),
    )


def _score_only(traced: Traced) -> Traced:
    """The same mod, of whose joint graph only the gradient of the score is kept."""
    joint = copy.deepcopy(traced.joint)
    assert joint is not None
    output = next(node for node in joint.graph.nodes if node.op == "output")
    output.args = ((output.args[0][0],),)
    joint.graph.eliminate_dead_code()
    joint.recompile()
    release_source(joint)
    return replace(traced, joint=joint, wants=())


def _origins(traced: Traced, among: Sequence[Tensor]) -> tuple[int | Tensor, ...] | None:
    """Where each tensor comes from; None if one was captured in a way the fingerprint did not see."""
    origins: list[int | Tensor] = []
    for i, tensor in enumerate(traced.tensors):
        place = next((p for p, candidate in enumerate(among) if candidate is tensor), None)
        if place is None and i not in traced.made:
            return None
        origins.append(tensor if place is None else place)
    return tuple(origins)


def _now(known: _Known, found: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple([found[t] if isinstance(t, int) else t for t in known.tensors])

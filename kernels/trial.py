"""A way through the forward pass that is not the usual one is tried before it is taken: compilers have made
wrong code of such loops without a word (triton#8311, fla#988), and nobody may have run it on the GPU that is
here. The first step of each kind in a process goes both ways, and the answers are compared.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from tritoncp.kernels.launch import State
from tritoncp.kernels.tiles import INTERPRETED

TRIED = not INTERPRETED  # what is interpreted cannot be compiled wrong
LAST_PLACES = 2  # of the inputs' dtype, what rounding may take from the largest number of a row of out
STATS = 1e-3  # of a statistic, and of one, likewise

_FOUND: dict[Any, str | None] = {}  # by all that makes another kernel of a step


def objection(
    engine: Any, launch: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, tables: Any, **step: Any
) -> str | None:
    """Why a route is not to be believed: ``launch``, which takes what :meth:`TritonEngine.loops` takes,
    answered a step like this one differently. None if it did not. Leaves the tensors as they are."""
    if not TRIED:
        return None
    flags = tuple((key, x if isinstance(x, bool) else x is None) for key, x in sorted(step.items()))
    blocks = tables.mask, tables.has_masked, bool(tables.window), tables.q_block, tables.kv_block
    dims = q.shape[3], v.shape[3], q.shape[1] // k.shape[1]
    kind = engine.alike, q.device, q.dtype, dims, flags, blocks
    if kind not in _FOUND:
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            return "its answer is compared at the first call of a kind, which a graph cannot capture"
        apart = replace(engine, kept=None)  # whose launches settle nothing: other room is laid out otherwise
        _FOUND[kind] = _tried(partial(launch, apart), apart.loops, (q, k, v, tables), step)
    return _FOUND[kind]


def _tried(
    launch: Callable[..., Any], loops: Callable[..., Any], inputs: tuple[Any, ...], step: dict[str, Any]
) -> str | None:
    try:
        actual = _answer(partial(launch, *inputs), step)
    except (TritonError, RuntimeError) as error:  # the latter of a compiler's pass
        first: BaseException = error
        while first.__cause__:
            first = first.__cause__
        said = str(first).strip().splitlines() or ["without a word"]
        return f"it fails: {type(first).__name__}: {said[-1]}"
    return _difference(actual, _answer(partial(loops, *inputs), step), inputs[0].dtype)


def _answer(way: Callable[..., Any], step: dict[str, Any]) -> dict[str, Tensor]:
    """What a step leaves where it is given other room; a state as what comes of it."""
    written = {key: x for key, x in step.items() if isinstance(x, Tensor)}
    room: dict[str, Any] = {key: torch.full_like(x, torch.nan) for key, x in written.items()}
    state = step.get("state")
    if state is not None:
        room["state"] = State(*(x.clone() for x in state))
    way(**step | room)()
    if state is None or not step.get("store_state"):
        return {key: room[key] for key in written}
    acc, m, l = room["state"]
    return {"out": acc.div_(l[..., None]), "lse": l.log2_().add_(m)}


def _difference(actual: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> str | None:
    """Where two answers are further apart than rounding takes them."""
    places = LAST_PLACES * torch.finfo(dtype).eps
    for key, whole in actual.items():
        wrong: Any = 0
        for at in itertools.product(
            *map(range, whole.shape[:2])
        ):  # a head at a time: of all there is too much
            a, b = whole[at].float(), expected[key][at].float()
            size = b.abs().nan_to_num(0, 0)
            near = places * size.amax(-1, keepdim=True) if key == "out" else STATS * (size + 1)
            right = ((a - b).abs() <= near) | (a == b) | (a.isnan() & b.isnan())
            wrong += right.logical_not_().sum()
        if wrong:
            return (
                f"its answer is not that of 'loops': {key} differs in {int(wrong)} of {whole.numel()} numbers"
                " (compiled wrong: please report it, with what `tritoncp doctor` prints)"
            )
    return None

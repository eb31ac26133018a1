"""Which engine runs a call, and how user functions reach it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tritoncp.eager import EagerEngine
from tritoncp.mods import Mod

_MODS: dict[str, Mod] = {}  # structure by digest: what an op's constant spec string names


@dataclass(frozen=True)
class Spec:
    """The constant part of a call. Mods are named by digest; the numbers they capture are arguments."""

    scale: float
    mask: str | None
    score: str | None
    counts: tuple[int, int]  # captured tensors of the mask_mod, of the score_mod
    numbers: tuple[str, ...]  # kinds of the captured numbers, "i" or "f", mask_mod's first
    mask_numbers: int
    want_max: bool
    world: str | None  # process group by name; "" = all ranks in lockstep
    options: tuple[tuple[str, Any], ...] = ()

    def encode(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def decode(cls, text: str) -> Spec:
        raw = json.loads(text)
        raw["options"] = tuple((name, value) for name, value in raw["options"])
        return cls(**raw | {"counts": tuple(raw["counts"]), "numbers": tuple(raw["numbers"])})


def register(mod: Mod | None) -> str | None:
    """Make a mod's structure known to the ops; its name there."""
    if mod is None:
        return None
    if mod.digest not in _MODS:
        _MODS[mod.digest] = replace(mod, tensors=(), numbers=())  # what it captures belongs to the call
    return mod.digest


def wanted(spec: Spec) -> tuple[int, ...]:
    """Which of the score_mod's tensors want gradients, counted among all captures of the call."""
    return tuple(i + spec.counts[0] for i in _MODS[spec.score].wants) if spec.score else ()


def uses_triton(device: torch.device) -> bool:
    """Kernels run on GPUs, and interpreted on the CPU where TRITON_INTERPRET=1; else the eager engine."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET", "0") == "1"


def make(spec: Spec, device: torch.device, captures: Sequence[Tensor], ints: Sequence[int],
         floats: Sequence[float], grads: Sequence[Tensor] = ()) -> Any:
    """The engine of one call, with captured values bound."""
    whole, real = iter(ints), iter(floats)
    numbers = [next(whole) if kind == "i" else next(real) for kind in spec.numbers]
    tensors = list(captures[: spec.counts[0]]), list(captures[spec.counts[0] :])
    values = numbers[: spec.mask_numbers], numbers[spec.mask_numbers :]
    mask, score = (_captured(*of) for of in zip((spec.mask, spec.score), tensors, values))
    if uses_triton(device):
        from tritoncp.kernels.engine import Mods, TritonEngine

        mods = Mods(
            mask=mask and mask.fn, mask_caps=mask.caps(device=device) if mask else (),
            score=score and score.fn, score_grad=score and score.grad, score_back=score and score.back,
            score_caps=score.caps(device=device) if score else (),
            score_dcaps=score.dcaps(grads) if score and grads else (),
        )
        return TritonEngine(mods, spec.scale, dict(spec.options))
    wants = score.wants if score else ()

    def bind(wanted: Sequence[Tensor]) -> Any:
        inner = list(tensors[1])
        for place, tensor in zip(wants, wanted, strict=True):
            inner[place] = tensor
        return _bound(score, inner, values[1])

    return EagerEngine(
        spec.scale, _bound(mask, tensors[0], values[0]), score and bind, [tensors[1][i] for i in wants], grads
    )


def _captured(name: str | None, tensors: list[Tensor], numbers: list[Any]) -> Mod | None:
    """A registered structure with what this call captures."""
    return None if name is None else replace(_MODS[name], tensors=tuple(tensors), numbers=tuple(numbers))


def _bound(mod: Mod | None, tensors: list[Tensor], numbers: list[Any]) -> Any:
    if mod is None:
        return None
    if mod.graph is None:
        raise ValueError(
            "a hand-written @triton.jit mod needs Triton: run on a GPU, or interpreted with TRITON_INTERPRET=1"
        )
    graph = mod.graph
    return lambda *indices: graph(*indices, *tensors, *numbers)

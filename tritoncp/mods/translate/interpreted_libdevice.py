"""Functions of libdevice for Triton's interpreter, which has none: torch computes them in float64."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import TensorHandle

from tritoncp.mods.translate.pointwise_ops import LIBDEVICE

# Functions of several operands, and those that also have a rule for a dtype of their own.
_OTHERS = "atan2", "copysign", "fmod", "hypot", "pow", "tanh", "trunc"


def _interpreted(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Apply a torch function to the data of interpreted operands, which have one float type."""

    def call(*operands: Any) -> Any:
        shaped = tl.broadcast(*operands) if len(operands) == 2 else operands
        data = [operand.handle.data for operand in shaped]
        result = function(*(torch.from_numpy(x.astype("f8")) for x in data)).numpy().astype(data[0].dtype)
        return tl.tensor(TensorHandle(result, shaped[0].dtype), shaped[0].type)

    return call


libdevice = SimpleNamespace(
    rint=_interpreted(torch.round),
    **{name: _interpreted(getattr(torch, name)) for name in (*LIBDEVICE, *_OTHERS)},
)

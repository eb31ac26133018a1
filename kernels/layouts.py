"""The properties of arguments for which kernels are compiled and launches are prepared. It does not import
Triton, which the CPU engine does not need."""

from typing import Any

import torch
from torch import Tensor


def layout_of(x: Tensor) -> tuple[Any, ...]:
    """The properties of a tensor that decide which compiled kernel runs and how it is launched: dtype, shape,
    strides, address modulo 16, and on AMD whether 32 bits hold every offset in its memory.

    The compiler only uses whether an address is a multiple of 16. The full remainder is kept because it also
    decides this for every slice of the tensor: at an offset of 14 bytes, a base with remainder 2 gives an
    aligned slice, one with remainder 6 does not.
    """
    layout = x.dtype, x.shape, x.stride(), x.data_ptr() % 16
    return (*layout, x.untyped_storage().nbytes() < 2**31) if torch.version.hip else layout


def specialisation_of(value: Any) -> Any:
    """The properties of an argument for which Triton specialises a kernel. For a tensor these are dtype and
    alignment; shape and strides are separate arguments."""
    if isinstance(value, tuple):
        return tuple(map(specialisation_of, value))
    if isinstance(value, Tensor):
        dtype, _, _, *address = layout_of(value)
        return dtype, *address
    if isinstance(value, int):
        return value == 1, value % 16 == 0, -(2**31) <= value < 2**31, value < 2**63
    return type(value)

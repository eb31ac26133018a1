"""Conversions of PTX that NumPy has no type for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tritoncp.executor.arithmetic.floating import narrow64

u1, u2, u4 = np.uint8, np.uint16, np.uint32
Array = np.ndarray[Any, Any]
FP8 = {"e4m3x2": (torch.float8_e4m3fn, 448.0), "e5m2x2": (torch.float8_e5m2, 57344.0)}


def saturated(x: Array, t: str) -> Array:
    """An integer clamped to the range of another type."""
    info, given = np.iinfo(t), np.iinfo(x.dtype)
    low, high = max(info.min, given.min), min(info.max, given.max)
    return np.clip(x, x.dtype.type(low), x.dtype.type(high)).astype(t)


def integer_to_16(t: str, x: Array) -> Array:
    """An integer to float16 or bfloat16, rounded once."""
    wide = x.astype(np.float64)
    if x.dtype.itemsize == 8:  # rounded to odd, as numbers past 2^53 are not exact
        low = (x & x.dtype.type(0x7FF)).astype(bool)
        cut = (x & ~x.dtype.type(0x7FF)) | np.where(low, x.dtype.type(0x800), x.dtype.type(0))
        large = np.abs(wide) >= 2.0**53
        wide = np.where(large, cut.astype(np.float64), wide)
    return narrow64(t, wide)


def to_fp8(t: str, high: Array, low: Array) -> Array:
    """Two float32 arrays to pairs of 8-bit floats, to nearest even; what is too large becomes the largest."""
    dtype, most = FP8[t]
    bytes_ = []
    for x in (low, high):
        clamped = torch.from_numpy(np.where(np.isnan(x), x, np.clip(x, -most, most)))
        code = clamped.to(dtype).view(torch.uint8).numpy()
        bytes_.append(np.where(np.isnan(x), u1(0x7F), code))
    return np.stack(bytes_, 1).reshape(-1).view(u2)


def of_fp8(t: str, pairs: Array) -> Array:
    """Pairs of 8-bit floats to pairs of float16, exactly."""
    codes = torch.from_numpy(np.ascontiguousarray(pairs).view(u1).copy())
    return codes.view(FP8[t][0]).to(torch.float16).view(torch.int16).numpy().view(u4)

"""Operands of tensor cores in shared memory: addresses of 16-byte units from a matrix descriptor."""

from __future__ import annotations

from typing import Any

import numpy as np

from tritoncp.executor.arithmetic.warps import NBYTES, decode
from tritoncp.executor.faults import CannotContinue
from tritoncp.executor.threads import Access

Array = np.ndarray[Any, Any]
u8 = np.uint64


def swizzled(offset: Array, swizzle: int) -> Array:
    """Apply a swizzle to offsets: 0 none, 1 of 32 bytes, 2 of 64, 3 of 128."""
    return offset if swizzle == 0 else offset ^ (((offset >> 7) & ((1 << swizzle) - 1)) << 4)


def fields(descriptor: Array) -> tuple[Array, Array, Array]:
    """Return a descriptor's start, leading and stride offsets in bytes, [n, 1, 1] each."""
    start, leading, stride = (
        (((descriptor >> u8(shift)) & u8(0x3FFF)) << u8(4)).astype(np.int64)[:, None, None]
        for shift in (0, 16, 32)
    )
    return start, leading, stride


def unit_offsets(descriptor: Array, swizzle: int, rows: int, k: int, t: str, transposed: bool) -> Array:
    """Return offsets of 16-byte units in shared memory: [n, rows, units of K], transposed [n, units of rows,
    K]."""
    start, leading, stride = fields(descriptor)
    nbytes, width = NBYTES[t], 16 << swizzle
    per = 16 // nbytes
    if not transposed:
        r, u = np.arange(rows)[:, None], np.arange(k // per)[None, :]
        offset = (r % 8) * width + (r // 8) * stride + u * (16 if swizzle else leading)
    else:
        if nbytes > 2:
            raise CannotContinue(f"a transposed operand of {t}")
        r, kk = np.arange(rows // per)[:, None], np.arange(k)[None, :]
        span = width // 16
        if swizzle:
            offset = (r % span) * 16 + (r // span) * leading + (kk % 8) * width + (kk // 8) * stride
        else:
            offset = r * stride + (kk % 8) * 16 + (kk // 8) * leading
    return swizzled(start + offset, swizzle)


def read_operand(
    readers: list[Access],
    descriptor: Array,
    swizzle: int,
    rows: int,
    k: int,
    t: str,
    transposed: bool,
    what: str,
    clock: Array,
    agent: Array | int,
) -> Array:
    """Read operands [n, rows, k] from shared memory as float32; arrays have a row for each operand.

    readers: the threads that must be ordered after the writes of the operands
    agent, clock: the reading agent, see `Clocks`
    """
    access, n, nbytes = readers[0], len(descriptor), NBYTES[t]
    shared = access.ctas.shared
    if access.ctas.counts is not None:
        access.ctas.counts.operand(n * rows * k * nbytes)
    offset = unit_offsets(descriptor, swizzle, rows, k, t, transposed)
    if offset.max() + 16 > shared.used:
        bad = offset.reshape(n, -1) + 16 > shared.used
        text = f"{shared.used} bytes are allocated"
        access.fault(f"out of bounds shared {what}", bad, int(offset.max()), None, text)
        offset = np.clip(offset, 0, shared.used // 16 * 16 - 16)
    units = (offset + shared.starts(access)[:, None, None]) // 16
    if shared.check:
        flat, row = units.reshape(-1), np.repeat(np.arange(n), units[0].size)
        for reader in readers:
            if shared.check_async_read(reader.select(row), flat, what):
                break
        shared.note_async_reader(flat, clock[row], np.broadcast_to(agent, n)[row])
    raw = shared.views[16][units].view(f"u{nbytes}")
    if transposed:
        per = 16 // nbytes
        raw = raw.reshape(n, rows // per, k, per).transpose(0, 1, 3, 2)
    return decode(t, np.ascontiguousarray(raw).reshape(n, rows, k))

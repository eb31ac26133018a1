"""Tensors as kernel arguments, and loads and stores of their tiles.

Naming grammar of kernel locals
    i_*  scalar index (program, loop, batch, head)      o_*  vector of offsets
    n_*  scalar count                                    b_*  block of values in registers
    p_*  pointer                                         m_*  boolean mask
    UPPER_CASE is a ``tl.constexpr``.  A comment behind each block gives its shape: M query rows, N key
    rows, D head dim of q and k, E head dim of v.  Channels are cut in pieces, each a power of two
    (:func:`tritoncp.kernels.tile_rules.pieces`): a block with channels is a tuple of blocks, one per piece.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tritoncp.kernels.tile_rules import pieces

# The interpreter's tl.dot reads bf16 as raw uint16, so operands are widened there; products of two
# bf16 or fp16 values are exact in float32, which is what the tensor cores accumulate too.
INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))
# Tiles are at most 256 rows by 256 channels: below this stride, offsets inside one fit 31 bits. (Below half
# of it with up to 576 channels.)
WIDE_STRIDE = 1 << 22


class Strided(NamedTuple):
    """A [batch, head, row, channel] tensor of any strides, as a kernel argument.

    ``wide`` is None where offsets inside a tile fit 32 bits.
    """

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_s: Any
    stride_d: Any
    wide: Any


class Stat(NamedTuple):
    """A [batch, head, row] tensor of row statistics, rows contiguous."""

    ptr: Any
    stride_b: Any
    stride_h: Any


class Stream(NamedTuple):
    """A tensor whose tiles a loop reads: by the descriptors of its pieces of channels, or by pointers where
    these are None."""

    x: Any  # Strided
    desc0: Any
    desc1: Any


class HeadRows(NamedTuple):
    """Where the rows of a tile lie in tensors [B, H, S, ...]: ``first + offsets``, of which those past
    ``count`` are absent.

    head: a scalar, or the head of each row [M]; head_column: the same, or [M, 1]
    """

    batch: Any
    head: Any
    head_column: Any
    first: Any
    offsets: Any
    count: Any


@triton.jit
def head_rows(i_b, i_h, tile, offsets):
    """Where the rows of a ``tile`` of one head lie."""
    return HeadRows(i_b, i_h, i_h, tile.row, offsets, tile.n)


def view(x: torch.Tensor | None) -> Strided | Stat:
    """Make the kernel argument of ``x`` [B, H, S, D], of ``x`` [B, H, S] whose rows are contiguous, or of an
    absent tensor."""
    if x is None:
        return _NO_TENSOR
    strides = x.stride()
    if len(strides) == 3:
        return Stat(x, *strides[:2])
    limit = WIDE_STRIDE if x.shape[3] <= 256 else WIDE_STRIDE // 2
    return Strided(x, *strides, 1 if max(strides[2:]) >= limit else None)


_NO_TENSOR = Strided(None, 0, 0, 0, 0, None)


def copyable(x: torch.Tensor) -> bool:
    """Whether tiles of x [B, H, S, D] can be copied by tensor descriptor (TMA): contiguous
    channels, address and strides multiples of 16 bytes, no overlap of batch rows or heads."""
    strides = [stride for size, stride in zip(x.shape[:3], x.stride()) if size > 1]
    apart = [stride * x.element_size() for stride in strides]
    aligned = not any(offset % 16 for offset in (x.data_ptr(), *apart))
    return x.stride(3) == 1 and aligned and all(strides) and 0 not in x.shape


def descriptors(x: torch.Tensor, rows: int, widths: tuple[int, int]) -> list[TensorDescriptor | None]:
    """Make the descriptors of x [B, H, S, D] for tiles of ``rows`` rows by each width of a piece."""
    unit = 16 // x.element_size()
    strides = [stride if size > 1 else unit for size, stride in zip(x.shape[:3], x.stride())]
    shape, strides = list(x.shape), [*strides, 1]
    return [TensorDescriptor(x, shape, strides, [1, 1, rows, width]) if width else None for width in widths]


def descriptor_at(fields: dict[str, Any], x: torch.Tensor) -> TensorDescriptor:
    """Make a descriptor of ``x`` from the ``fields`` of one for an equal layout, without its checks."""
    copy = object.__new__(TensorDescriptor)
    copy.__dict__ = fields | {"base": x}
    return copy


class Channels(NamedTuple):
    """Channels of a head, or a range of them, in pieces: ``count`` of ``first`` channels, then one of
    ``second`` channels, unless that is 0. A range begins after ``skip`` pieces of ``first`` channels."""

    dim: Any  # of the head
    first: Any
    second: Any
    count: Any = 1
    skip: Any = 0


def channels(dim: int, widest: int) -> Channels:
    """Cut ``dim`` channels into pieces of at most ``widest``."""
    return Channels(dim, *pieces(dim, widest))


def channel_range(whole: Channels, part: int, parts: int) -> Channels:
    """One of ``parts`` ranges of about equally many pieces.

    >>> [channel_range(channels(576, 128), part, 2) for part in range(2)]  # doctest: +NORMALIZE_WHITESPACE
    [Channels(dim=576, first=128, second=0, count=2, skip=0),
     Channels(dim=576, first=128, second=64, count=2, skip=2)]
    """
    if parts == 1:
        return whole
    total = whole.count + bool(whole.second)
    begin, end = (at * total // parts for at in (part, part + 1))
    second = whole.second if end == total else 0
    return whole._replace(second=second, count=end - begin - bool(second), skip=begin)


@triton.constexpr_function
def count_pieces(dim):
    """The number of pieces of channels."""
    return dim.count + (dim.second > 0)


@triton.constexpr_function
def is_last(dim):
    """Whether a range of channels ends with the last channel."""
    return (dim.skip + dim.count) * dim.first + dim.second >= dim.dim


@triton.constexpr_function
def piece_width(dim, i_piece):
    """The number of channels of a piece."""
    return dim.first if i_piece < dim.count else dim.second


@triton.constexpr_function
def accumulator_dtype(dtype):
    """The dtype in which kernels sum products of operands: float64 for float64, else float32."""
    return tl.float64 if dtype == tl.float64 else tl.float32


@triton.jit
def head_pointer(x, i_b, i_h):
    """Pointer to the first row of one head."""
    return x.ptr + i_b.to(tl.int64) * x.stride_b + i_h.to(tl.int64) * x.stride_h


@triton.jit
def stat_pointers(x, rows):
    """Pointers to the statistics of a tile's rows."""
    return head_pointer(x, rows.batch, rows.head) + rows.first + rows.offsets


@triton.jit
def row_pointers(x, i_b, i_h, row, o_d):
    """Pointers to channels of one row."""
    return head_pointer(x, i_b, i_h) + row.to(tl.int64) * x.stride_s + o_d.to(tl.int64) * x.stride_d


@triton.jit
def load_stat(x, rows, m_m, CHECK: tl.constexpr = True, other=0.0):
    """Statistics of a tile's rows, ``other`` where ``m_m`` is false; without CHECK it is true everywhere."""
    if CHECK:
        return tl.load(stat_pointers(x, rows), mask=m_m, other=other)
    else:
        return tl.load(stat_pointers(x, rows))


@triton.jit
def tile_pointers(x, p_x, rows, o_d):
    """Pointers to channels of a tile's rows in a head at ``p_x``, by 64-bit offsets."""
    o_s = (rows.first + rows.offsets).to(tl.int64)
    return p_x + o_s[:, None] * x.stride_s + o_d.to(tl.int64)[None, :] * x.stride_d


@triton.jit
def tile_mask(rows, o_d, DIM: tl.constexpr, PAD: tl.constexpr):
    """Mask of a tile's present rows and, where its channels are padded, first DIM channels."""
    if PAD:
        return (rows.offsets[:, None] < rows.count) & (o_d[None, :] < DIM)
    else:
        return rows.offsets[:, None] < rows.count


@triton.jit
def load_rows(x, rows, START: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, CHECK: tl.constexpr):
    """Channels START : START + WIDTH of a tile's rows [M, WIDTH]; zero past DIM channels and, with CHECK, in
    absent rows."""
    p_x = head_pointer(x, rows.batch, rows.head_column)
    o_d = START + tl.arange(0, WIDTH)
    p_tile = tile_pointers(x, p_x, rows, o_d)
    if CHECK:
        return tl.load(p_tile, mask=tile_mask(rows, o_d, DIM, START + WIDTH > DIM), other=0.0)
    elif START + WIDTH > DIM:
        return tl.load(p_tile, mask=o_d[None, :] < DIM, other=0.0)
    else:
        return tl.load(p_tile)


@triton.jit
def store_rows(x, rows, b_x, START: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, ADD: tl.constexpr):
    """Store channels START : START + WIDTH of a tile's present rows, or add to them atomically."""
    p_x = head_pointer(x, rows.batch, rows.head_column)
    o_d = START + tl.arange(0, WIDTH)
    if x.wide is None:  # 64-bit offsets here would spill 144 bytes of dQ's loops (sm_100, 128 channels)
        p_x += rows.first.to(tl.int64) * x.stride_s
        p_tile = p_x + (rows.offsets[:, None] * x.stride_s + o_d[None, :] * x.stride_d)
    else:
        p_tile = tile_pointers(x, p_x, rows, o_d)
    m_tile = tile_mask(rows, o_d, DIM, START + WIDTH > DIM)
    if ADD:  # also without contention: needs no registers for a load
        tl.atomic_add(p_tile, b_x.to(x.ptr.dtype.element_ty), mask=m_tile, sem="relaxed")
    else:
        tl.store(p_tile, b_x.to(x.ptr.dtype.element_ty), mask=m_tile)


@triton.jit
def load_pieces(x, rows, DIM: tl.constexpr):
    """A tile's rows: a block [M, width] for each piece of the channels."""
    return stream_pieces(Stream(x, None, None), rows, DIM, True)


@triton.jit
def stream_rows(
    x, desc, rows, START: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, CHECK: tl.constexpr
):
    """load_rows by tensor descriptor, or by pointers if ``desc`` is None. A descriptor loads zeros past the
    tensor's last row."""
    if desc is None:
        return load_rows(x, rows, START, WIDTH, DIM, CHECK)
    else:
        return desc.load([rows.batch, rows.head, rows.first, START]).reshape([rows.offsets.shape[0], WIDTH])


@triton.jit
def stream_piece(stream, rows, I: tl.constexpr, DIM: tl.constexpr, CHECK: tl.constexpr):
    """Piece ``I`` of the channels of a tile's rows."""
    if DIM.count > I:
        return stream_rows(
            stream.x, stream.desc0, rows, (DIM.skip + I) * DIM.first, DIM.first, DIM.dim, CHECK
        )
    else:
        return stream_rows(
            stream.x, stream.desc1, rows, (DIM.skip + I) * DIM.first, DIM.second, DIM.dim, CHECK
        )


@triton.jit
def stream_pieces(stream, rows, DIM: tl.constexpr, CHECK: tl.constexpr):
    """load_pieces inside a loop; without CHECK all rows are present."""
    b_x = ()
    for I in tl.static_range(count_pieces(DIM)):
        b_x = b_x + (stream_piece(stream, rows, I, DIM, CHECK),)  # noqa: RUF005
    return b_x


@triton.jit
def store_pieces(x, rows, b_x, DIM: tl.constexpr, ADD: tl.constexpr = False):
    """Store a tile's rows, or add to them: the counterpart of load_pieces."""
    for I in tl.static_range(count_pieces(DIM)):
        store_rows(x, rows, b_x[I], (DIM.skip + I) * DIM.first, piece_width(DIM, I), DIM.dim, ADD)


@triton.jit
def add_rows(x, desc, rows, b_x, START: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Add to channels START : START + WIDTH of a tile's rows, atomically.  A descriptor also adds the absent
    rows, where b_x is 0."""
    if desc is None:
        store_rows(x, rows, b_x, START, WIDTH, DIM, True)
    else:
        at = [rows.batch, rows.head, rows.first, START]
        desc.atomic_add(at, b_x.reshape([1, 1, rows.offsets.shape[0], WIDTH]))

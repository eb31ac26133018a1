"""Tables of one attention step: the mask in the form that kernels read, in units of the step's slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tritoncp.core.upload import DeviceCopy
from tritoncp.masks.mask import Mask
from tritoncp.masks.mask_mod import UNBOUNDED
from tritoncp.masks.runs.block_runs import Kind, Runs
from tritoncp.masks.runs.transposed_runs import transpose
from tritoncp.planning.selected_rows import SelectedRows


class ForwardStep(NamedTuple):
    """The arguments of one forward step: attention of queries [B, Hq, S, D] to the keys [B, Hkv, rows, D] and
    values [B, Hkv, rows, E] of a buffer, into out [B, Hq, S, E], lse and max_scores [B, Hq, S].

    state: (acc [B, Hq, S, E], m, l [B, Hq, S]) between the steps of a row, m in log2 units. With
           ``load_state`` the step continues from it; with ``store_state`` the step writes it instead of
           results
    """

    q: Tensor
    k: Tensor
    v: Tensor
    tables: Tables
    out: Tensor
    lse: Tensor
    max_scores: Tensor | None = None
    state: Sequence[Tensor] | None = None
    load_state: bool = False
    store_state: bool = False


class BackwardStep(NamedTuple):
    """The inputs of one backward step: queries [B, Hq, S, D], keys [B, Hkv, rows, D] and values [B, Hkv,
    rows, E] of a buffer, dout [B, Hq, S, E], lse and delta = rowsum(out * dout) - dlse [B, Hq, S], and the
    tables of the step."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor
    tables: Tables


class PreparedStep(Protocol):
    """The prepared launches of a step; a call starts them."""

    def __call__(self) -> None: ...


class StepEngine(Protocol):
    """An engine computes the steps of one attention call on one device. It has the call's scale, mods and
    captures, and the batch row and head of the layer at which its tensors begin.

    Sums are float32, or float64 for float64 tensors. Padding, that is rows outside of all slots, is neither
    read nor written.
    """

    @property
    def fused(self) -> bool:
        """Whether :meth:`dkdv` adds dQ, and :meth:`dq` only clears it."""

    @property
    def v_head_dim(self) -> int | None:
        """Head dim of out if a step's keys are latents, which the engine expands; None: the head dim of
        values."""

    @property
    def selected(self) -> SelectedRows | None:
        """The keys that the queries select, of a :class:`SelectedEngine`; None: the mask alone decides."""

    def forward(self, step: ForwardStep, /) -> PreparedStep:
        """Prepare a forward step."""

    def dq(self, step: BackwardStep, dq: Tensor, /, *, add: bool = False) -> PreparedStep:
        """Prepare to write the gradient of queries to dq [B, Hq, S, D], or to add it with ``add``. dq has q's
        dtype or lse's; a fused engine needs lse's."""

    def dkdv(
        self, step: BackwardStep, dk: Tensor, dv: Tensor, dq: Tensor, /, *, add: bool = False, split: int = 1
    ) -> PreparedStep:
        """Prepare to write the gradients of keys and values to dk [B, Hkv, rows, D] and dv [B, Hkv, rows, E],
        of k's dtype or lse's, or with ``add`` to add them. A fused engine adds dQ to dq. The gradients of
        captures are added to the engine's buffers, by dq or by a fused dkdv.

        split: result of :meth:`split`; if it is > 1, dk and dv have ``Hkv * split`` heads of partial sums
        """

    def split(self, q: Tensor, k: Tensor, tables: Tables, /) -> int:
        """Return the number of programs that share the query heads of a KV head in :meth:`dkdv`."""


class Engine(StepEngine, Protocol):
    """An engine that also computes parts of its heads, and delta."""

    def from_head(self, first: int, /) -> Engine:
        """Return the engine for tensors that begin with query head ``first`` of the layer."""

    def delta(self, out: Tensor, dout: Tensor, dlse: Tensor | None, delta: Tensor, /) -> PreparedStep:
        """Prepare to write delta [B, Hq, S] = rowsum(out * dout) - dlse, for out and dout [B, Hq, S, E]."""


class SelectedEngine(Engine, Protocol):
    """An engine of a call with selected keys. A schedule that moves queries also moves what they select."""

    def with_selected(self, selected: SelectedRows, /) -> SelectedEngine:
        """Return the engine for other queries of the call."""


@dataclass(frozen=True, eq=False)
class Tables:
    """The tables of one step: local Q slots x the slots of one KV buffer.

    q_slots, kv_slots: int32 [Bp, n, 3] = (row in buffer, global position, tokens)
    row_ptr, row_runs: runs of KV slots for each Q slot (forward, dQ), as ptr and runs of :class:`Runs`
    col_ptr, col_runs: runs of Q slots for each KV slot (dK/dV)
    row_order, col_order: int32 [Bm, slots], Q slots and KV slots by descending work, the order in which CTAs
                       start; None with a window
    lo, hi:            int32 [Bm, Hm, S_local], the interval of keys of a row inside masked blocks, or None
    q_block, kv_block: max tokens of a slot
    q_rows, kv_rows:   rows of the buffer of queries, and of the KV buffer
    q_first, kv_first: global position of row 0
    dense_q, dense_kv: row r of the buffer is position first + r, and slots but the last are whole blocks
    q_ends, kv_ends:   ends of slots: "block" (all hold whole blocks), else "buffer" (or end with the buffer's
                       tokens), else "anywhere"
    mask:              "none" | "interval" | "mod": how masked blocks are decided
    window:            (left, right) if positions alone determine runs and intervals: kernels read no table; a
                       side without a limit is None
    has_masked:        whether there are masked blocks
    bounded:           whether there are blocks of Kind.BOUNDED

    Documents of 5 and 7 tokens in three blocks of 4: rank 1 has the queries of blocks 1 and 2, and its step
    reads the gathered buffer, where rank 0's shard (block 0 and padding) comes first.

    >>> from tritoncp import causal, create_block_mask, document, make_plan
    >>> mask = create_block_mask(causal() & document(lengths=[5, 7]), 1, 1, 12, 12, BLOCK_SIZE=4)
    >>> plan = make_plan(mask, world_size=2, rank=1, balancer="head_tail")
    >>> t = plan.tables("cpu", batch=1, heads=1)
    >>> t.q_slots.tolist(), t.kv_slots.tolist()
    ([[[0, 4, 4], [4, 8, 4]]], [[[0, 0, 4], [8, 4, 4], [12, 8, 4]]])
    >>> t.row_ptr.tolist(), t.row_runs.tolist()     # Q slot 0 sees KV slots 0 and 1, Q slot 1 sees 1 and 2
    ([[[[0, 1, 1], [1, 2, 2]]]], [[0, 2, 0], [1, 3, 0]])
    >>> t.col_ptr.tolist(), t.col_runs.tolist()     # KV slot 1 is seen by Q slots 0 and 1
    ([[[[0, 1, 1], [1, 2, 2], [2, 3, 3]]]], [[0, 1, 0], [0, 2, 0], [1, 2, 0]])
    >>> t.row_order.tolist(), t.col_order.tolist()
    ([[0, 1]], [[1, 0, 2]])
    >>> t.lo.tolist(), t.hi.tolist()                # query 4 is the last of its document and sees keys 0 to 4
    ([[[0, 5, 5, 5, 5, 5, 5, 5]]], [[[5, 6, 7, 8, 9, 10, 11, 12]]])
    >>> t.q_block, t.kv_block, t.q_rows, t.kv_rows, t.q_first, t.kv_first
    (4, 4, 8, 12, 4, 0)
    >>> t.dense_q, t.dense_kv, t.q_ends, t.kv_ends  # padding lies between the KV slots
    (True, False, 'block', 'block')
    >>> t.mask, t.window, t.has_masked, t.bounded
    ('interval', None, True, False)
    """

    q_slots: Tensor
    kv_slots: Tensor
    row_ptr: Tensor
    row_runs: Tensor
    col_ptr: Tensor
    col_runs: Tensor
    row_order: Tensor | None
    col_order: Tensor | None
    lo: Tensor | None
    hi: Tensor | None
    q_block: int
    kv_block: int
    q_rows: int
    kv_rows: int
    q_first: int
    kv_first: int
    dense_q: bool
    dense_kv: bool
    q_ends: str
    kv_ends: str
    mask: str
    window: tuple[int | None, ...] | None
    has_masked: bool
    bounded: bool

    def copy_to(self, device: torch.device) -> DeviceCopy[Tables]:
        """Copy the tables to a device."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return DeviceCopy(
            list(tensors.values()), device, lambda *copies: replace(self, **dict(zip(tensors, copies)))
        )


def tables_of(
    mask: Mask,
    q_slots: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    runs: Runs,
    interval: tuple[Tensor, Tensor] | None,
) -> Tables:
    """Make the tables of a step between Q slots, whose rows have ``positions``, and the slots of a KV buffer.

    runs: result of :func:`slot_runs`; interval: row intervals of the whole mask, None if they are not valid
        for the call.
    """
    lo, hi = _local_intervals(interval, positions)
    decided = "none" if not runs.has_kind(Kind.MASKED) else "interval" if lo is not None else "mod"
    dense_q = _is_dense(q_slots, mask.q_block)
    dense_kv = _is_dense(kv_slots, mask.kv_block)
    q_rows, kv_rows = (int(slots[0, :, 2].sum()) for slots in (q_slots, kv_slots))
    # With one query and one key all positions are constants, which crash ptxas 12.8 and 12.9 (sm_90).
    positional = _is_contiguous(q_slots) and _is_contiguous(kv_slots) and (q_rows > 1 or kv_rows > 1)
    window = mask.window if positional else None
    rows, cols = runs.by_rows, transpose(runs).by_rows
    return Tables(
        q_slots,
        kv_slots,
        rows.ptr,
        rows.runs,
        cols.ptr,
        cols.runs,
        None if window else _falling_work(runs),
        None if window else _falling_work(cols),
        lo,
        hi,
        mask.q_block,
        mask.kv_block,
        q_rows=q_rows,
        kv_rows=kv_rows,
        q_first=int(q_slots[0, 0, 1]) if q_slots.shape[1] else 0,
        kv_first=int(kv_slots[0, 0, 1]) if kv_slots.shape[1] else 0,
        dense_q=dense_q,
        dense_kv=dense_kv,
        q_ends=_ends(q_slots, mask.q_block),
        kv_ends=_ends(kv_slots, mask.kv_block),
        mask="interval" if window else decided,
        window=window and tuple([None if side == UNBOUNDED else side for side in window]),
        has_masked=any(map(runs.has_kind, (Kind.MASKED, Kind.BOUNDED))) or window is not None,
        bounded=runs.has_kind(Kind.BOUNDED) and window is None,
    )


def slot_runs(mask: Mask, q_slots: Tensor, kv_slots: Tensor) -> Runs:
    """Return the mask's runs in units of slots: rows are Q slots, columns KV slots.

    A full block stays full only if both slots are whole blocks, so that full runs need no bounds checks. One
    order of KV slots has to serve every batch row of the mask.
    """
    q_blocks = torch.where(q_slots[..., 2] > 0, q_slots[..., 1] // mask.q_block, -1).to(torch.int64)
    kv_blocks = (kv_slots[..., 1] // mask.kv_block).to(torch.int64)
    kv_blocks = torch.where(kv_slots[..., 2] > 0, kv_blocks, mask.runs.n_cols)
    edges = torch.arange(mask.runs.n_cols + 1).expand(kv_blocks.shape[0], -1).contiguous()
    runs = mask.runs.take(q_blocks).remap(torch.searchsorted(kv_blocks.contiguous(), edges))
    short_q = q_slots[:, None, :, None, 2] < mask.q_block  # [Bp, 1, rows, 1]
    short_kv = kv_slots[:, None, None, :, 2] < mask.kv_block  # [Bp, 1, 1, cols]
    if not bool(short_q.any() | short_kv.any()):
        return runs
    kinds = runs.to_kinds()
    cut = (kinds == Kind.FULL) & (short_q | short_kv)
    return Runs.from_kinds(kinds.masked_fill(cut, Kind.BOUNDED)) if bool(cut.any()) else runs


def _falling_work(runs: Runs) -> Tensor:
    """Return the rows of each batch row by descending number of listed blocks of all heads: int32 [Bm,
    rows]."""
    masked, full = runs.counts()
    work = (masked + full).sum(1)
    return work.argsort(dim=1, descending=True, stable=True).to(torch.int32)


def _local_intervals(
    interval: tuple[Tensor, Tensor] | None, positions: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    if interval is None:
        return None, None
    local = []
    for bound in interval:  # [Bm, Hm, q_len]
        batch = max(bound.shape[0], positions.shape[0])
        index = positions.clamp(min=0)[:, None].expand(batch, bound.shape[1], -1)
        local.append(bound.expand(batch, -1, -1).gather(2, index).contiguous())
    return local[0], local[1]


def _is_contiguous(slots: Tensor) -> bool:
    """Return whether row r of the buffer has global position first + r."""
    if slots.shape[0] != 1 or slots.shape[1] == 0:
        return False
    row, position, tokens = slots[0].unbind(1)
    return bool(
        (row == tokens.cumsum(0) - tokens).all() & (position - row == position[0]).all() & (tokens > 0).all()
    )


def _is_dense(slots: Tensor, block: int) -> bool:
    """Return whether slots are contiguous, and slot i starts at row i * block."""
    return _is_contiguous(slots) and bool((slots[0, :, 0] == torch.arange(slots.shape[1]) * block).all())


def _ends(slots: Tensor, block: int) -> str:
    """Classify the ends of slots ("block", "buffer", "anywhere"), which decide the bounds checks of a
    tile."""
    row, _, tokens = slots.unbind(-1)
    is_full = (tokens == 0) | (tokens == block)
    if bool(is_full.all()):
        return "block"
    return "buffer" if bool((is_full | (row + tokens == tokens.sum(-1, keepdim=True))).all()) else "anywhere"

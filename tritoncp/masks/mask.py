"""Mask, the public class of block-sparse masks, and `create_block_mask`.

Block lists win over the mask_mod, as in compiled flex attention: an unlisted block is invisible and a full
block is unmasked, even if the mask_mod disagrees.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tritoncp import mods
from tritoncp.core.dynamo_boundary import host_only
from tritoncp.core.handles import handle_of, stand_for
from tritoncp.core.host_copy import on_host
from tritoncp.core.pytrees import register_handled
from tritoncp.core.records import fields_of, record, replace
from tritoncp.masks.block_mask_interface import (
    BlockMaskInterface,
    selected_numbers,
    sparsity_counts_blocks,
)
from tritoncp.masks.classification import classify
from tritoncp.masks.classification.classify import Grid
from tritoncp.masks.closed_forms import PartOfMask, as_int, is_closed_form
from tritoncp.masks.mask_mod import MAX_TOKENS, Intervals, MaskFn, MaskMod
from tritoncp.masks.prefix_tree import Tree
from tritoncp.masks.runs.block_lists import bound_ragged_blocks, lists_from_blocks
from tritoncp.masks.runs.block_runs import ABSENT, Kind, Runs
from tritoncp.masks.runs.transposed_runs import transpose
from tritoncp.mods.fingerprint import ModState
from tritoncp.mods.places import check_pickles
from tritoncp.mods.snapshot import Snapshot, captured_state
from tritoncp.mods.user_code import describe

Device = str | torch.device


@record()
class Mask(BlockMaskInterface):
    """A block-sparse mask of any size in little memory; every tensor on the CPU.

    >>> from tritoncp.masks import causal
    >>> m = create_block_mask(causal(), None, None, 512, 512)
    >>> m
    Mask(B=1, H=1, q=512, kv=512, block=(128, 128), sparsity=37.50%, rows see intervals)
    >>> print(m.draw())
    ▒···
    █▒··
    ██▒·
    ███▒
    """

    q_len: int
    kv_len: int
    q_block: int
    kv_block: int
    runs: Runs  # over global blocks: rows of q_block queries, columns of kv_block keys
    mask_mod: MaskFn | None  # None: nothing is masked inside blocks
    window: tuple[int, int] | None  # closed form: q - left <= kv <= q + right, -1 = unbounded
    interval: tuple[Tensor, Tensor] | None
    # int32 (lo, hi), each [B, H, q_len]: in MASKED blocks a row sees exactly lo <= kv < hi;
    # None: not computed, or there is a row whose keys are not one interval
    reads: tuple[bool, bool] = (False, False)  # whether mask_mod may depend on b, on h
    tokens: tuple[Tensor, Tensor] | None = None
    # bool [q_len], [kv_len]: which queries and keys are tokens, the others padding; None: all are tokens
    snapshot: Snapshot | None = field(init=False)  # the mask_mod's state when the mask was made
    handle: Tensor | None = field(default=None, init=False, repr=False)  # represents this mask in a graph

    def __post_init__(self) -> None:
        check_lengths(self.q_len, self.kv_len)
        need = self.grid.rows, self.grid.cols
        if self.runs.shape[2:] != need:
            raise ValueError(
                f"a mask of {self.q_len} x {self.kv_len} in blocks of {self.q_block} x {self.kv_block} has "
                f"{need[0]} x {need[1]} blocks, its runs have {self.runs.shape[2]} x {self.runs.shape[3]}"
            )
        self._add_state()

    def _add_state(self) -> None:
        """Set the snapshot and the handle."""
        snapshot = None if self.mask_mod is None else Snapshot(self.mask_mod, is_closed_form(self.mask_mod))
        object.__setattr__(self, "snapshot", snapshot)
        self._add_handle()

    def _add_handle(self) -> None:
        """Set the handle. It refers to a copy, since a handle that refers to self would be a reference
        cycle."""
        object.__setattr__(self, "handle", handle_of(self._without_handle()))
        stand_for(self, self.handle)

    def _without_handle(self) -> Mask:
        copy = object.__new__(type(self))
        vars(copy).update(vars(self) | {"handle": None})
        return copy

    def pinned(self) -> Mask:
        """Return the mask with a handle, by which ops find it while the handle exists."""
        if self.handle is not None:
            return self
        pinned = self._without_handle()
        pinned._add_handle()
        return pinned

    def check_state(self, state: ModState | None = None, user: str = "mask") -> None:
        """Raise RuntimeError if state that the mask_mod reads has changed since the mask was made.

        state: the mask_mod's present state, if the caller has it. user: "mask" or "plan", for the message.
        """
        if self.snapshot is None or self.mask_mod is None:
            return
        if difference := self.snapshot.difference(self.mask_mod, state):
            raise RuntimeError(
                f"{difference} after the {user} was made; make the mask and the plan again: the blocks were "
                f"computed from the old state of {describe(self.mask_mod)}"
            )

    def __getstate__(self) -> dict[str, Any]:
        self.check_state()
        check_pickles(self.mask_mod)
        return {name: getattr(self, name) for name in fields_of(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if isinstance(self.runs.stored[0], Tensor):  # torch drops the tensors of objects that guards refer to
            self._add_state()

    @property
    def B(self) -> int:
        return self.runs.shape[0]

    @property
    def H(self) -> int:
        return self.runs.shape[1]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.B, self.H, self.q_len, self.kv_len

    @property
    def BLOCK_SIZE(self) -> tuple[int, int]:
        return self.q_block, self.kv_block

    def interval_for(self, B: int, H: int) -> tuple[Tensor, Tensor] | None:
        """Return the row intervals if they are valid for a call with B batch rows and H heads, else None.

        Blocks listed for one batch row (head) serve all batch rows (heads). Row intervals do not if the
        mask_mod reads b (h).
        """
        stale = (self.reads[0] and B > self.B) or (self.reads[1] and H > self.H)
        return None if stale else self.interval

    @on_host
    def sparsity(self) -> float:
        """Return the percentage of the mask outside of listed blocks, counted like the installed torch's
        BlockMask.sparsity: in blocks from torch 2.14 on; before, in pairs, where a block cut by the end of
        the mask counts as a whole one."""
        listed = sum(int(n.sum()) for n in self.runs.counts())
        if sparsity_counts_blocks():
            total = math.prod(self.runs.shape)
        else:
            listed *= self.q_block * self.kv_block
            total = self.B * self.H * self.q_len * self.kv_len
        return 100 * (1 - listed / total) if total else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the runs and row intervals. A storage that several tensors share counts once."""
        storages = (t.untyped_storage() for t in (*self.runs.stored, *(self.interval or ())))
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    @property
    def grid(self) -> Grid:
        """Lengths and block sizes."""
        return Grid(self.q_len, self.kv_len, self.q_block, self.kv_block)

    def evaluate(self, blocks: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Evaluate the mask_mod in every pair of some blocks, see :func:`classify.evaluate_blocks`."""
        return classify.evaluate_blocks(self._evaluator, blocks, self.grid)

    @property
    def _evaluator(self) -> classify.PairEvaluator:
        assert self.mask_mod is not None
        return classify.torch_evaluator(self.mask_mod, capture_device(self.mask_mod))

    @on_host
    def with_intervals(self) -> Mask:
        """Return the mask with the row intervals of its mask_mod, or the mask itself if it has none. The
        search runs once; the mask keeps its result."""
        mod = self.mask_mod
        if mod is None or self.interval is not None or is_closed_form(mod) or mods.hand_written(mod):
            return self
        if "_solved" not in vars(self):
            interval = classify.find_intervals(mod, capture_device(mod), self.reads, self.runs, self.grid)
            self._keep_solved(self if interval is None else replace(self, interval=interval))
        return vars(self)["_solved"]

    def _keep_solved(self, solved: Mask) -> Mask:
        """Remember that this mask has all row intervals there are; return it."""
        object.__setattr__(self, "_solved", solved)
        return self

    @on_host
    def row_intervals(self) -> Tensor | None:
        """Return the keys that the mask_mod shows to each query as intervals, for kernels that take them:
        int32 [B, H, 2m, q_len], lo of the first interval, its hi, lo of the second, ..., m at most 8.

        None if a row has more, or if that takes evaluating pairs. A query sees the keys lo <= kv < hi of each
        interval. They ascend, with a gap between any two; unused ones are last and empty, lo = hi = kv_len.
        cuDNN's flex attention takes two, [0, F0) and [F1, F2).

        >>> mask = create_block_mask(lambda b, h, q, kv: (kv < 2) | (kv == q), 1, 1, 4, 4, BLOCK_SIZE=2)
        >>> mask.row_intervals()[0, 0].T.tolist()
        [[0, 2, 4, 4], [0, 2, 4, 4], [0, 3, 4, 4], [0, 2, 3, 4]]
        """
        self.check_state()
        if self.mask_mod is None:
            found = None
        else:
            b, h = (size if read else 1 for size, read in zip((self.B, self.H), self.reads, strict=True))
            device = capture_device(self.mask_mod)
            found = classify.find_row_intervals(self.mask_mod, device, b, h, self.grid)
        if found is None:
            return None
        pairs = torch.stack([found.lo, found.hi], 1).flatten(0, 1).unflatten(1, (b, h))  # [2m, b, h, q_len]
        return pairs.permute(1, 2, 0, 3).expand(self.B, self.H, -1, -1).contiguous()

    @on_host
    def to_dense(self, B: int | None = None, H: int | None = None) -> Tensor:
        """Return the visible pairs. For tests and small masks.

        torch's ``BlockMask.to_dense`` shows listed blocks, which is ``mask.to_block_mask().to_dense()``.

        Args:
            B: batch rows of the result, if the mask has 1.
            H: heads of the result, if the mask has 1.

        Returns:
            bool [B, H, q_len, kv_len].
        """
        self.check_state()
        runs = self.runs.expand(self.B if B is None else B, self.H if H is None else H)
        kinds = runs.to_kinds()
        b, h, rows, cols = kinds.shape
        dense = (kinds != ABSENT)[:, :, :, None, :, None].repeat(1, 1, 1, self.q_block, 1, self.kv_block)
        if self.mask_mod is not None:
            tiles = dense.permute(0, 1, 2, 4, 3, 5)  # [B, H, R, C, q_block, kv_block]
            for blocks, visible in self.evaluate((kinds == Kind.MASKED).nonzero()):
                tiles[tuple(blocks.unbind(1))] = visible
        padded = dense.reshape(b, h, rows * self.q_block, cols * self.kv_block)
        return padded[:, :, : self.q_len, : self.kv_len].contiguous()

    @on_host
    def rows(self, start: int, stop: int) -> Mask:
        """Return the mask of queries start .. stop-1; its query 0 is ``start``, a multiple of q_block.

        >>> from tritoncp.masks import causal
        >>> print(create_block_mask(causal(), None, None, 512, 512).rows(256, 512).draw())
        ██▒·
        ███▒
        """
        if not (0 <= start < stop <= self.q_len) or start % self.q_block:
            raise ValueError(
                f"rows({start}, {stop}) of a mask of {self.q_len} queries in blocks of {self.q_block}: pass "
                f"0 <= start < stop <= {self.q_len}, start a multiple of {self.q_block}"
            )
        self.check_state()
        blocks = torch.arange(start // self.q_block, -(-stop // self.q_block))
        runs = self.runs.take(blocks[None])
        if stop < self.q_len and stop % self.q_block:  # stop cuts the last row of blocks
            runs = Runs.from_kinds(bound_ragged_blocks(runs.to_kinds(), stop % self.q_block, 0))
        interval = None if self.interval is None else tuple(t[..., start:stop] for t in self.interval)
        tokens = None if self.tokens is None else (self.tokens[0][start:stop], self.tokens[1])
        mod = None if self.mask_mod is None else PartOfMask(self.mask_mod, start=start)
        size = stop - start, self.kv_len, self.q_block, self.kv_block
        return Mask(*size, runs, mod, None, interval, self.reads, tokens)  # type: ignore[arg-type]

    def listed_rows(self, first: int, count: int) -> Mask:
        """Return the mask of ``count`` batch rows from ``first`` on, whose mask_mod still gets the b of this
        mask."""
        if self.B == 1:  # lists serve every batch row; intervals may differ between batch rows
            interval = self.interval_for(first + count, self.H)
            return self if interval is self.interval else replace(self, interval=interval)
        rows = slice(first, first + count)
        interval = self.interval and (self.interval[0][rows], self.interval[1][rows])
        return replace(self, runs=self.runs.select(rows), interval=interval)

    def head_range(self, first: int, count: int) -> Mask:
        """Return the mask of ``count`` heads from ``first`` on, whose mask_mod gets h = 0 for head
        ``first``."""
        same = count == self.H if self.H > 1 else not self.reads[1]
        return self if same else self._select(None, tuple(range(first, first + count)))

    @on_host
    def __getitem__(self, index: Any) -> Mask:
        """Return the mask of selected batch rows, heads and rows of blocks: ``mask[b, h, rows]``.

        Ints, slices and tensors [n]; an int keeps its dimension, with size 1, as in torch's BlockMask. Unlike
        torch's, the result has a mask_mod, whose b, h and q_idx count what is selected, and the length of the
        selected rows, which have to be adjacent. Raises IndexError for what the mask does not have.

        >>> from tritoncp.masks import document
        >>> mask = create_block_mask(document(lengths=[[256, 128], [128, 256]]), 2, None, 384, 384)
        >>> print(mask[1].draw(), mask[1, :, 1:].shape)
        █··
        ·██
        ·██ (1, 1, 256, 384)
        """
        self.check_state()
        batch, heads, blocks = selected_numbers(index, self.runs.shape[:3])
        mask = self._select(batch, heads)
        if blocks is None:
            return mask
        if blocks != tuple(range(blocks[0], blocks[-1] + 1)):
            raise IndexError(f"rows of blocks {list(blocks)} are not adjacent: select them one at a time")
        return mask.rows(blocks[0] * self.q_block, min(self.q_len, (blocks[-1] + 1) * self.q_block))

    def _select(self, batch: tuple[int, ...] | None, heads: tuple[int, ...] | None) -> Mask:
        """Return the mask of these batch rows and heads; None selects all."""
        if batch is None and heads is None:
            return self
        rows, cols = list(batch or range(self.B)), list(heads or range(self.H)) if self.H > 1 else [0]
        interval = self.interval if heads is None or self.H > 1 else self.interval_for(self.B, 2)
        interval = interval and (interval[0][rows][:, cols], interval[1][rows][:, cols])
        mod = None if self.mask_mod is None else PartOfMask(self.mask_mod, batch, heads)
        b, h = (read and (part is None or len(part) > 1) for read, part in zip(self.reads, (batch, heads)))
        runs = self.runs.select(rows, cols)
        return replace(self, runs=runs, mask_mod=mod, interval=interval, reads=(b, h))

    @on_host
    def to_block_mask(self) -> BlockMask:
        """Return the mask as torch's BlockMask. Its index lists take 16 bytes per pair of blocks."""
        self.check_state()
        kinds = self.runs.to_kinds()
        partial = lists_from_blocks(kinds == Kind.MASKED)
        full = lists_from_blocks((kinds == Kind.FULL) | (kinds == Kind.BOUNDED))
        return BlockMask.from_kv_blocks(
            *partial, *full, BLOCK_SIZE=(self.q_block, self.kv_block), mask_mod=self.mask_mod,
            seq_lengths=(self.q_len, self.kv_len),
        )  # fmt: skip

    @on_host
    def draw(self, width: int = 64) -> str:
        """Draw the first batch row and head as text: █ full, ▒ partly listed, · empty.

        Args:
            width: max characters per line, and max lines; a character can stand for several blocks.

        Returns:
            The lines as one text.
        """
        _, _, rows, cols = self.runs.shape
        scale = max(1, -(-max(rows, cols) // width))
        edges = [torch.arange(0, size + scale, scale).clamp(max=size) for size in (rows, cols)]
        masked, full = self.runs.select([0], [0]).count_in_cells(*edges)
        area = edges[0].diff()[:, None] * edges[1].diff()
        cell = torch.where(full == area, 2, (masked + full > 0).long())
        return "\n".join("".join("·▒█"[c] for c in line) for line in cell.tolist())

    def __repr__(self) -> str:
        contents = "nothing masked inside blocks" if self.mask_mod is None else "rows see a mask_mod"
        if self.interval is not None:
            contents = "rows see intervals"
        return (
            f"Mask(B={self.B}, H={self.H}, q={self.q_len}, kv={self.kv_len}, "
            f"block=({self.q_block}, {self.kv_block}), sparsity={self.sparsity():.2f}%, {contents})"
        )

    def __str__(self) -> str:
        more = "" if self.B * self.H == 1 else f"\n(b=0, h=0 of {self.B} x {self.H})"
        return f"{self!r}\n{self.draw()}{more}"


register_handled(Mask)


def capture_device(mask_mod: MaskFn) -> torch.device:
    """Return the accelerator of the tensors that a mask_mod captures; the CPU if there are none."""
    tensors = captured_state(mask_mod).tensors if torch.accelerator.is_available() else ()
    return next((x.device for x in tensors if x.device.type != "cpu"), torch.device("cpu"))


def check_lengths(q_len: int, kv_len: int) -> None:
    """Raise ValueError for more tokens than kernels can count, TypeError for the symbolic lengths of a
    trace."""
    if isinstance(q_len, torch.SymInt) or isinstance(kv_len, torch.SymInt):
        raise TypeError(
            f"a mask of {q_len} x {kv_len}, which are only known when the traced program runs: call "
            "create_block_mask there, or pass block_mask=None, which hides nothing"
        )
    if max(q_len, kv_len) > MAX_TOKENS:
        raise ValueError(
            f"a mask of {q_len} x {kv_len}; kernels count up to {MAX_TOKENS} tokens: cut the sequence"
        )


@host_only
@on_host
def full_mask(q_len: int, kv_len: int, B: int = 1, H: int = 1, block: int | tuple[int, int] = 128) -> Mask:
    """Return the mask in which all queries see all keys, the meaning of ``block_mask=None``.

    >>> print(full_mask(256, 384).draw())
    ███
    ███
    >>> full_mask(200, 256).runs.to_kinds().tolist()    # 2: the last row of blocks is cut by q_len
    [[[[1, 1], [2, 2]]]]

    Args:
        q_len: number of queries.
        kv_len: number of keys.
        B: number of batch rows.
        H: number of heads.
        block: size of the blocks in tokens, an int or (queries, keys).

    Returns:
        A :class:`Mask`.

    Raises:
        ValueError: for more tokens than kernels can count, or a block size below 1.
        TypeError: for a block size that is not an int or a pair of them.
    """
    check_lengths(q_len, kv_len)
    q_block, kv_block = _block_size(block)
    rows, cols = -(-q_len // q_block), -(-kv_len // kv_block)
    # All rows but the last are equal, and so are all columns but the last.
    kinds = torch.full((1, 1, min(rows, 2), min(cols, 2)), int(Kind.FULL), dtype=torch.uint8)
    corners = Runs.from_kinds(bound_ragged_blocks(kinds, q_len % q_block, kv_len % kv_block))
    row_of = (torch.arange(rows) >= max(rows - 1, 1)).long()
    first = torch.arange(cols + 1) if cols < 2 else torch.tensor([0, cols - 1, cols])
    runs = corners.take(row_of[None]).remap(first[None]).expand(B, H)
    return Mask(q_len, kv_len, q_block, kv_block, runs, None, None, None)


@host_only
@on_host
def create_block_mask(
    mask_mod: MaskFn,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Device | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
) -> Mask:
    """Make a Mask like torch's create_block_mask, without memory for Q_LEN x KV_LEN pairs.

    >>> mask = create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, 384, 384)
    >>> print(mask.draw())
    ▒··
    █▒·
    ██▒
    >>> mask.runs.counts()[0].tolist()      # masked blocks of each row
    [[[1, 1, 1]]]
    >>> from tritoncp.masks import causal, document
    >>> mod = causal() & document(lengths=[[256, 128], [128, 256]])     # documents of each batch row
    >>> create_block_mask(mod, 2, None, 384, 384).shape
    (2, 1, 384, 384)

    Blocks are the same as torch's. A closed form needs arithmetic alone. Any other mask_mod is traced and
    bounded over ever smaller tiles; blocks that stay undecided are evaluated, a few million pairs at a time.

    Args:
        mask_mod: function (b, h, q_idx, kv_idx) -> bool, or a closed form such as ``causal()``.
        B: number of batch rows; None if the mask is the same for all.
        H: number of query heads; None if the mask is the same for all.
        Q_LEN: number of queries in the whole sequence, over all ranks.
        KV_LEN: number of keys in the whole sequence.
        device: device on which the mask_mod is evaluated; None: the device of the tensors it captures.
        BLOCK_SIZE: size of the blocks in tokens, an int or (queries, keys).

    Returns:
        A :class:`Mask`, whose tensors are on the CPU.

    Raises:
        ValueError: for lengths or sizes out of range, and for a closed form of another number of batch rows.
        TypeError: for a mask_mod that is not a function or captures a DTensor, and for sizes that are not
            ints.
    """
    _check_function(mask_mod)
    captured_state(mask_mod)  # refuses state that no mask can have
    sizes = {"B": 1 if B is None else B, "H": 1 if H is None else H, "Q_LEN": Q_LEN, "KV_LEN": KV_LEN}
    B, H, Q_LEN, KV_LEN = (as_int(f"create_block_mask: {name}", size) for name, size in sizes.items())
    check_lengths(Q_LEN, KV_LEN)
    if min(B, H) < 1 or min(Q_LEN, KV_LEN) < 0:
        raise ValueError(f"create_block_mask of B={B}, H={H}, {Q_LEN} x {KV_LEN}: B and H are at least 1")
    q_block, kv_block = _block_size(BLOCK_SIZE)
    intervals = mask_mod.intervals(Q_LEN, KV_LEN) if isinstance(mask_mod, MaskMod) else None
    if isinstance(mask_mod, MaskMod) and intervals is not None:
        interval = expand_intervals(mask_mod, intervals, B, H)
        runs = Runs.from_intervals(*intervals, q_block, kv_block, KV_LEN).expand(B, H)
        window, reads = mask_mod.window, mask_mod.reads
        tokens = mask_mod.tokens(Q_LEN, KV_LEN)
        return Mask(Q_LEN, KV_LEN, q_block, kv_block, runs, mask_mod, window, interval, reads, tokens)
    by_key = mask_mod.query_intervals(Q_LEN, KV_LEN) if isinstance(mask_mod, Tree) else None
    if isinstance(mask_mod, Tree) and by_key is not None:
        _check_batch_rows(mask_mod, len(by_key[0]), B)
        runs = transpose(Runs.from_intervals(*by_key, kv_block, q_block, Q_LEN)).expand(B, H)
        return Mask(Q_LEN, KV_LEN, q_block, kv_block, runs, mask_mod, None, None, mask_mod.reads)
    grid = Grid(Q_LEN, KV_LEN, q_block, kv_block)
    found = classify.classify(mask_mod, device or capture_device(mask_mod), B, H, grid)
    mask = Mask(*grid, found.runs, mask_mod, None, found.interval, found.reads)
    return mask._keep_solved(mask) if found.solved else mask


def _check_function(mask_mod: Any) -> None:
    """Raise TypeError for a mask_mod that is no function."""
    if callable(mask_mod):
        return
    remedy = "pass a function, lambda b, h, q_idx, kv_idx: ..."
    if mask_mod is None:
        remedy = "tritoncp.full_mask(Q_LEN, KV_LEN) hides nothing, and neither does block_mask=None"
    elif isinstance(mask_mod, Tensor):
        remedy = "capture the tensor, lambda b, h, q_idx, kv_idx: visible[q_idx, kv_idx]"
    raise TypeError(f"create_block_mask: mask_mod is a {type(mask_mod).__name__}, not a function; {remedy}")


def expand_intervals(mod: MaskMod, intervals: Intervals, B: int, H: int) -> Intervals:
    """Return a closed form's intervals as a Mask stores them, int32 [B, H, q_len] each.

    Raises ValueError if ``mod`` has intervals for another number of batch rows than B.
    """
    _check_batch_rows(mod, len(intervals[0]), B)
    lo, hi = (t.int().expand(B, H, -1) for t in intervals)
    return lo, hi


def _check_batch_rows(mod: MaskMod, rows: int, B: int) -> None:
    """Raise ValueError if a closed form has intervals for another number of batch rows than B."""
    if rows not in (1, B):
        raise ValueError(f"{mod} differs between {rows} batch rows, but the mask has B={B}: pass B={rows}")


def _block_size(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return (q_block, kv_block) of a BLOCK_SIZE argument. Raises TypeError or ValueError unless it is
    one or two positive ints."""
    block = tuple(size) if isinstance(size, tuple | list) else (size, size)
    if len(block) != 2:
        raise ValueError(f"create_block_mask: BLOCK_SIZE={size}; an int or a pair (q, kv) is needed")
    q_block, kv_block = (as_int("create_block_mask: BLOCK_SIZE", number) for number in block)
    if q_block < 1 or kv_block < 1:
        raise ValueError(f"BLOCK_SIZE must be a positive int or (q, kv) pair of them, got {size}")
    return q_block, kv_block

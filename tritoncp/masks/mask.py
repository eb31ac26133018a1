"""The compact mask: its listed blocks, as runs, and the keys that each row sees inside masked blocks.

Block lists are authoritative, as in compiled flex attention: an unlisted block is invisible and a
full block unmasked, even where the mask_mod disagrees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from tritoncp.core.handles import handle_of, refuse_inside_a_graph
from tritoncp.core.host_copy import on_host
from tritoncp.core.tracing import reads_batch_or_head
from tritoncp.masks.block_runs import ABSENT, Kind, Runs
from tritoncp.masks.classify import (
    PAIRS,
    Ask,
    Grid,
    Question,
    ask_torch,
    find_intervals,
    find_runs,
    masked_blocks,
)
from tritoncp.masks.closed_forms import (
    Flipped,
    Later,
    MaskFn,
    MaskMod,
    and_masks,
    causal,
    document,
    is_settled,
    not_,
    or_masks,
    prefix_lm,
    sliding_window,
)
from tritoncp.mods.captures import describe
from tritoncp.mods.recording import State
from tritoncp.mods.snapshot import Snapshot

__all__ = [
    "ABSENT", "Kind", "Mask", "MaskMod", "Runs", "and_masks", "causal", "create_block_mask", "document",
    "from_block_mask", "full_mask", "masked_blocks", "not_", "or_masks", "prefix_lm", "sliding_window",
]  # fmt: skip

Device = str | torch.device
LONGEST = 1 << 30  # tokens: kernels count in 32 bits, sums and differences of positions included


@dataclass(frozen=True, eq=False)
class Mask:
    """A block-sparse mask of any size in little memory; every tensor on the CPU.

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
    # int32 (lo, hi), each [B, H, q_len]: inside MASKED blocks a row sees exactly lo <= kv < hi
    reads: tuple[bool, bool] = (False, False)  # whether mask_mod may depend on b, on h
    tokens: tuple[Tensor, Tensor] | None = None
    # bool [q_len], [kv_len]: which queries and keys are tokens, the others padding; None: all are tokens
    snapshot: Snapshot | None = field(init=False, repr=False)  # the mask_mod's state when the mask was made
    handle: Tensor = field(init=False, repr=False)  # by which a compiled graph knows this mask

    def __post_init__(self) -> None:
        if max(self.q_len, self.kv_len) > LONGEST:
            raise ValueError(
                f"a mask of {self.q_len} x {self.kv_len}; kernels count up to {LONGEST} tokens: cut the "
                "sequence"
            )
        need = (-(-self.q_len // self.q_block), -(-self.kv_len // self.kv_block))
        if self.runs.shape[2:] != need:
            raise ValueError(
                f"a mask of {self.q_len} x {self.kv_len} in blocks of {self.q_block} x {self.kv_block} has "
                f"{need[0]} x {need[1]} blocks, its runs have {self.runs.shape[2]} x {self.runs.shape[3]}"
            )
        snapshot = None if self.mask_mod is None else Snapshot(self.mask_mod, is_settled(self.mask_mod))
        object.__setattr__(self, "snapshot", snapshot)
        nameless = object.__new__(Mask)  # a handle that kept its own mask would never be let go
        vars(nameless).update(vars(self))
        object.__setattr__(self, "handle", handle_of(nameless))

    def check_state(self, state: State | None = None, user: str = "mask") -> None:
        """Refuse to be used when state that the mask_mod reads has changed since the mask was made.

        state: of the mask_mod as of now, where it is known. user: the mask, or a plan of it, for the message.
        """
        if self.snapshot is None or self.mask_mod is None:
            return
        if difference := self.snapshot.difference(self.mask_mod, state):
            raise RuntimeError(
                f"{difference} after the {user} was made; make the mask and the plan again: the blocks were "
                f"computed from the old state of {describe(self.mask_mod)}"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        self.check_state()
        return Mask, tuple(getattr(self, item.name) for item in fields(self) if item.init)

    @property
    def B(self) -> int:
        return self.runs.shape[0]

    @property
    def H(self) -> int:
        return self.runs.shape[1]

    def interval_for(self, B: int, H: int) -> tuple[Tensor, Tensor] | None:
        """The row intervals where they hold for a call with B batch rows and H heads, else None.

        A mask listed for one batch row (head) serves every one; the intervals found for it do not
        where the mask_mod reads b (h).
        """
        stale = (self.reads[0] and B > self.B) or (self.reads[1] and H > self.H)
        return None if stale else self.interval

    @on_host
    def sparsity(self) -> float:
        """Percentage of the mask that is in no listed block, as torch's BlockMask.sparsity."""
        listed = sum(int(n.sum()) for n in self.runs.counts())
        total = self.B * self.H * self.q_len * self.kv_len
        return 100 * (1 - listed * self.q_block * self.kv_block / total) if total else 0.0

    @on_host
    def costs(self, full: float = 1, partial: float = 1) -> Tensor:
        """Work of each q block, summed over heads: [B, q blocks]; int64 if both weights are ints.

        partial weighs MASKED and BOUNDED blocks, full the others.
        """
        masked, whole = self.runs.counts()
        return (masked * partial + whole * full).sum(1)

    @on_host
    def to_dense(self, B: int | None = None, H: int | None = None, device: Device = "cpu") -> Tensor:
        """bool [B, H, q_len, kv_len]: who sees whom, by block lists first. For tests and small masks.

        B, H: of the call, where the mask has 1; device: where the mask_mod's captures live.
        """
        self.check_state()
        runs = self.runs.expand(self.B if B is None else B, self.H if H is None else H)
        kinds = runs.to_kinds()
        b, h, rows, cols = kinds.shape
        dense = (kinds != ABSENT)[:, :, :, None, :, None].repeat(1, 1, 1, self.q_block, 1, self.kv_block)
        if self.mask_mod is not None:
            tiles = dense.permute(0, 1, 2, 4, 3, 5)  # [B, H, R, C, q_block, kv_block]
            for at, visible in self.evaluate(self.mask_mod, (kinds == Kind.MASKED).nonzero(), device):
                tiles[tuple(at.unbind(1))] = visible
        whole = dense.reshape(b, h, rows * self.q_block, cols * self.kv_block)
        return whole[:, :, : self.q_len, : self.kv_len].contiguous()

    @on_host
    def rows(self, start: int, stop: int) -> Mask:
        """The rows of queries start..stop-1, as a mask whose query 0 is `start`, the first of a block.

        >>> print(create_block_mask(causal(), None, None, 512, 512).rows(256, 512).draw())
        ██▒·
        ███▒
        """
        if not (0 <= start < stop <= self.q_len) or start % self.q_block:
            raise ValueError(
                f"rows({start}, {stop}) of a mask of {self.q_len} queries in blocks of {self.q_block}: give "
                f"0 <= start < stop <= {self.q_len}, start a multiple of {self.q_block}"
            )
        self.check_state()
        if stop < self.q_len and stop % self.q_block:  # the last block is cut now: classified anew
            part = Later(_whole_mod(self, self.B, self.H), start)
            return _rebuilt(part, self.grid._replace(q_len=stop - start), self.B, self.H)
        blocks = torch.arange(start // self.q_block, -(-stop // self.q_block))
        interval = None if self.interval is None else tuple(t[..., start:stop] for t in self.interval)
        tokens = None if self.tokens is None else (self.tokens[0][start:stop], self.tokens[1])
        mod = None if self.mask_mod is None else Later(self.mask_mod, start)
        size = stop - start, self.kv_len, self.q_block, self.kv_block
        return Mask(*size, self.runs.take(blocks[None]), mod, None, interval, self.reads, tokens)  # type: ignore[arg-type]

    def listed_rows(self, first: int, count: int) -> Mask:
        """The lists of ``count`` batch rows from ``first`` on. The mask_mod gets numbers of rows in the whole
        batch."""
        if self.B == 1:  # lists serve every row, intervals only those that they were made for
            interval = self.interval_for(first + count, self.H)
            return self if interval is self.interval else replace(self, interval=interval)
        interval = self.interval
        if interval is not None:
            rows = slice(first, first + count)
            lo, hi = (bound[rows] if len(bound) > 1 else bound for bound in interval)
            interval = lo, hi
        return replace(self, runs=self.runs.batch_rows(first, count), interval=interval)

    @on_host
    def transpose(self) -> Mask:
        """Queries and keys exchanged: for each block of keys, the blocks of queries that see it.

        >>> print(create_block_mask(causal(), None, None, 512, 512).transpose().draw())
        ▒███
        ·▒██
        ··▒█
        ···▒
        """
        self.check_state()
        mod = None if self.mask_mod is None else Flipped(self.mask_mod)
        window = None if self.window is None else self.window[::-1]
        tokens = None if self.tokens is None else self.tokens[::-1]
        size = self.kv_len, self.q_len, self.kv_block, self.q_block
        return Mask(*size, self.runs.transpose(), mod, window, None, self.reads, tokens)

    @on_host
    def __and__(self, other: Mask) -> Mask:
        """Visible in both: the mask that their mask_mods make together, lists first."""
        return _combined(and_masks, self, other)

    @on_host
    def __or__(self, other: Mask) -> Mask:
        """Visible in either."""
        return _combined(or_masks, self, other)

    @property
    def nbytes(self) -> int:
        """Bytes of its runs and row intervals."""
        held = (t.untyped_storage() for t in (self.runs.ptr, self.runs.runs, *(self.interval or ())))
        return sum({s.data_ptr(): s.nbytes() for s in held}.values())  # expanded ones lie there once

    @on_host
    def to_block_mask(self) -> BlockMask:
        """The same mask as torch's BlockMask. Its index lists take 16 bytes per pair of blocks."""
        self.check_state()
        kinds = self.runs.to_kinds()
        partial = _lists(kinds == Kind.MASKED)
        full = _lists((kinds == Kind.FULL) | (kinds == Kind.BOUNDED))
        return BlockMask.from_kv_blocks(
            *partial, *full, BLOCK_SIZE=(self.q_block, self.kv_block), mask_mod=self.mask_mod,
            seq_lengths=(self.q_len, self.kv_len),
        )  # fmt: skip

    @on_host
    def draw(self, width: int = 64) -> str:
        """A picture of the first batch row and head: █ all listed as full, ▒ some listed, · none."""
        _, _, rows, cols = self.runs.shape
        scale = max(1, -(-max(rows, cols) // width))
        start, end, kind = self.runs.runs[: int(self.runs.ptr[0, 0, -1, 2]) if rows else 0].long().unbind(1)
        length = (self.runs.ptr[0, 0, :, 2] - self.runs.ptr[0, 0, :, 0]).long()
        row = torch.arange(rows).repeat_interleave(length) // scale
        left = torch.arange(0, cols, scale)
        inside = (end[:, None].clamp(max=left + scale) - start[:, None].clamp(min=left)).clamp(min=0)
        shape = (-(-rows // scale), len(left))
        listed = torch.zeros(shape, dtype=torch.int64).index_add_(0, row, inside)
        whole = inside * (kind != Kind.MASKED)[:, None]
        full = torch.zeros(shape, dtype=torch.int64).index_add_(0, row, whole)
        height = (rows - torch.arange(0, rows, scale)).clamp(max=scale)
        area = height[:, None] * (cols - left).clamp(max=scale)
        cell = torch.where(full == area, 2, (listed > 0).long())
        return "\n".join("".join("·▒█"[c] for c in line) for line in cell.tolist())

    def __repr__(self) -> str:
        inside = "nothing masked inside blocks" if self.mask_mod is None else "rows see a mask_mod"
        if self.interval is not None:
            inside = "rows see intervals"
        return (
            f"Mask(B={self.B}, H={self.H}, q={self.q_len}, kv={self.kv_len}, "
            f"block=({self.q_block}, {self.kv_block}), sparsity={self.sparsity():.2f}%, {inside})"
        )

    def __str__(self) -> str:
        more = "" if self.B * self.H == 1 else f"\n(b=0, h=0 of {self.B} x {self.H})"
        return f"{self!r}\n{self.draw()}{more}"

    @property
    def grid(self) -> Grid:
        return Grid(self.q_len, self.kv_len, self.q_block, self.kv_block)

    def evaluate(self, mod: MaskFn, blocks: Tensor, device: Device) -> Iterator[tuple[Tensor, Tensor]]:
        """For chunks of blocks, int64 [n, 4] (b, h, row, col): (chunk, bool [n, q_block, kv_block]).

        Positions past q_len or kv_len are never asked about, and invisible.
        """
        ask = ask_torch(mod, device)
        q_in, kv_in = torch.arange(self.q_block), torch.arange(self.kv_block)
        for at in blocks.split(max(1, PAIRS // (self.q_block * self.kv_block))) if len(blocks) else ():
            b, h, row, col = at.unbind(1)
            q, kv = row[:, None] * self.q_block + q_in, col[:, None] * self.kv_block + kv_in
            seen = ask(b, h, q.clamp(max=self.q_len - 1), kv.clamp(max=self.kv_len - 1))
            yield at, seen & (q < self.q_len)[:, :, None] & (kv < self.kv_len)[:, None, :]


@dataclass(frozen=True, eq=False)
class Listed(MaskMod):
    """A mask_mod that looks at a mask's block lists first: blocks that are listed as full are visible.

    kinds: uint8 [B, H, rows, cols], a byte for each pair of blocks.
    """

    kinds: Tensor
    mask_mod: MaskFn | None
    q_block: int
    kv_block: int

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        batch, head = b if self.kinds.shape[0] > 1 else 0, h if self.kinds.shape[1] > 1 else 0
        kind = self.kinds[batch, head, q_idx // self.q_block, kv_idx // self.kv_block]
        whole = (kind == Kind.FULL) | (kind == Kind.BOUNDED)
        if self.mask_mod is None:
            return whole
        return whole | ((kind == Kind.MASKED) & self.mask_mod(b, h, q_idx, kv_idx))

    @property
    def reads(self) -> tuple[bool, bool]:
        return reads_batch_or_head(self.__call__)


def _whole_mod(mask: Mask, B: int, H: int) -> MaskFn:
    """Return a mask_mod for all of the mask: its own where that gives these block lists, else with them."""
    mod = mask.mask_mod
    if mod is not None and _rebuilt(mod, mask.grid, B, H).runs == mask.runs.expand(B, H):
        return mod
    return Listed(mask.runs.to_kinds(), mod, mask.q_block, mask.kv_block)


def _combined(how: Callable[..., MaskMod], one: Mask, other: Mask) -> Mask:
    one.check_state()
    other.check_state()
    sizes = [(m.B, m.H) for m in (one, other)]
    if one.grid != other.grid or any(1 not in {a, b} and a != b for a, b in zip(*sizes, strict=True)):
        both = " and ".join(repr(m) for m in (one, other))
        raise ValueError(f"{both} do not combine: make them for the same lengths and BLOCK_SIZE")
    B, H = (max(pair) for pair in zip(*sizes, strict=True))
    return _rebuilt(how(_whole_mod(one, B, H), _whole_mod(other, B, H)), one.grid, B, H)


def _rebuilt(mod: MaskFn, grid: Grid, B: int, H: int) -> Mask:
    return create_block_mask(mod, B, H, *grid[:2], BLOCK_SIZE=grid[2:])


@on_host
def full_mask(q_len: int, kv_len: int, B: int = 1, H: int = 1, block: int | tuple[int, int] = 128) -> Mask:
    """Return the mask in which all queries see all keys, as `block_mask=None` means.

    >>> full_mask(200, 256).runs.to_kinds().tolist()    # the last row of blocks is cut by q_len
    [[[[1, 1], [2, 2]]]]
    """
    q_block, kv_block = _block_size(block)
    row = torch.full((-(-q_len // q_block), 1), int(Kind.FULL), dtype=torch.uint8)
    kinds = row.repeat(1, -(-kv_len // kv_block))[None, None]
    runs = Runs.from_kinds(_bound_ragged(kinds, q_len % q_block, kv_len % kv_block)).expand(B, H)
    return Mask(q_len, kv_len, q_block, kv_block, runs, None, None, None)


@on_host
def from_block_mask(bm: BlockMask, evaluate: MaskFn | None = None, search: bool = True) -> Mask:
    """The compact form of torch's BlockMask: same blocks, same mask_mod, and row intervals if it has any.

    bm: the *global* mask, on any device; its lists come over in one copy. evaluate: the mask_mod to
    call on CPU indices, where bm.mask_mod captures tensors of another device. It is asked about the
    partially masked blocks only. Without a mask_mod (noop_mask) partial blocks become full ones.
    search: False where the mask_mod cannot be called here; it then runs in every masked block.
    """
    q_block, kv_block = bm.BLOCK_SIZE
    q_len, kv_len = bm.seq_lengths
    kinds = _kinds_from_lists(bm, -(-q_len // q_block), -(-kv_len // kv_block))
    mod = None if bm.mask_mod is noop_mask else bm.mask_mod
    if mod is None:
        kinds[kinds == Kind.MASKED] = int(Kind.FULL)
    runs = Runs.from_kinds(_bound_ragged(kinds, q_len % q_block, kv_len % kv_block))
    del kinds
    mask = Mask(q_len, kv_len, q_block, kv_block, runs, mod, None, None)
    if mod is None:
        return mask
    return with_intervals(mask, evaluate or mod) if search else replace(mask, reads=(True, True))


@on_host
def create_block_mask(
    mask_mod: MaskFn,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Device | None = "cpu",
    BLOCK_SIZE: int | tuple[int, int] = 128,
    *,
    ask: Ask | None = None,
    progress: Callable[[float], object] = lambda done: None,
) -> Mask:
    """torch's create_block_mask without the Q x KV memory: the same blocks, as a compact Mask.

    A closed form takes arithmetic alone. Any other mask_mod is traced and bounded over ever smaller tiles;
    where that decides nothing it is evaluated, on `device`, a few million pairs at a time. The result
    itself is always on the CPU.

    ask: evaluates pairs in torch's stead (see `classify.Ask`). progress: told the share that is done.

    >>> create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, 300, 300).runs.counts()[0].tolist()
    [[[1, 1, 3]]]
    """
    refuse_inside_a_graph("create_block_mask")
    B, H, device = 1 if B is None else B, 1 if H is None else H, device or "cpu"
    if min(B, H) < 1 or min(Q_LEN, KV_LEN) < 0:
        raise ValueError(f"create_block_mask of B={B}, H={H}, {Q_LEN} x {KV_LEN}: B and H are at least 1")
    q_block, kv_block = _block_size(BLOCK_SIZE)
    known = mask_mod.intervals(Q_LEN, KV_LEN) if isinstance(mask_mod, MaskMod) else None
    if isinstance(mask_mod, MaskMod) and known is not None:
        interval = _as_interval(mask_mod, known, B, H)
        runs = Runs.from_intervals(*known, q_block, kv_block, KV_LEN).expand(B, H)
        window, reads = mask_mod.window, mask_mod.reads
        tokens = mask_mod.tokens(Q_LEN, KV_LEN)
        return Mask(Q_LEN, KV_LEN, q_block, kv_block, runs, mask_mod, window, interval, reads, tokens)
    grid = Grid(Q_LEN, KV_LEN, q_block, kv_block)
    question = Question.about(mask_mod, device, ask)
    runs = find_runs(question, B, H, grid, progress)
    return Mask(*grid, runs, mask_mod, None, None, question.reads)


@on_host
def with_intervals(mask: Mask, evaluate: MaskFn) -> Mask:
    """The mask with `interval`, `window` and `reads` found out, its block lists kept.

    evaluate: its mask_mod, or one like it that can be called on the CPU.
    """
    known = evaluate.intervals(mask.q_len, mask.kv_len) if isinstance(evaluate, MaskMod) else None
    if isinstance(evaluate, MaskMod) and known is not None:
        known = (known[0][: mask.B], known[1][: mask.B])
        interval = _as_interval(evaluate, known, mask.B, mask.H)
        window = evaluate.window
        if window is not None:  # the lists may be others than the window's
            own = Runs.from_intervals(*known, mask.q_block, mask.kv_block, mask.kv_len)
            window = window if own.expand(mask.B, mask.H) == mask.runs else None
        tokens = evaluate.tokens(mask.q_len, mask.kv_len)
        return replace(mask, interval=interval, window=window, reads=evaluate.reads, tokens=tokens)
    if not bool((mask.runs.runs[:, 2] == Kind.MASKED).any()):
        nothing = torch.zeros(mask.B, mask.H, mask.q_len, dtype=torch.int32)
        return replace(mask, interval=(nothing, nothing), window=None, reads=(False, False))
    question = Question.about(evaluate)
    found = find_intervals(question, mask.runs, mask.grid)
    return replace(mask, interval=found, window=None, reads=question.reads)


def _as_interval(mod: MaskMod, known: tuple[Tensor, Tensor], B: int, H: int) -> tuple[Tensor, Tensor]:
    given = known[0].shape[0]
    if given not in (1, B):
        raise ValueError(f"{mod} differs between {given} batch rows, but the mask has B={B}: give B={given}")
    lo, hi = (t.int().expand(B, H, -1) for t in known)
    return lo, hi


def _bound_ragged(kinds: Tensor, q_cut: int, kv_cut: int) -> Tensor:
    """In place: full blocks that q_len or kv_len cuts become BOUNDED."""
    edges = [kinds[:, :, -1:]] * bool(q_cut) + [kinds[..., -1:]] * bool(kv_cut)
    for edge in edges:
        edge[edge == Kind.FULL] = int(Kind.BOUNDED)
    return kinds


def _block_size(size: int | tuple[int, int]) -> tuple[int, int]:
    q_block, kv_block = (size, size) if isinstance(size, int) else size
    if q_block < 1 or kv_block < 1:
        raise ValueError(f"BLOCK_SIZE must be a positive int or (q, kv) pair of them, got {size}")
    return q_block, kv_block


def _lists(listed: Tensor) -> tuple[Tensor, Tensor]:
    """(num_blocks int32 [B, H, R], indices int32 [B, H, R, C]) of a bool map [B, H, R, C]."""
    b, h, r, c = listed.shape
    num = listed.sum(-1, dtype=torch.int32)
    row, col = listed.view(b * h * r, c).nonzero(as_tuple=True)
    first = num.flatten().cumsum(0) - num.flatten()
    indices = torch.zeros(b * h * r, c, dtype=torch.int32)
    indices[row, torch.arange(len(row)) - first[row]] = col.int()
    return num, indices.view(b, h, r, c)


def _kinds_from_lists(bm: BlockMask, rows: int, cols: int) -> Tensor:
    """Dense kinds of a BlockMask's lists, MASKED and FULL only: uint8 [B, H, rows, cols]."""
    parts = [bm.kv_num_blocks, bm.kv_indices]
    if bm.full_kv_num_blocks is not None and bm.full_kv_indices is not None:
        parts += [bm.full_kv_num_blocks, bm.full_kv_indices]
    if any(t.device.type != "cpu" for t in parts):
        sizes = [t.numel() for t in parts]
        flat = torch.split(torch.cat([t.reshape(-1) for t in parts]).cpu(), sizes)  # one copy
        parts = [new.view(old.shape) for new, old in zip(flat, parts, strict=True)]
    if parts[0].shape[-1] != rows:
        raise ValueError(
            f"the BlockMask lists {parts[0].shape[-1]} rows of blocks, but its q_len={bm.seq_lengths[0]} has "
            f"{rows} of {bm.BLOCK_SIZE[0]}: give the global mask, not a slice of it"
        )
    batch = (1,) * (3 - parts[0].ndim) + tuple(parts[0].shape[:-1])
    marks = torch.zeros(batch[0] * batch[1] * rows, cols, dtype=torch.uint8)
    for mark, num, indices in zip((1, 16)[: len(parts) // 2], parts[::2], parts[1::2], strict=True):
        _mark_listed(marks, mark, num.reshape(-1), indices.reshape(num.numel(), indices.shape[-1]))
    twice = (marks != 0) & (marks != 1) & (marks != 16)
    if bool(twice.any()):
        row, col = (int(i) for i in twice.nonzero()[0])
        raise ValueError(f"the BlockMask lists block (q block {row % rows}, kv block {col}) more than once")
    kinds = torch.full_like(marks, ABSENT)
    kinds[marks == 1] = int(Kind.MASKED)
    kinds[marks == 16] = int(Kind.FULL)
    return kinds.view(*batch, rows, cols)


def _mark_listed(marks: Tensor, mark: int, num: Tensor, indices: Tensor) -> None:
    """Add `mark` to marks [R, C] at each row's first num[r] indices; a bounded number of rows at a time."""
    place = torch.arange(indices.shape[1])
    step = max(1, PAIRS // max(1, indices.shape[1]))
    for i in range(0, len(num), step):
        row, at = (place < num[i : i + step, None]).nonzero(as_tuple=True)
        col = indices[i : i + step][row, at].long()
        if len(col) and not (int(col.min()) >= 0 and int(col.max()) < marks.shape[1]):
            raise ValueError(
                f"the BlockMask lists kv blocks {int(col.min())} to {int(col.max())}, but kv_len has only "
                f"{marks.shape[1]} blocks"
            )
        flat = (row + i) * marks.shape[1] + col
        marks.view(-1).scatter_add_(0, flat, torch.full_like(flat, mark, dtype=torch.uint8))

"""The contents of a mask: listed blocks as runs, and the key interval of each row in masked blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from tritoncp.core.handles import handle_of
from tritoncp.core.host_copy import on_host
from tritoncp.core.user_code import describe
from tritoncp.masks.block_mask_interface import BlockMaskInterface
from tritoncp.masks.block_runs import Runs
from tritoncp.masks.classification.classify import PAIRS, Grid, ask_torch
from tritoncp.masks.closed_forms import is_closed_form
from tritoncp.masks.mask_mod import MaskFn
from tritoncp.mods.recording import State
from tritoncp.mods.snapshot import Snapshot

Device = str | torch.device
MAX_TOKENS = 1 << 30  # tokens: kernels count in 32 bits, sums and differences of positions included


def check_lengths(q_len: int, kv_len: int) -> None:
    """Raise ValueError for more tokens than kernels count."""
    if max(q_len, kv_len) > MAX_TOKENS:
        raise ValueError(
            f"a mask of {q_len} x {kv_len}; kernels count up to {MAX_TOKENS} tokens: cut the sequence"
        )


@dataclass(frozen=True, eq=False)
class MaskData(BlockMaskInterface):
    """Fields of :class:`tritoncp.Mask`, and what follows from them; every tensor on the CPU."""

    q_len: int
    kv_len: int
    q_block: int
    kv_block: int
    runs: Runs  # over global blocks: rows of q_block queries, columns of kv_block keys
    mask_mod: MaskFn | None  # None: nothing is masked inside blocks
    window: tuple[int, int] | None  # closed form: q - left <= kv <= q + right, -1 = unbounded
    interval: tuple[Tensor, Tensor] | None
    # int32 (lo, hi), each [B, H, q_len]: in MASKED blocks a row sees exactly lo <= kv < hi;
    # None: not computed, or the keys of some row are not one interval
    reads: tuple[bool, bool] = (False, False)  # whether mask_mod may depend on b, on h
    tokens: tuple[Tensor, Tensor] | None = None
    # bool [q_len], [kv_len]: which queries and keys are tokens, the others padding; None: all are tokens
    snapshot: Snapshot | None = field(init=False, repr=False)  # the mask_mod's state when the mask was made
    handle: Tensor = field(init=False, repr=False)  # stands for this mask in a compiled graph

    def __post_init__(self) -> None:
        check_lengths(self.q_len, self.kv_len)
        need = (-(-self.q_len // self.q_block), -(-self.kv_len // self.kv_block))
        if self.runs.shape[2:] != need:
            raise ValueError(
                f"a mask of {self.q_len} x {self.kv_len} in blocks of {self.q_block} x {self.kv_block} has "
                f"{need[0]} x {need[1]} blocks, its runs have {self.runs.shape[2]} x {self.runs.shape[3]}"
            )
        snapshot = None if self.mask_mod is None else Snapshot(self.mask_mod, is_closed_form(self.mask_mod))
        object.__setattr__(self, "snapshot", snapshot)
        copy = object.__new__(type(self))  # a handle that refers to self would be a reference cycle
        vars(copy).update(vars(self))
        object.__setattr__(self, "handle", handle_of(copy))

    def check_state(self, state: State | None = None, user: str = "mask") -> None:
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

    def __reduce__(self) -> tuple[Any, ...]:
        self.check_state()
        return type(self), tuple(getattr(self, item.name) for item in fields(self) if item.init)

    @property
    def B(self) -> int:
        return self.runs.shape[0]

    @property
    def H(self) -> int:
        return self.runs.shape[1]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, Q_LEN, KV_LEN), in tokens, as torch's BlockMask."""
        return self.B, self.H, self.q_len, self.kv_len

    @property
    def BLOCK_SIZE(self) -> tuple[int, int]:
        """(queries, keys) of a block, in tokens."""
        return self.q_block, self.kv_block

    def interval_for(self, B: int, H: int) -> tuple[Tensor, Tensor] | None:
        """The row intervals if they are valid for a call with B batch rows and H heads, else None.

        Blocks listed for one batch row (head) serve all of them. Its row intervals do not if the mask_mod
        reads b (h).
        """
        stale = (self.reads[0] and B > self.B) or (self.reads[1] and H > self.H)
        return None if stale else self.interval

    @on_host
    def sparsity(self) -> float:
        """Percentage of the mask outside listed blocks, as torch's BlockMask.sparsity."""
        listed = sum(int(n.sum()) for n in self.runs.counts())
        total = self.B * self.H * self.q_len * self.kv_len
        return 100 * (1 - listed * self.q_block * self.kv_block / total) if total else 0.0

    @on_host
    def costs(self, full: float = 1, partial: float = 1) -> Tensor:
        """Work of each row of blocks, summed over heads: [B, q blocks]; int64 if both weights are ints.

        full: weight of a FULL block. partial: weight of a MASKED or BOUNDED block.
        """
        num_partial, num_full = self.runs.counts()
        return (num_partial * partial + num_full * full).sum(1)

    @property
    def nbytes(self) -> int:
        """Bytes of the runs and row intervals. A storage that several tensors share counts once."""
        storages = (t.untyped_storage() for t in (self.runs.ptr, self.runs.runs, *(self.interval or ())))
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    @property
    def grid(self) -> Grid:
        """Lengths and block sizes."""
        return Grid(self.q_len, self.kv_len, self.q_block, self.kv_block)

    def evaluate(self, mod: MaskFn, blocks: Tensor, device: Device) -> Iterator[tuple[Tensor, Tensor]]:
        """Evaluate ``mod`` in every pair of some blocks, a chunk of at most PAIRS pairs at a time.

        blocks: int64 [n, 4], (b, h, row, col). Yields (chunk of blocks, visible pairs, bool [n, q_block,
        kv_block]). ``mod`` is never called past q_len or kv_len; pairs there are invisible.
        """
        ask = ask_torch(mod, device)
        q_in, kv_in = torch.arange(self.q_block), torch.arange(self.kv_block)
        for chunk in blocks.split(max(1, PAIRS // (self.q_block * self.kv_block))) if len(blocks) else ():
            b, h, row, col = chunk.unbind(1)
            q, kv = row[:, None] * self.q_block + q_in, col[:, None] * self.kv_block + kv_in
            visible = ask(b, h, q.clamp(max=self.q_len - 1), kv.clamp(max=self.kv_len - 1))
            yield chunk, visible & (q < self.q_len)[:, :, None] & (kv < self.kv_len)[:, None, :]

"""Ready masks in closed form: mask_mods that know which interval each row sees.

They are ordinary mask_mods, so torch's flex_attention and create_block_mask take them. Here they are
built from interval arithmetic instead: a mask of a million tokens takes a fraction of a second.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritoncp.core.tracing import reads_batch_or_head

MaskFn = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Intervals = tuple[Tensor, Tensor]
UNBOUNDED = -1


class MaskMod(ABC):
    """A mask_mod with structure. Call it as (b, h, q_idx, kv_idx) -> bool; combine it with & | ~.

    >>> causal() & document(lengths=[2, 6])
    and_masks(causal(), document(ids=[8]))

    What it captures is read again at every question, so tensors edited in place never go stale.
    """

    @abstractmethod
    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor: ...

    def intervals(self, q_len: int, kv_len: int) -> Intervals | None:
        """(lo, hi), int64 [B or 1, 1, q_len] on the CPU: row q sees exactly lo <= kv < hi.

        An empty row has lo = hi = 0. None if some row sees something else than one interval.
        """
        return None

    def tokens(self, q_len: int, kv_len: int) -> tuple[Tensor, Tensor] | None:
        """Return the queries and the keys that are tokens: bool [q_len] and [kv_len] on the CPU; None: all.
        The rest is padding, which no row sees and no kernel reads."""
        return None

    @property
    def batch(self) -> int:
        """Rows of the batch that it is made for, 1 where it serves any."""
        return 1

    @property
    def window(self) -> tuple[int, int] | None:
        """(left, right) where the mask is q - left <= kv <= q + right, -1 = unbounded; else None."""
        return None

    @property
    def reads(self) -> tuple[bool, bool]:
        """Whether the answer can depend on b, on h."""
        return False, False

    def __and__(self, other: MaskFn) -> MaskMod:
        return and_masks(self, other)

    def __or__(self, other: MaskFn) -> MaskMod:
        return or_masks(self, other)

    def __rand__(self, other: MaskFn) -> MaskMod:
        return and_masks(other, self)

    def __ror__(self, other: MaskFn) -> MaskMod:
        return or_masks(other, self)

    def __invert__(self) -> MaskMod:
        return not_(self)


@dataclass(frozen=True, repr=False)
class SlidingWindow(MaskMod):
    """-right <= q - kv <= left, inclusive; -1 = unbounded."""

    left: int
    right: int

    def __post_init__(self) -> None:
        if self.left < UNBOUNDED or self.right < UNBOUNDED:
            raise ValueError(
                f"sliding_window(left={self.left}, right={self.right}): both are how many tokens a query "
                "sees to that side; give 0 or more, or -1 for all of them"
            )

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if self.left == UNBOUNDED and self.right == UNBOUNDED:
            return kv_idx >= 0
        if self.left == UNBOUNDED:
            return q_idx - kv_idx >= -self.right
        if self.right == UNBOUNDED:
            return q_idx - kv_idx <= self.left
        return (q_idx - kv_idx <= self.left) & (q_idx - kv_idx >= -self.right)

    def intervals(self, q_len: int, kv_len: int) -> Intervals:
        q = torch.arange(q_len)[None, None]
        lo = torch.zeros_like(q) if self.left == UNBOUNDED else q - self.left
        hi = torch.full_like(q, kv_len) if self.right == UNBOUNDED else q + self.right + 1
        return _tidy(lo, hi, kv_len)

    @property
    def window(self) -> tuple[int, int]:
        return self.left, self.right

    def __repr__(self) -> str:
        if (self.left, self.right) == (UNBOUNDED, 0):
            return "causal()"
        return f"sliding_window({self.left}, {self.right})"


@dataclass(frozen=True, eq=False, repr=False)
class Document(MaskMod):
    """Same document id; both directions."""

    ids: Tensor  # integers [N] or [B, N]

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if self.ids.ndim == 1:
            return self.ids[q_idx] == self.ids[kv_idx]
        return self.ids[b, q_idx] == self.ids[b, kv_idx]

    def intervals(self, q_len: int, kv_len: int) -> Intervals | None:
        n = max(q_len, kv_len)
        if self.ids.shape[-1] < n:
            raise ValueError(
                f"document ids cover {self.ids.shape[-1]} tokens, the mask needs {n} "
                f"(q_len={q_len}, kv_len={kv_len}): give every token an id"
            )
        ids = self.ids.detach().cpu().reshape(-1, self.ids.shape[-1])[:, :n]
        change = ids[:, 1:] != ids[:, :-1]
        if bool((ids[:, 1:] < ids[:, :-1]).any()):  # out of order: is each document still in one piece?
            ordered = ids.sort(dim=1).values
            if not torch.equal(change.sum(1), (ordered[:, 1:] != ordered[:, :-1]).sum(1)):
                return None
        one = torch.ones(len(ids), min(n, 1), dtype=torch.bool)
        at = torch.arange(n)
        lo = torch.where(torch.cat([one, change], 1), at, 0).cummax(1).values
        hi = torch.where(torch.cat([change, one], 1), at + 1, n).flip(1).cummin(1).values.flip(1)
        return _tidy(lo[:, None, :q_len], hi[:, None, :q_len], kv_len)

    @property
    def batch(self) -> int:
        return self.ids.shape[0] if self.ids.ndim == 2 else 1

    @property
    def reads(self) -> tuple[bool, bool]:
        return self.ids.ndim == 2, False

    def __repr__(self) -> str:
        return f"document(ids={list(self.ids.shape)})"


@dataclass(frozen=True, eq=False, repr=False)
class PrefixLM(MaskMod):
    """Causal mask in which all queries see the prefix."""

    prefix: int | Tensor  # tokens; a tensor [B] for one per batch row

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        prefix = self.prefix
        if isinstance(prefix, Tensor) and prefix.ndim == 1:
            prefix = prefix[b]
        return (kv_idx <= q_idx) | (kv_idx < prefix)

    def intervals(self, q_len: int, kv_len: int) -> Intervals:
        prefix = torch.as_tensor(self.prefix).detach().cpu().long().reshape(-1, 1, 1)
        hi = torch.maximum(torch.arange(1, q_len + 1), prefix)
        return _tidy(torch.zeros_like(hi), hi, kv_len)

    @property
    def batch(self) -> int:
        return len(self.prefix) if isinstance(self.prefix, Tensor) and self.prefix.ndim == 1 else 1

    @property
    def reads(self) -> tuple[bool, bool]:
        return isinstance(self.prefix, Tensor) and self.prefix.ndim == 1, False

    def __repr__(self) -> str:
        what = list(self.prefix.shape) if isinstance(self.prefix, Tensor) else self.prefix
        return f"prefix_lm({what})"


@dataclass(frozen=True, repr=False)
class _Combined(MaskMod):
    parts: tuple[MaskFn, ...]

    @property
    def batch(self) -> int:
        return max(map(_batch, self.parts))

    @property
    def reads(self) -> tuple[bool, bool]:
        each = [_reads(p) for p in self.parts]
        return any(b for b, _ in each), any(h for _, h in each)

    def _structured(self) -> list[MaskMod] | None:
        parts = [p for p in self.parts if isinstance(p, MaskMod)]
        return parts if parts and len(parts) == len(self.parts) else None

    def _part_intervals(self, q_len: int, kv_len: int) -> list[Intervals] | None:
        found = []
        for part in self._structured() or []:
            got = part.intervals(q_len, kv_len)
            if got is None:
                return None
            found.append(got)
        return found or None

    def _part_windows(self) -> list[tuple[int, int]] | None:
        windows = [p.window for p in self._structured() or []]
        known = [w for w in windows if w is not None]
        return known if known and len(known) == len(windows) else None

    def __repr__(self) -> str:
        name = {"And": "and_masks", "Or": "or_masks", "Not": "not_"}[type(self).__name__]
        return f"{name}({', '.join(map(_named, self.parts))})"


class And(_Combined):
    """Visible in every part."""

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = self.parts[0](b, h, q_idx, kv_idx)
        for part in self.parts[1:]:
            seen = seen & part(b, h, q_idx, kv_idx)
        return seen

    def intervals(self, q_len: int, kv_len: int) -> Intervals | None:
        found = self._part_intervals(q_len, kv_len)
        if found is None:
            return None
        lo, hi = found[0]
        for lo2, hi2 in found[1:]:
            lo, hi = torch.maximum(lo, lo2), torch.minimum(hi, hi2)
        return _tidy(lo, hi, kv_len)

    @property
    def window(self) -> tuple[int, int] | None:
        windows = self._part_windows()
        if windows is None:
            return None
        left, right = zip(*windows, strict=True)
        return _narrowest(left), _narrowest(right)


class Or(_Combined):
    """Visible in any part."""

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = self.parts[0](b, h, q_idx, kv_idx)
        for part in self.parts[1:]:
            seen = seen | part(b, h, q_idx, kv_idx)
        return seen

    def intervals(self, q_len: int, kv_len: int) -> Intervals | None:
        found = self._part_intervals(q_len, kv_len)
        if found is None:
            return None
        lo, hi = found[0]
        for lo2, hi2 in found[1:]:
            none, none2 = lo == hi, lo2 == hi2
            if bool((~none & ~none2 & ((lo > hi2) | (lo2 > hi))).any()):  # a gap between the two
                return None
            lo, hi = (
                torch.where(none, x2, torch.where(none2, x, pick(x, x2)))
                for x, x2, pick in ((lo, lo2, torch.minimum), (hi, hi2, torch.maximum))
            )
        return lo, hi


class Not(_Combined):
    """Visible where the part is not."""

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ~self.parts[0](b, h, q_idx, kv_idx)


@dataclass(frozen=True, repr=False)
class Later(MaskMod):
    """A mask without its first `start` queries."""

    part: MaskFn
    start: int

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.part(b, h, q_idx + self.start, kv_idx)

    def intervals(self, q_len: int, kv_len: int) -> Intervals | None:
        whole = self.part.intervals(self.start + q_len, kv_len) if isinstance(self.part, MaskMod) else None
        return whole and (whole[0][..., self.start :], whole[1][..., self.start :])

    @property
    def batch(self) -> int:
        return _batch(self.part)

    @property
    def reads(self) -> tuple[bool, bool]:
        return _reads(self.part)

    def __repr__(self) -> str:
        return f"{_named(self.part)} from query {self.start}"


@dataclass(frozen=True, repr=False)
class Flipped(MaskMod):
    """Queries and keys exchanged."""

    part: MaskFn

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.part(b, h, kv_idx, q_idx)

    def intervals(self, q_len: int, kv_len: int) -> Intervals | None:
        return None if self.window is None else SlidingWindow(*self.window).intervals(q_len, kv_len)

    @property
    def window(self) -> tuple[int, int] | None:
        window = self.part.window if isinstance(self.part, MaskMod) else None
        return window and (window[1], window[0])

    @property
    def batch(self) -> int:
        return _batch(self.part)

    @property
    def reads(self) -> tuple[bool, bool]:
        return _reads(self.part)

    def __repr__(self) -> str:
        return f"{_named(self.part)} transposed"


def causal() -> MaskMod:
    """kv <= q: top-left aligned, as torch's.

    >>> causal().intervals(3, 3)[1].tolist()
    [[[1, 2, 3]]]
    """
    return SlidingWindow(UNBOUNDED, 0)


def sliding_window(left: int, right: int = 0) -> MaskMod:
    """-right <= q - kv <= left, inclusive on both sides as FlashAttention's; -1 = unbounded.

    Hugging Face's `sliding_window=n` counts the query itself, so it is `left=n-1`:

    >>> n = 3
    >>> hf = lambda q, kv: (kv <= q) & (kv > q - n)     # transformers.masking_utils, causal and window
    >>> q, kv = torch.arange(8)[:, None], torch.arange(8)
    >>> torch.equal(hf(q, kv), sliding_window(n - 1)(None, None, q, kv))
    True
    """
    return SlidingWindow(left, right)


def document(*, lengths: Sequence[int] | Tensor | None = None, ids: Tensor | None = None) -> MaskMod:
    """Tokens see their own document, both ways; and_masks(causal(), document(...)) for causal.

    lengths: tokens of each document, [n] or per batch row [B, n] (0 = no document).
    ids: the document of each token, integers [N] or [B, N]; kept, not copied.

    >>> document(lengths=[2, 1]).ids.tolist()
    [0, 0, 1]
    """
    if (lengths is None) == (ids is None):
        raise ValueError("document: give either lengths= (tokens of each) or ids= (one per token)")
    if lengths is not None:
        ids = _ids_from_lengths(torch.as_tensor(lengths))
    assert ids is not None
    if not isinstance(ids, Tensor) or ids.ndim not in (1, 2) or ids.is_floating_point():
        got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"document: ids must be an integer tensor [N] or [B, N], got {got}")
    return Document(ids)


def prefix_lm(prefix: int | Tensor) -> MaskMod:
    """Causal mask in which all queries see the first `prefix` tokens: an int, or an integer tensor [B].

    >>> prefix_lm(2).intervals(4, 4)[1].tolist()
    [[[2, 2, 3, 4]]]
    """
    if isinstance(prefix, Tensor) and (prefix.ndim > 1 or prefix.is_floating_point()):
        got = f"{prefix.dtype} {tuple(prefix.shape)}"
        raise ValueError(f"prefix_lm: prefix must be an int or an integer tensor [B], got {got}")
    return PrefixLM(prefix)


def and_masks(*masks: MaskFn) -> MaskMod:
    """Visible where every mask_mod says so. Of closed forms: again a closed form.

    >>> and_masks(causal(), sliding_window(4, 4)).window
    (4, 0)
    """
    return And(_checked("and_masks", masks))


def or_masks(*masks: MaskFn) -> MaskMod:
    """Visible where any mask_mod says so. A closed form only if every row still sees one interval."""
    return Or(_checked("or_masks", masks))


def not_(mask: MaskFn) -> MaskMod:
    """Visible where the mask_mod says it is not."""
    return Not(_checked("not_", (mask,)))


def is_settled(mask: Any) -> bool:
    """Whether a mask consists of closed forms only, so that nothing but its tensors' values can change.

    >>> is_settled(causal() & document(lengths=[2, 6])), is_settled(causal() & (lambda b, h, q, kv: q != kv))
    (True, False)
    """
    if type(mask) in (SlidingWindow, Document, PrefixLM):
        return True
    known = type(mask) in (And, Or, Not, Later, Flipped)
    return known and all(map(is_settled, getattr(mask, "parts", None) or (mask.part,)))


def _checked(name: str, masks: tuple[MaskFn, ...]) -> tuple[MaskFn, ...]:
    if not masks:
        raise ValueError(f"{name} needs at least one mask_mod")
    for mask in masks:
        if not callable(mask):
            got = type(mask).__name__
            raise TypeError(f"{name} takes mask_mods (b, h, q_idx, kv_idx) -> bool, got {got}")
    return masks


def _ids_from_lengths(lengths: Tensor) -> Tensor:
    """int32 [N] or [B, N] with the number of the document each token is in."""
    if lengths.ndim not in (1, 2) or lengths.is_floating_point() or bool((lengths < 0).any()):
        raise ValueError(f"document: lengths must be integers >= 0, [n] or [B, n], got {lengths.tolist()}")
    rows = lengths.reshape(-1, lengths.shape[-1])
    totals = rows.sum(1)
    if bool((totals != totals[:1]).any()):
        got = totals.tolist()
        raise ValueError(f"document: the lengths of every batch row must add up to the same, got {got}")
    number = torch.arange(rows.shape[1], dtype=torch.int32, device=rows.device).repeat(len(rows))
    ids = number.repeat_interleave(rows.flatten()).view(len(rows), -1)
    return ids if lengths.ndim == 2 else ids[0]


def _batch(part: MaskFn) -> int:
    return part.batch if isinstance(part, MaskMod) else 1


def _reads(part: MaskFn) -> tuple[bool, bool]:
    return part.reads if isinstance(part, MaskMod) else reads_batch_or_head(part)


def _named(part: MaskFn) -> str:
    return getattr(part, "__name__", repr(part))


def _narrowest(bounds: tuple[int, ...]) -> int:
    return min((bound for bound in bounds if bound != UNBOUNDED), default=UNBOUNDED)


def _tidy(lo: Tensor, hi: Tensor, kv_len: int) -> Intervals:
    """Cut to [0, kv_len); empty rows become (0, 0)."""
    lo, hi = lo.clamp(min=0), hi.clamp(max=kv_len)
    some = hi > lo
    return torch.where(some, lo, 0), torch.where(some, hi, 0)

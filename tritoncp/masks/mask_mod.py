"""MaskMod: a mask_mod with structure, and its combinations with and, or, not.

A mask_mod is a function (b, h, q_idx, kv_idx) -> bool, as in torch's flex attention. A MaskMod also computes
the interval of keys that each query row sees, where there is one.
"""

from __future__ import annotations

import copy
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from tritoncp.core.pytrees import as_tree, refuse_collation
from tritoncp.core.records import fields_of, record
from tritoncp.mods.places import check_pickles
from tritoncp.mods.tracing import reads_batch_or_head
from tritoncp.mods.user_code import call_mod, check_result

MaskFn = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Intervals = tuple[Tensor, Tensor]  # (lo, hi), see MaskMod.intervals
MAX_TOKENS = 1 << 30  # max tokens: kernels compute positions, their sums and differences in 32 bits
UNBOUNDED = -1  # for a side of a window that has no limit


class MaskMod(ABC):
    """A mask_mod that can also give row intervals. Call it as (b, h, q_idx, kv_idx) -> bool; combine it with
    & | ~.

    >>> from tritoncp.masks import causal, document
    >>> causal() & document(lengths=[2, 6])
    and_masks(causal(), document(ids=[8]))

    Captured tensors are read again at every call, so tensors edited in place never go stale.
    """

    @abstractmethod
    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor: ...

    def intervals(self, q_len: int, kv_len: int) -> Intervals | None:
        """Return (lo, hi), int64 [B or 1, 1, q_len] on the CPU: query row q sees exactly lo <= kv < hi.

        An empty row has lo = hi = 0. None if the keys of some row are not one interval.
        """
        return None

    def tokens(self, q_len: int, kv_len: int) -> tuple[Tensor, Tensor] | None:
        """Return which queries and which keys are tokens, not padding: bool [q_len] and [kv_len] on the CPU.

        No row sees padding and no kernel reads it. None: there is no padding.
        """
        return None

    @property
    def batch(self) -> int:
        """Number of batch rows with separate intervals; 1 if all batch rows share them."""
        return 1

    @property
    def window(self) -> tuple[int, int] | None:
        """(left, right) where the mask is q - left <= kv <= q + right, -1 = unbounded; else None."""
        return None

    @property
    def query_offset(self) -> int | None:
        """The key at the position of query 0, if query i has the position of key ``query_offset + i``; None:
        unknown."""
        return None

    @property
    def reads(self) -> tuple[bool, bool]:
        """Whether the result can depend on b, and whether it can depend on h."""
        return self.batch > 1, False

    def as_call(self) -> tuple[Callable[..., MaskMod], tuple[Any, ...]]:
        """Return a function and its arguments that make this mask_mod again when a graph runs: the class and
        its fields."""
        return type(self), tuple([getattr(self, name) for name in fields_of(self)])

    def __copy__(self) -> Self:
        own = object.__new__(type(self))
        vars(own).update(vars(self))
        return own

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        own = copy.copy(self)
        vars(own).update(copy.deepcopy(vars(self), memo))
        return own

    def __getstate__(self) -> dict[str, Any]:
        for value in vars(self).values():
            for part in value if isinstance(value, tuple) else (value,):
                check_pickles(part)
        return vars(self)

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

    def __bool__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} has no truth value, since `and`, `or` and `not` would drop a mask: combine masks with "
            "& | ~, as causal() & sliding_window(128), and compare with `is None`"
        )


refuse_collation(MaskMod)


@record(eq=True, repr=False)
class _Combination(MaskMod):
    """Base class of And, Or and Not: a mask_mod computed from other mask_mods."""

    parts: tuple[MaskFn, ...]

    @property
    def batch(self) -> int:
        return max(map(num_batch_rows, self.parts))

    @property
    def reads(self) -> tuple[bool, bool]:
        dependences = [dependence_of(part) for part in self.parts]
        return any(b for b, _ in dependences), any(h for _, h in dependences)

    def _part_visible(self, index: int, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Evaluate a part, which may return a Python bool, as in torch's and_masks. Raises TypeError for a
        result of another type."""
        visible: Any = call_mod(self.parts[index], "mask_mod", b, h, q_idx, kv_idx)
        if isinstance(visible, bool):
            return torch.full_like(q_idx, visible, dtype=torch.bool)
        ndim = max(x.ndim if isinstance(x, Tensor) else 0 for x in (b, h, q_idx, kv_idx))
        return check_result(visible, self.parts[index], ndim=ndim)

    def __repr__(self) -> str:
        name = {"And": "and_masks", "Or": "or_masks", "Not": "not_"}[type(self).__name__]
        return f"{name}({', '.join(map(name_of, self.parts))})"


class _Join(_Combination):
    """Base class of And and Or: parts joined from left to right."""

    _join: Callable[[Tensor, Tensor], Tensor]  # values of two parts

    @abstractmethod
    def _join_intervals(self, left: Intervals, right: Intervals) -> Intervals | None:
        """Return the intervals of two parts joined; None if there is a row that is not one interval."""

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        visible = self._part_visible(0, b, h, q_idx, kv_idx)
        for index in range(1, len(self.parts)):
            visible = self._join(visible, self._part_visible(index, b, h, q_idx, kv_idx))
        return visible

    def intervals(self, q_len: int, kv_len: int) -> Intervals | None:
        # Computed for every part, since each raises an error for more tokens than it has.
        parts = [part.intervals(q_len, kv_len) for part in self.parts if isinstance(part, MaskMod)]
        if len(parts) < len(self.parts):
            return None
        joined = parts[0]
        for intervals in parts[1:]:
            joined = joined and intervals and self._join_intervals(joined, intervals)
        return joined


@as_tree
class And(_Join):
    """Intersection: a pair is visible if every part shows it."""

    _join = staticmethod(operator.and_)

    def _join_intervals(self, left: Intervals, right: Intervals) -> Intervals:
        lo, hi = torch.maximum(left[0], right[0]), torch.minimum(left[1], right[1])
        return lo.where(hi > lo, 0), hi.where(hi > lo, 0)

    @property
    def window(self) -> tuple[int, int] | None:
        windows = [part.window for part in self.parts if isinstance(part, MaskMod) and part.window]
        if len(windows) < len(self.parts):
            return None
        left, right = zip(*windows, strict=True)
        return _intersect_bounds(left), _intersect_bounds(right)


@as_tree
class Or(_Join):
    """Union: a pair is visible if any part shows it."""

    _join = staticmethod(operator.or_)

    def _join_intervals(self, left: Intervals, right: Intervals) -> Intervals | None:
        (lo, hi), (lo2, hi2) = left, right
        empty, empty2 = lo == hi, lo2 == hi2
        if bool((~empty & ~empty2 & ((lo > hi2) | (lo2 > hi))).any()):  # a gap between the two
            return None
        lo, hi = (
            torch.where(empty, x2, torch.where(empty2, x, pick(x, x2)))
            for x, x2, pick in ((lo, lo2, torch.minimum), (hi, hi2, torch.maximum))
        )
        return lo, hi


@as_tree
class Not(_Combination):
    """Complement: a pair is visible if the part hides it."""

    def intervals(self, q_len: int, kv_len: int) -> Intervals | None:
        if isinstance(self.parts[0], MaskMod):
            self.parts[0].intervals(q_len, kv_len)  # so that it raises its error for more tokens than it has
        return None

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ~self._part_visible(0, b, h, q_idx, kv_idx)


def and_masks(*masks: MaskFn) -> MaskMod:
    """Return the mask_mod of the pairs that all of ``masks`` show, as does ``a & b``.

    >>> from tritoncp.masks import causal, sliding_window
    >>> and_masks(causal(), sliding_window(4, 4)).window
    (4, 0)
    >>> index = torch.arange(3)
    >>> mod = and_masks(causal(), lambda b, h, q, kv: kv != 1)      # any mask_mod
    >>> mod(None, None, index[:, None], index).int().tolist()
    [[1, 0, 0], [1, 0, 0], [1, 0, 1]]

    Args:
        masks: functions (b, h, q_idx, kv_idx) -> bool, closed forms such as ``causal()`` among them.

    Returns:
        A mask_mod; a closed form if all masks are.

    Raises:
        ValueError: without a mask.
        TypeError: for a mask that is not callable.
    """
    return And(_check_callable("and_masks", masks))


def or_masks(*masks: MaskFn) -> MaskMod:
    """Return the mask_mod of the pairs that any of ``masks`` shows, as does ``a | b``.

    >>> from tritoncp.masks import causal, create_block_mask
    >>> mod = or_masks(causal(), lambda b, h, q, kv: kv < 2)  # all see the first two tokens
    >>> create_block_mask(mod, None, None, 4, 4).to_dense()[0, 0].int().tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]

    Args:
        masks: functions (b, h, q_idx, kv_idx) -> bool, closed forms such as ``causal()`` among them.

    Returns:
        A mask_mod; a closed form if all masks are and each row still sees one interval of keys.

    Raises:
        ValueError: without a mask.
        TypeError: for a mask that is not callable.
    """
    return Or(_check_callable("or_masks", masks))


def not_(mask: MaskFn) -> MaskMod:
    """Return the mask_mod of the pairs that ``mask`` hides, as does ``~mask``.

    >>> from tritoncp.masks import causal, create_block_mask
    >>> create_block_mask(not_(causal()), None, None, 3, 3).to_dense()[0, 0].int().tolist()
    [[0, 1, 1], [0, 0, 1], [0, 0, 0]]

    Args:
        mask: function (b, h, q_idx, kv_idx) -> bool, or a closed form such as ``causal()``.

    Returns:
        A mask_mod; a closed form if ``mask`` is one and the hidden keys of each row are one interval.

    Raises:
        TypeError: for a mask that is not callable.
    """
    return Not(_check_callable("not_", (mask,)))


def _check_callable(name: str, masks: tuple[MaskFn, ...]) -> tuple[MaskFn, ...]:
    """Return ``masks``; raise unless they are one or more callables. name: the caller's name, for
    messages."""
    if not masks:
        raise ValueError(f"{name}(): pass at least one mask_mod")
    for mask in masks:
        if not callable(mask):
            message = f"{name}: a {type(mask).__name__}; pass mask_mods (b, h, q_idx, kv_idx) -> bool"
            raise TypeError(message)
    return masks


def num_batch_rows(part: MaskFn) -> int:
    """Return MaskMod.batch of a MaskMod, 1 of any other function."""
    return part.batch if isinstance(part, MaskMod) else 1


def dependence_of(part: MaskFn) -> tuple[bool, bool]:
    """Return whether a mask_mod's result can depend on b, and on h; functions other than a MaskMod are
    traced."""
    return part.reads if isinstance(part, MaskMod) else reads_batch_or_head(part)


def name_of(part: MaskFn) -> str:
    """Return the name of a function or the repr of a MaskMod, without memory addresses, since they differ
    between processes."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", getattr(part, "__name__", repr(part)))


def _intersect_bounds(bounds: tuple[int, ...]) -> int:
    """Return the min of several window bounds, where -1 is unbounded."""
    return min((bound for bound in bounds if bound != UNBOUNDED), default=UNBOUNDED)


def batch_row(x: Tensor, b: Tensor) -> tuple[Tensor | int, ...]:
    """Return the index of batch row b in a tensor [N] or [B, N]. A single row serves every b."""
    return () if x.ndim == 1 else (b,) if len(x) > 1 else (0,)


def clip_intervals(lo: Tensor, hi: Tensor, length: int) -> Intervals:
    """Clip intervals to [0, length); empty ones become (0, 0)."""
    lo, hi = lo.clamp(min=0), hi.clamp(max=length)
    nonempty = hi > lo
    return torch.where(nonempty, lo, 0), torch.where(nonempty, hi, 0)


def check_window(window: tuple[int, int]) -> tuple[int, int]:
    """Return (left, right) of a window argument; raise ValueError unless both are at least -1."""
    sides = tuple(window) if isinstance(window, tuple | list) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and side >= UNBOUNDED for side in sides):
        raise ValueError(
            f"window={window!r}; pass (left, right), the numbers of visible keys before and after the query, "
            "or -1 for all keys"
        )
    return sides[0], sides[1]

"""Attributes of torch's BlockMask, and of tensors, that model code reads of any mask; indexing of masks."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tritoncp.core.records import fields_of

DIMENSIONS = ("batch rows", "heads", "rows of blocks", "keys")


TRACED = (
    "{name} of a {kind} that a traced program gets is only known when the program runs: read it before the "
    "call, and pass it as an argument"
)


class BlockMaskInterface:
    """Base class of Mask and Plan: attributes that do not depend on the blocks.

    Transformers (4 and 5) reads ``ndim`` and ``shape`` of the ``attention_mask`` that a model is given, to
    tell padding [B, KV_LEN] from a mask of pairs and to learn KV_LEN, before it calls the mask function of
    the attention in use, which may return this object unchanged. Before generation it calls ``contiguous``;
    pipelines and wrappers that place a model call ``to``.
    """

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, Q_LEN, KV_LEN) of the whole mask, in tokens; B and H are 1 where all rows or heads share
        one."""
        raise NotImplementedError

    @property
    def BLOCK_SIZE(self) -> tuple[int, int]:
        """(queries, keys) of a block, in tokens."""
        raise NotImplementedError

    @property
    def seq_lengths(self) -> tuple[int, int]:
        """(Q_LEN, KV_LEN), in tokens."""
        return self.shape[2:]

    @property
    def ndim(self) -> int:
        """Number of dimensions, 4."""
        return len(self.shape)

    def dim(self) -> int:
        """Return the number of dimensions, 4."""
        return self.ndim

    def numel(self) -> int:
        """Return B * H * Q_LEN * KV_LEN, the number of pairs, whether visible or not."""
        return math.prod(self.shape)

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError for a missing attribute. In a traced program, say that the mask exists only
        when the program runs."""
        if name in fields_of(self):
            raise AttributeError(TRACED.format(kind=type(self).__name__, name=name))
        raise AttributeError(f"a {type(self).__name__} has no attribute {name!r}")

    def __copy__(self) -> Self:
        return self  # immutable, as are tuples

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # functions are not copied either, nor what they capture

    def contiguous(self) -> Self:
        """Return the object itself: its tensors are contiguous."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the object itself, for any device and dtype.

        Its tensors stay on the CPU; a call copies the tensors it needs to the device of the query, once.
        Tensors that a mask_mod captures stay where they are, as with torch's ``BlockMask.to``. It has no
        dtype.

        Args:
            args: arguments of ``torch.nn.Module.to``.
            kwargs: keyword arguments of ``torch.nn.Module.to``.

        Returns:
            The object itself.

        Raises:
            TypeError, RuntimeError: for other arguments.
        """
        torch._C._nn._parse_to(*args, **kwargs)
        return self


@cache
def sparsity_counts_blocks() -> bool:
    """Return whether the installed torch's BlockMask.sparsity counts blocks (from 2.14 on) or tokens."""
    lists = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=2, seq_lengths=(1, 1)).sparsity() == 0


def selected_numbers(index: Any, sizes: tuple[int, int, int]) -> tuple[tuple[int, ...] | None, ...]:
    """Return the batch rows, heads and rows of blocks that an index selects, None where it selects all.

    index: an int, slice, integer or bool tensor or list [n], or a tuple of up to three of them; a fourth, for
        keys, must be a full slice. An int keeps its dimension, with size 1, as in torch's BlockMask. sizes:
        the sizes of the three dimensions. Raises IndexError for a number out of range or an invalid index.

    >>> selected_numbers((-1, slice(None), slice(2, 4)), (3, 2, 8))
    ((2,), None, (2, 3))
    """
    parts = index if isinstance(index, tuple) else (index,)
    dots = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    before, after = parts[:dots], parts[dots + 1 :]
    parts = (*before, *[slice(None)] * (4 - len(before) - len(after)), *after)
    keys = parts[3]
    if len(parts) > 4 or not isinstance(keys, slice) or keys not in (slice(None), slice(0, None)):
        raise IndexError(
            f"a mask has dimensions [{', '.join(DIMENSIONS)}], whose first three can be selected; make the "
            "mask of fewer keys with create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)"
        )
    return tuple(_numbers(*argument) for argument in zip(parts, sizes, DIMENSIONS, strict=False))


def _numbers(part: Any, size: int, dimension: str) -> tuple[int, ...] | None:
    """Return the numbers below ``size`` that one part of an index selects, None for all in order."""
    try:
        index = part if isinstance(part, slice) else torch.as_tensor(part).cpu()
        if isinstance(index, Tensor):
            is_bool = index.dtype is torch.bool
            if index.ndim > 1 or (is_bool and not index.ndim):
                raise IndexError
            index = index.long() if index.dtype is torch.uint8 else index  # a bool mask in torch
        numbers = torch.arange(size)[index].flatten().tolist()
    except (IndexError, TypeError, ValueError, RuntimeError):  # of an invalid index
        numbers = []
    if not numbers:
        raise IndexError(
            f"{part!r} selects none of the mask's {size} {dimension}; they are selected by an int, a slice, "
            "or an integer or bool tensor or list [n]"
        )
    return None if numbers == list(range(size)) else tuple(numbers)

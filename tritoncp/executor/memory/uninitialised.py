"""Detection of uninitialised memory: `torch.empty` fills it with a pattern, which data do not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

ALLOCATIONS = (
    *((torch, name) for name in ("empty", "empty_like", "empty_strided", "empty_permuted")),
    *((torch.Tensor, name) for name in ("new_empty", "new_empty_strided")),
)
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # types by size in bytes


def pattern_of(dtype: torch.dtype) -> int | None:
    """Return the bits of an uninitialised element: a NaN that no arithmetic produces, or a huge integer.

    None for dtypes without a rare value: bool, 8 bits, and 16-bit integers.
    """
    size = dtype.itemsize
    if size in INTEGERS and (size > 2 or dtype.is_floating_point):
        return int.from_bytes(b"\xf5\x7f" * (size // 2), "little")
    return None


def fill(x: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with the pattern of its type."""
    pattern = pattern_of(x.dtype)
    if pattern is not None and not torch.compiler.is_compiling():
        with torch.no_grad():
            x.view(INTEGERS[x.element_size()]).fill_(pattern)
    return x


@contextmanager
def filled_allocations() -> Iterator[None]:
    """Make torch's functions for uninitialised memory fill their results with the pattern, in a ``with``
    block."""

    def filled(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate_filled(*arguments: Any, **keywords: Any) -> torch.Tensor:
            return fill(allocate(*arguments, **keywords))

        return allocate_filled

    with ExitStack() as stack:
        for owner, name in ALLOCATIONS:
            stack.enter_context(patch.object(owner, name, filled(getattr(owner, name))))
        yield

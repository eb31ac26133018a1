"""Bytes of meta tensors that are alive, counted as they are made and freed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten


def _empty_like(x: Tensor, *operands: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    return torch.empty_permuted(x.shape, order, dtype=dtype or x.dtype, device=x.device)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape[dim] = sum(x.shape[dim] for x in tensors)
    return tensors[0].new_empty(shape)


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return _cat([x.unsqueeze(dim) for x in tensors], dim)


def _index(x: Tensor, indices: Sequence[Tensor]) -> Tensor:
    return x.new_empty(*indices[0].shape, *x.shape[len(indices) :])


def _add(x: Tensor, *operands: Any, **options: Any) -> Tensor:
    return x


# Operations whose meta kernels load Dynamo or SymPy, which takes seconds, and what they allocate.
LIGHT = {
    ATEN.empty_like.default: _empty_like,
    ATEN.zeros_like.default: _empty_like,
    ATEN.remainder.Scalar: _empty_like,
    ATEN.floor_divide.default: _empty_like,
    ATEN.cat.default: _cat,
    ATEN.stack.default: _stack,
    ATEN.index.Tensor: _index,
    ATEN.add_.Tensor: _add,
}


class MemoryMeter(TorchDispatchMode):
    """Dispatch mode that counts the bytes of the memory of meta tensors that is allocated in it.

    live: bytes that are alive; peak: their max

    >>> with MemoryMeter() as meter:
    ...     x = torch.empty(1000, dtype=torch.uint8, device="meta")
    ...     x = x[:10] + 1
    >>> meter.live, meter.peak
    (10, 1010)
    """

    def __init__(self, ignored: Iterable[Tensor] = ()) -> None:
        """ignored: tensors of other memory, which does not count"""
        super().__init__()
        self.live, self.peak = 0, 0
        self._known: dict[int, weakref.ref | None] = {x.untyped_storage()._cdata: None for x in ignored}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports Dynamo at the first operation, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = func
        if func in LIGHT and (args[0] if isinstance(args[0], Tensor) else args[0][0]).is_meta:
            run = LIGHT[func]
        out = run(*args, **(kwargs or {}))
        for x in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(x, Tensor) and x.is_meta:
                self._add(x.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is freed, once."""
        key = storage._cdata
        if key in self._known:
            return
        nbytes = storage.nbytes()

        def free(_: Any) -> None:
            del self._known[key]
            self.live -= nbytes

        self._known[key] = weakref.ref(storage, free)
        self.live += nbytes
        self.peak = max(self.peak, self.live)

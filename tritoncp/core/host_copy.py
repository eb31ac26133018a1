"""Work on the host: default device, and copies of tensors from a device to the CPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


def elsewhere() -> bool:
    """Whether a default device is set, by a mode of torch functions."""
    return torch._C._len_torch_function_stack() > 0 and torch.get_default_device().type != "cpu"


def host() -> AbstractContextManager[object]:
    """Within it, tensors made without a device are on the CPU."""
    # A mode would cost every operation in it.
    return torch.device("cpu") if elsewhere() else contextlib.nullcontext()


def on_host(call: Callable[P, T]) -> Callable[P, T]:
    """The same function within `host()`.

    >>> with torch.device("meta"):
    ...     torch.zeros(1).device.type, on_host(lambda: torch.zeros(1).device.type)()
    ('meta', 'cpu')
    """

    @functools.wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        if not elsewhere():
            return call(*args, **kwargs)
        with torch.device("cpu"):
            return call(*args, **kwargs)

    return wrapped


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """These tensors on the CPU, in one copy: as bytes, one after the other. The only way back to the host.

    >>> to_host([torch.tensor([1.5]), torch.tensor(True)])
    [tensor([1.5000]), tensor(True)]
    """
    if not tensors:
        return []
    device = tensors[0].device
    parts = [t.detach().to(device).reshape(-1).contiguous().view(torch.uint8) for t in tensors]
    whole = torch.cat(parts).cpu()
    pieces = whole.split([part.numel() for part in parts])
    # A piece may start anywhere: cloned, it is aligned for its type.
    return [piece.clone().view(t.dtype).view(t.shape) for piece, t in zip(pieces, tensors)]


def is_remote(tensor: Tensor) -> bool:
    """Whether reading it on the host takes a copy that waits for a device."""
    return tensor.device.type != "cpu"

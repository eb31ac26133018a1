"""Masks and plans are made on the CPU, whatever `torch.set_default_device` says."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

import torch

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

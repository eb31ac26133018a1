"""Copies of functions around other captured tensors."""

import functools
import types
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tritoncp.mods import with_tensors

TABLE = torch.zeros(2)
HOLDER = types.ModuleType("holder")
HOLDER.table = TABLE  # type: ignore[attr-defined]


class Pair(NamedTuple):
    table: Tensor
    name: str


@dataclass(frozen=True)
class Frozen:
    table: Tensor

    def read(self) -> Tensor:
        return self.table


class Slotted:
    __slots__ = "table"

    def __init__(self) -> None:
        self.table = TABLE


def reader(read: Any, value: Any) -> Any:
    return lambda: read(value)


def recursive() -> Any:
    table = TABLE

    def odd(n: int = 2) -> Tensor:
        return table if n == 0 else even(n - 1)

    def even(n: int) -> Tensor:
        return odd(n - 1)

    return odd


READERS = {
    "closure": lambda: reader(lambda x: x, TABLE),
    "default": lambda: lambda table=TABLE: table,
    "keyword": lambda: lambda *, table=TABLE: table,
    "global": lambda: lambda: TABLE,
    "module": lambda: lambda: HOLDER.table,
    "partial": lambda: functools.partial(lambda x, y: y, 1, y=TABLE),
    "method": lambda: Frozen(TABLE).read,
    "frozen dataclass": lambda: reader(lambda x: x.table, Frozen(TABLE)),
    "slots": lambda: reader(lambda x: x.table, Slotted()),
    "named tuple": lambda: reader(lambda x: x.table, Pair(TABLE, "a")),
    "list of tuples": lambda: reader(lambda x: x[1][0], [0, (TABLE,)]),
    "dictionary": lambda: reader(lambda x: x["a"], {"a": TABLE, "b": 2}),
    "ordered dictionary": lambda: reader(lambda x: next(iter(x.values())), OrderedDict(a=TABLE)),
    "functions that call each other": recursive,
}


@pytest.mark.parametrize("name", READERS)
def test_tensors_are_replaced_wherever_a_function_holds_them(name: str) -> None:
    """The original stays as it is, and a function without the tensor is not copied."""
    fn, new = READERS[name](), torch.ones(2)
    assert with_tensors(fn, {id(TABLE): new})() is new
    assert fn() is TABLE
    assert with_tensors(fn, {id(new): TABLE}) is fn

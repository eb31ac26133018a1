"""Calls of functions with other captured tensors."""

import functools
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tritoncp.mods.captures import TensorReplacement

TABLE = torch.zeros(2)
HOLDER = types.ModuleType("holder")
HOLDER.table = TABLE  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Frozen:
    table: Tensor

    def read(self) -> Tensor:
        return self.table


def reader(read: Any, value: Any) -> Any:
    return lambda: read(value)


READERS = {
    "closure": lambda: reader(lambda x: x, TABLE),
    "default": lambda: lambda table=TABLE: table,
    "global": lambda: lambda: TABLE,
    "module": lambda: lambda: HOLDER.table,
    "partial": lambda: functools.partial(lambda x, y: y, 1, y=TABLE),
    "method": lambda: Frozen(TABLE).read,
    "nested": lambda: reader(lambda x: x["a"][1], {"a": [0, TABLE]}),
    "index": lambda: lambda: torch.arange(5)[TABLE.long()],
    "vmap": lambda: lambda: torch.vmap(lambda i: TABLE[i] + 0)(torch.arange(2)),
    "list of operands": lambda: lambda: torch.stack([TABLE, TABLE]).sum(0) / 2,
    "attribute": lambda: lambda: torch.ones(2, dtype=TABLE.dtype) * TABLE.shape[0],
}


@pytest.mark.parametrize("name", READERS)
def test_tensors_are_replaced_wherever_a_function_reads_them(name: str) -> None:
    fn, new = READERS[name](), torch.tensor([2, 3])
    before = fn()
    expected = {"index": new, "attribute": torch.tensor([2, 2])}.get(name, new)
    with TensorReplacement({id(TABLE): new}) as mode:
        after = mode.replace(fn())
    assert torch.equal(after, expected.to(after.dtype))
    assert torch.equal(fn(), before) and fn().dtype == before.dtype

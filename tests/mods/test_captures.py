"""Calls of functions with other captured tensors."""

import functools
from typing import Any

import pytest
import torch

from tritoncp.mods.captures import TensorReplacement

TABLE = torch.zeros(2)
READERS: dict[str, Any] = {
    "result": lambda: TABLE,
    "keyword": functools.partial(lambda x, y: y, 1, y=TABLE),
    "index": lambda: torch.arange(5)[TABLE.long()],
    "vmap": lambda: torch.vmap(lambda i: TABLE[i] + 0)(torch.arange(2)),
    "list of operands": lambda: torch.stack([TABLE, TABLE]).sum(0) / 2,
    "attribute": lambda: torch.ones(2, dtype=TABLE.dtype) + TABLE.max(),
}


@pytest.mark.parametrize("name", READERS)
def test_tensors_are_replaced_wherever_a_function_reads_them(name: str) -> None:
    fn, new = READERS[name], torch.tensor([2, 3])
    before = fn()
    expected = {"attribute": torch.tensor([4, 4])}.get(name, new)
    with TensorReplacement({id(TABLE): new}) as mode:
        after = mode.replace(fn())
    assert torch.equal(after, expected.to(after.dtype))
    assert torch.equal(fn(), before) and fn().dtype == before.dtype

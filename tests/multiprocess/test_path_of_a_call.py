"""The path of one call through the files of the package, so that a reader can follow it.

An argument is followed through a repeated call on two ranks: each function of the package that is called with
it, or with a record, tuple or dict that has it, is a stop. An attribute is none, even if a property computes
it. Adjacent stops in one file are one stay.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import tritoncp
from tests.command_process import ROOT
from tests.multiprocess import ranks
from tritoncp import and_masks, causal, create_block_mask, document
from tritoncp.mods.mod import translate

PACKAGE = tuple([f"{ROOT / name}/" for name in ("tritoncp", "kernels")])
MAX_FILES = MAX_RETURNS = 20  # that a reader opens, and comes back to
ENDS = {
    "query": "kernels/forward.py",
    "block_mask": "kernels/forward.py",
    "score_mod": "kernels/forward.py",
    "mesh": "tritoncp/distributed/collectives.py",  # which sends messages
}


class Follower:
    """Finds what an argument became in the arguments of a function: objects, and tensors by their address."""

    def __init__(self, *things: Any) -> None:
        self.objects = {id(x) for x in things if not isinstance(x, Tensor)}
        self.addresses = {x.data_ptr() for x in things if isinstance(x, Tensor)}

    def sees(self, value: Any, depth: int = 3) -> bool:
        if id(value) in self.objects or self.addresses & {*addresses_of(value)}:
            return True
        parts = [*value.values()] if isinstance(value, dict) else value
        has_parts = isinstance(parts, tuple | list) and depth > 0
        return has_parts and any(self.sees(part, depth - 1) for part in parts)


def addresses_of(value: Any) -> Iterator[int]:
    """Yield the address of a tensor with values, or of a pointer in an interpreted kernel."""
    if isinstance(value, Tensor):
        yield value.data_ptr()
    data = getattr(getattr(value, "handle", None), "data", None)
    if getattr(data, "size", 0) == 1 and data.dtype.kind == "u":
        yield int(data.item())


def follow(call: Callable[[], object], follower: Follower, end: str) -> list[str]:
    """Return the files of the stays, up to the first stay in ``end``."""
    stays: list[str] = []
    generators: list[FrameType] = []  # that have begun: a profiler sees their calls and each time they go on

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE) or end in stays or frame in generators:
            return
        if code.co_flags & inspect.CO_GENERATOR:
            generators.append(frame)
        values, names = frame.f_locals, inspect.getargs(code)
        known = [*names.args, *filter(None, [names.varargs, names.varkw])]
        owner = type(values.get(known[0])) if known else None
        if isinstance(getattr(owner, code.co_name, None), property | cached_property):
            return
        if any(follower.sees(values[name]) for name in known if name in values):
            file = Path(code.co_filename).relative_to(ROOT).as_posix()
            if stays[-1:] != [file]:
                stays.append(file)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return stays


def walks_on_rank(group: Any) -> dict[str, list[str]]:
    """Follow each argument through a call that was made twice before."""
    torch.manual_seed(0)
    mod = and_masks(causal(), document(lengths=[40, 24]))
    plan = tritoncp.make_plan(
        create_block_mask(mod, 1, 1, 64, 64, BLOCK_SIZE=16), group, balancer="head_tail", schedule="fetch"
    )
    q, k, v = (torch.randn(1, 2, 32, 16) for _ in range(3))
    positions, slopes = tritoncp.positions(plan), torch.randn(2)
    score = lambda s, b, h, i, j: s + slopes[h] * (i - j)  # noqa: E731

    def call() -> None:
        tritoncp.flex_attention(q, k, v, score, plan, mesh=group, positions=positions)

    for _ in range(2):
        call()
    steps = [plan.tables_for(q, buffer) for buffer in (plan.rank, "fetched")]
    tables = [x for step in steps for x in vars(step).values() if isinstance(x, Tensor)]
    translated, _ = translate(score, 5, torch.float32)
    followers = {
        "query": Follower(q),
        "block_mask": Follower(plan, *steps, *tables),
        "score_mod": Follower(score, translated, translated.fn),
        "mesh": Follower(group),
    }
    return {name: follow(call, follower, ENDS[name]) for name, follower in followers.items()}


@pytest.mark.long
def test_an_argument_passes_at_most_20_files_and_comes_back_to_20_at_most() -> None:
    for walks in ranks.run(2, walks_on_rank):
        for name, stays in walks.items():
            returns = len(stays) - len(set(stays))
            found = f"{name}: {len(set(stays))} files, {returns} returns: {stays}"
            assert stays[0].startswith("tritoncp/api/") and stays[-1] == ENDS[name], found
            assert len(set(stays)) <= MAX_FILES and returns <= MAX_RETURNS, found

"""Ranks agree about a plan, or every one of them raises.

Every rank makes its plan from its own mask; nothing but a few integers is exchanged. A rank that fails takes
part all the same, so that nobody waits for it.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

import tritoncp
from tritoncp import comm

T = TypeVar("T")
FACTS = ("call", "versions", "options", "shapes", "mask", "placement")  # what ranks compare, in this order
NUMBERS = 2  # integers that ranks tell each other, and that may differ
WORDS = 30  # what a failing rank says, in words of eight bytes
CHECKED = os.environ.get("TRITONCP_CHECK", "0") == "1"  # every call

Facts = Mapping[str, tuple[str, bytes]]  # name: (for people, what is compared)


class Disagreement(RuntimeError):
    """Another rank was called with something else, or failed."""


def together(group: Any, work: Callable[[], tuple[T, Facts, Sequence[int]]]) -> tuple[T, list[list[int]]]:
    """work() on every rank of the group: its result, and the numbers of all ranks.

    work: gives a result, facts that must be equal on all ranks, and up to NUMBERS integers that may differ.
    Raises on every rank where it raised on one, its own exception there and Disagreement elsewhere, and where
    facts differ. A group of None is this process alone.
    """
    if group is None:
        result, _, numbers = work()
        return result, [list(numbers)]
    try:
        result, facts, numbers = work()
    except Disagreement:
        raise  # of an exchange within: every rank knows
    except Exception as error:
        _check_failures(error, comm.exchange(_record(error, {}, ()), group), group.rank())
        raise
    rows = comm.exchange(_record(None, facts, numbers), group)
    _check_failures(None, rows, group.rank())
    _check_facts(facts, rows, group.rank())
    return result, [row[1 : 1 + len(numbers)] for row in rows]


def at_every_call(group: Any, work: Callable[[], T], facts: Callable[[T], Facts]) -> T:
    """work(), and where TRITONCP_CHECK=1 the ranks compare what came of it: for finding the rank that differs
    when answers are wrong or a collective hangs. Otherwise nothing is exchanged."""
    if group is None or not CHECKED:
        return work()

    def compared() -> tuple[T, Facts, Sequence[int]]:
        result = work()
        return result, facts(result), ()

    return together(group, compared)[0]


def fact(text: str, content: bytes | None = None) -> tuple[str, bytes]:
    """A fact as people read it, and as it is compared where the text does not say all."""
    return text, text.encode() if content is None else content


def versions() -> tuple[str, bytes]:
    from importlib.metadata import PackageNotFoundError, version

    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return fact(
        f"tritoncp {tritoncp.__version__}, torch {torch.__version__}, triton {triton}, "
        f"Python {platform.python_version()}, {device}"
    )


def _record(error: Exception | None, facts: Facts, numbers: Sequence[int]) -> list[int]:
    said = f"{type(error).__name__}: {error}" if error is not None else ""
    text = said.encode()[: 8 * WORDS].ljust(8 * WORDS, b"\0")
    words = [int.from_bytes(text[i : i + 8], "little", signed=True) for i in range(0, len(text), 8)]
    digests = [_word(facts[name][1]) if name in facts else 0 for name in FACTS]
    return [int(error is not None), *numbers, *[0] * (NUMBERS - len(numbers)), *digests, *words]


def _word(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little", signed=True)


def _check_failures(error: Exception | None, rows: list[list[int]], rank: int) -> None:
    failed = [at for at, row in enumerate(rows) if row[0]]
    if error is not None:
        others = [at for at in failed if at != rank]
        also = f"; {_ranks(others)} failed too" if others else ""
        error.add_note(f"on rank {rank}, while a plan was made{also}")
    elif failed:
        words = rows[failed[0]][-WORDS:]
        said = b"".join(w.to_bytes(8, "little", signed=True) for w in words).rstrip(b"\0")
        raise Disagreement(
            f"{_ranks(failed)} failed while a plan was made, so no rank has one. Rank {failed[0]} says: "
            + said.decode(errors="ignore")
        )


def _check_facts(facts: Facts, rows: list[list[int]], rank: int) -> None:
    for place, name in enumerate(FACTS):
        seen = [row[1 + NUMBERS + place] for row in rows]
        if len(set(seen)) == 1:
            continue
        camps: dict[int, list[int]] = {}
        for at, value in enumerate(seen):
            camps.setdefault(value, []).append(at)
        mine = facts[name][0] if name in facts else "none"
        raise Disagreement(
            f"the ranks differ in {name}: {' against '.join(map(_ranks, camps.values()))}. Rank {rank} has "
            f"{mine}. {_REMEDY[name]}"
        )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


_REMEDY = {
    "call": "All ranks of a mesh must make the same calls in the same order.",
    "versions": "Install the same on every host.",
    "options": "Call make_plan with the same arguments on every rank.",
    "shapes": "Shards may differ in length only: give every rank the same batch, heads, head dims and dtype.",
    "mask": "Every rank needs the same global mask: the same code, numbers and tensors; what depends on the "
    "rank, or on random numbers not seeded alike, does not belong into it.",
    "placement": "A balancer of your own has to deal the same blocks on every rank, whichever rank that is.",
}

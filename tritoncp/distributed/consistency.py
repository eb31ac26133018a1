"""Consistency checks between ranks: ranks compare facts, and all raise if facts differ.

Every rank makes its plan from its mask; only a few integers are exchanged. Texts are exchanged only after a
difference. If one rank fails, the others are told as in every call (:mod:`.failures`).
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from tritoncp._version import __version__
from tritoncp.core.environment import CHECK
from tritoncp.core.versions import installed_version
from tritoncp.distributed import collectives, failures
from tritoncp.distributed.failures import name_ranks

T = TypeVar("T")
NUMBERS = 2  # integers in a record that may differ between ranks
TEXT = 1024  # bytes of a rank's text, exchanged when ranks differ
CHECKED = CHECK.read()  # in every call
REMEDIES = {  # the facts that ranks compare, in this order, and the remedy for a difference
    "call": "All ranks of a mesh must make the same calls in the same order.",
    "plans": "Pass the same source, target and side on every rank.",
    "versions": "Install the same on every host.",
    "device": "Put the tensors of every rank on the same kind of device.",
    "dtype": "Give every rank tensors of one dtype.",
    "shape": "Shards may differ along dim= only: give every rank the same other sizes, dim= and batch_dim=.",
    "batch": "Shards may differ in length only: give every rank the same batch. (A DistributedSampler deals "
    "out different ones; Lightning adds it, unless Trainer(use_distributed_sampler=False).)",
    "heads": "Shards may differ in length only: give every rank all heads.",
    "head dims": "Shards may differ in length only: give every rank the same head dims.",
    "lengths": "Every rank needs a mask or plan of the same, global sequence.",
    "options": "Call make_plan with the same arguments on every rank.",
    "scale": "Pass the same scale on every rank.",
    "kernel_options": "Pass the same kernel_options on every rank.",
    "returns": "Pass the same return_lse and return_aux on every rank.",
    "sinks": "Pass sinks on every rank, or on none.",
    "score_mod": "Every rank needs the same score_mod: the same code, and captures of the same types.",
    "expand": "Every rank needs the same function in expand=, and parameters of the same shapes.",
    "captures": "Captures of a score_mod are replicated: pass the same numbers and tensors on every rank.",
    "mask": "Every rank needs the same global mask: the same code, numbers and tensors; what depends on the "
    "rank, or on random numbers not seeded alike, does not belong into it.",
    "placement": "A balancer has to assign the same blocks on every rank.",
}

Text = str | Callable[[], str]
Compared = Mapping[str, tuple[Text, bytes]]  # name: (text for messages, bytes that are compared)


class Disagreement(RuntimeError):
    """The ranks of a group were called with different facts. All ranks raise it."""

    is_shared = True  # see :func:`tritoncp.distributed.failures.stop`


def together(
    group: Any,
    purpose: str,
    work: Callable[[], tuple[T, Compared, Sequence[int]]],
) -> tuple[T, list[list[int]]]:
    """Run work() on every rank of the group and compare the facts it returns. Returns the result of work(),
    and the numbers of all ranks.

    purpose: the call, for messages. work: returns a result, facts that must be equal on all ranks, and up to
        NUMBERS integers that may differ.
    All ranks raise Disagreement if facts differ, and PeerLost if a rank is missing or its work() raised. A
    group of None is this process alone.
    """
    result, facts, numbers = work()
    if group is None:
        return result, [list(numbers)]
    call = f"call {failures.record_of(group).calls + 1}"
    text, content = facts.get("call", fact(purpose))
    facts = {**facts, "call": fact(f"{call}: {_read(text)}", content + call.encode())}
    rows = collectives.exchange(_record(facts, numbers), group, purpose)
    _check_facts(facts, rows, group, purpose)
    return result, [row[: len(numbers)] for row in rows]


def can_compare(group: Any) -> bool:
    """Return whether a call can compare ranks: there are several, and no CUDA graph is captured, during which
    the host cannot wait."""
    is_capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return group is not None and group.size() > 1 and not is_capturing


def compare_kind(group: Any, kind: str) -> None:
    """Compare the kind and number of a call without other facts, under TRITONCP_CHECK=1."""
    if CHECKED and can_compare(group):
        together(group, kind, lambda: (None, {"call": fact(kind)}, ()))


def fact(text: Text, content: bytes | None = None) -> tuple[Text, bytes]:
    """Make a fact: its text for messages, read only when needed, and the bytes that are compared, by default
    the encoded text."""
    return text, _read(text).encode() if content is None else content


def versions() -> tuple[Text, bytes]:
    """Return the fact about versions of this package, torch, triton and Python, and the GPU model."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return fact(
        f"tritoncp {__version__}, torch {torch.__version__}, "
        f"triton {installed_version('triton')}, Python {platform.python_version()}, {device}"
    )


def _read(text: Text) -> str:
    """Return a fact's text, computed now if it is a function."""
    return text if isinstance(text, str) else text()


def _record(facts: Compared, numbers: Sequence[int]) -> list[int]:
    """Encode one rank's row: its numbers, and digests of its facts. It has one length for all purposes, so
    that ranks that make different calls meet in one exchange and report it."""
    digests = [digest_word(facts[name][1]) if name in facts else 0 for name in REMEDIES]
    return [*numbers, *[0] * (NUMBERS - len(numbers)), *digests]


def digest_word(content: bytes) -> int:
    """Return the first 64 bits of the SHA-256 of some bytes, as a signed integer."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little", signed=True)


def _check_facts(facts: Compared, rows: list[list[int]], group: Any, purpose: str) -> None:
    """Raise Disagreement with the values of each rank if a fact differs."""
    columns = {name: [row[NUMBERS + at] for row in rows] for at, name in enumerate(REMEDIES)}
    differing = [name for name, values in columns.items() if len(set(values)) > 1]
    if not differing:
        return
    name = differing[0]
    ranks_by_digest: dict[int, list[int]] = {}
    for rank, digest in enumerate(columns[name]):
        ranks_by_digest.setdefault(digest, []).append(rank)
    own = _read(facts[name][0]) if name in facts else "none"
    parts = collectives.exchange_bytes(own.encode(), TEXT, group, purpose)
    texts = [part.rstrip(b"\0").decode(errors="ignore") for part in parts]
    descriptions = {digest: texts[ranks[0]] for digest, ranks in ranks_by_digest.items()}
    if len(set(descriptions.values())) < len(descriptions):  # different digests may have the same text
        descriptions = {digest: f"{text} (digest {digest & 0xFFFFFFFF:08x})"
                        for digest, text in descriptions.items()}  # fmt: skip
    values = ". ".join(
        f"{name_ranks(ranks).capitalize()} {'have' if len(ranks) > 1 else 'has'} {descriptions[digest]}"
        for digest, ranks in ranks_by_digest.items()
    )
    also = f" They differ in {', '.join(differing[1:])} too." if name != "call" and differing[1:] else ""
    text = (
        f"the ranks differ in {name}: {' against '.join(map(name_ranks, ranks_by_digest.values()))} "
        f"({purpose}). {values}.{also} {REMEDIES[name]}"
    )
    if name == "call":  # later calls of the ranks would not match either
        failures.close(group, failures.record_of(group), text)
    raise Disagreement(text)

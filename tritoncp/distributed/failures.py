"""Errors of calls on one rank: they close the group for that rank, and tell the other ranks which rank failed
and why.

All ranks of a group start the same messages in the same order. A rank whose call raised starts no further
message; otherwise its next call could meet the current call of another rank. It appends an entry to a log in
the group's store: its rank, the call, the first line of the error, and how many messages it has started. A
rank that waits longer than a second reads the log. If another rank stopped after fewer messages, it waits in
vain, and raises.

If all ranks stopped after the same number of messages, the next call opens the group again.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.checkpoint import _StopRecomputationError

from tritoncp.core.bounded_cache import OwnedState
from tritoncp.core.log_lines import area_logger

SLICE = 1.0  # seconds of a wait before the log is read
AGREEMENT = 5.0  # seconds within which all ranks fail if they fail for one reason
STORE_TIMEOUT = 2.0  # seconds to wait for a store's answer
MAX_LINE = 500  # characters of an error
FAILED, CLOSED, WAITED = "failed", "closed", "waited"
REMEDY = "End the job, or make a new group on all ranks (torch.distributed.new_group) and pass that"
log = area_logger("ranks")


class GroupClosed(RuntimeError):
    """Raised by calls on a group after a call on it failed. absent: the ranks that failed, if the log names
    them."""

    def __init__(self, message: str, absent: Sequence[int] = ()):
        super().__init__(message)
        self.absent = tuple(absent)


class PeerLost(GroupClosed):
    """Raised by the wait for a message that cannot arrive: a call of another rank failed, a message failed,
    or the group's timeout has passed."""


class LogEntry(NamedTuple):
    """An entry of a group's log.

    messages: number of messages that the rank had started
    kind:     FAILED: a call of the rank raised, perhaps on all ranks; CLOSED: the rank makes no further
              calls; WAITED: a message did not arrive, and the rank makes no further calls
    """

    rank: int
    messages: int
    kind: str
    text: str


@dataclass(slots=True)
class Record:
    """One rank's record of a group.

    messages: number of messages that this rank has started
    calls:    number of calls that have ended
    stopped:  the failure of the last call; "" if there was none
    closed:   the error that all further calls raise; "" while all ranks may have failed for one reason
    entries:  entries of the group's log that this rank has read
    has_store: False after the store did not answer; the rank that hosts it may have died
    control:  the control communicator on the host, a ProcessGroupGloo, once it is made
    """

    messages: int = 0
    calls: int = 0
    stopped: str = ""
    closed: str = ""
    entries: list[LogEntry] = field(default_factory=list)
    has_store: bool = True
    control: Any = None

    def stops(self, size: int) -> list[LogEntry]:
        """List the entries of ranks that stopped, without failures that all ranks had in common."""
        ranks: dict[int, set[int]] = {}
        for entry in self.entries:
            if entry.kind == FAILED:
                ranks.setdefault(entry.messages, set()).add(entry.rank)
        return [x for x in self.entries if x.kind != FAILED or len(ranks[x.messages]) < size]


_RECORDS = OwnedState(Record)  # by group


def record_of(group: Any) -> Record:
    """Return this rank's record of a group. Raises GroupClosed after a failed call, unless all ranks failed
    at the same message."""
    record = _RECORDS.of(group)
    if record.stopped:
        _reopen(group, record)
    return record


@contextmanager
def closing(group: Any) -> Iterator[None]:
    """Close the group if the ``with`` block raises."""
    try:
        yield
    except BaseException as error:
        stop(group, error)
        raise


def stop(group: Any, error: BaseException) -> None:
    """Close a group after a call raised ``error`` on this rank, unless all ranks fail at the same message;
    tell the other ranks. Two errors close nothing: one that all ranks raise together (its attribute
    ``is_shared``), and the exception by which torch's checkpoint ends a recomputation early."""
    if group is None or not _has_others(group):
        return
    record = _RECORDS.of(group)
    if record.closed or getattr(error, "is_shared", False) or isinstance(error, _StopRecomputationError):
        return
    if record.stopped and getattr(error, "stopped_at", None) == record.messages:
        return  # an inner call has appended it
    if record.stopped:
        try:
            _reopen(group, record)
        except GroupClosed:
            return
    line = (f"{type(error).__name__}: {error}".splitlines() or [""])[0][:MAX_LINE]
    record.stopped = f"call {record.calls + 1} of rank {group.rank()} failed: {line}"
    error.stopped_at = record.messages  # type: ignore[attr-defined]
    log.error("%s; group %r is closed, unless all ranks failed", record.stopped, group.group_name)
    _append(group, LogEntry(group.rank(), record.messages, FAILED, record.stopped))


def _has_others(group: Any) -> bool:
    """Return whether a group exists and has other ranks. (With torch's "fake" backend it has none.)"""
    return (
        group in dist.distributed_c10d._world.pg_map
        and group.size() > 1
        and dist.get_backend(group) != "fake"
    )


def close(group: Any, record: Record, text: str, kind: str = CLOSED) -> None:
    """Close a group for this process: every further call raises GroupClosed."""
    record.stopped = record.stopped or text
    record.closed = (
        f"group {group.group_name!r} is closed in this process: {text}. A further call could meet an older "
        f"one of another rank. {REMEDY}"
    )
    _append(group, LogEntry(group.rank(), record.messages, kind, text))


def _reopen(group: Any, record: Record) -> None:
    """Open a group again if all ranks failed after the same number of messages, else raise GroupClosed."""
    deadline = time.monotonic() + AGREEMENT
    while not record.closed:
        _read(group, record)
        stops = record.stops(group.size())
        own = LogEntry(group.rank(), record.messages, FAILED, record.stopped)
        if own in record.entries and own not in stops:
            record.messages += 1  # so that all later failures are newer than this one
            record.stopped = ""
            return
        if (
            time.monotonic() > deadline
            or not record.has_store
            or any(x.kind != FAILED or x.messages != record.messages for x in stops)
        ):
            close(group, record, record.stopped)
        else:
            time.sleep(0.02)
    raise GroupClosed(record.closed)


class AwaitedMessage(NamedTuple):
    """A message that a rank waits for.

    number:  number of the message among those that this rank has started in the group
    channel: "exchange" or "tensors"; ranks that make the same calls have equal channels for each number
    purpose: describes it for errors
    """

    number: int
    channel: str
    purpose: Callable[[], str]


def timeout(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of a group, which its companions share."""
    kind = "cuda" if "nccl" in dist.get_backend(group) else "cpu"
    return group._get_backend(torch.device(kind)).options._timeout


def wait(work: Any, group: Any, record: Record, describe: Callable[[], AwaitedMessage]) -> None:
    """Wait for a message between hosts, and read the log from time to time. Raises PeerLost.

    ``is_completed`` is not called: it keeps the GIL while it waits for a lock that gloo's thread holds, which
    under a profiler waits for the GIL.
    """
    start = time.monotonic()
    while True:
        slice_start = time.monotonic()
        try:
            work.wait(timedelta(seconds=SLICE))
            return
        except RuntimeError as caught:
            error = caught
        now = time.monotonic()
        if now - slice_start < SLICE:  # the message itself failed
            raise peer_lost(group, record, describe(), error) from error
        check(group, record, describe(), now - start, error)


def check(group: Any, record: Record, message: AwaitedMessage, waited: float, error: object) -> None:
    """Raise PeerLost if the message for which this rank has waited ``waited`` seconds cannot arrive."""
    if not _read(group, record):
        raise peer_lost(group, record, message, "the store of the group has lost its host")
    for stop in record.stops(group.size()):
        if stop.rank != group.rank() and stop.messages < message.number:
            raise peer_lost(group, record, message, error)
    other = _other_wait(group, message)
    if other is not None:
        here = f"rank {group.rank()} waited at {message.purpose()}"
        text = f"ranks made different calls: {here}, {other}"
        record.messages = message.number - 1  # this rank will not take part in the other ranks' message
        close(group, record, text)
        raise PeerLost(f"{text}. All ranks of a mesh must make the same calls in the same order. {REMEDY}")
    if waited >= timeout(group).total_seconds():
        raise peer_lost(group, record, message, error)


def _other_wait(group: Any, message: AwaitedMessage) -> str | None:
    """Compare a message with the message of the same number that the first rank waited for. Returns the text
    of that one if its channel differs."""
    answers: list[str] = []
    own = json.dumps([message.channel, f"rank {group.rank()} at {message.purpose()}"])

    def compare(store: dist.Store) -> None:
        answers.append(store.compare_set(f"wait {message.number}", "", own).decode())

    _ask_store(group, compare)
    channel, text = json.loads((answers or [own])[0])
    return None if channel == message.channel else text


def peer_lost(group: Any, record: Record, message: AwaitedMessage, error: object) -> PeerLost:
    """Close the group, since a message cannot arrive, and return the error. It names the rank that failed
    first; without one, the ranks that did not log that they wait."""
    own, size, purpose = group.rank(), group.size(), message.purpose()
    close(group, record, f"call {record.calls + 1} of rank {own} waited in vain at {purpose}", WAITED)
    deadline = time.monotonic() + 2 * SLICE
    while True:
        _read(group, record)
        stops = [x for x in record.stops(size) if x.rank != own]
        roots = [x for kind in (FAILED, CLOSED) for x in stops if x.kind == kind]
        heard = {x.rank for x in stops} | {own}
        if roots or len(heard) == size or time.monotonic() > deadline or not record.has_store:
            break
        time.sleep(0.05)
    here, seconds = f"rank {own} of {size} was at {purpose}", f"{timeout(group).total_seconds():g} s"
    absent = [rank for rank in range(size) if rank not in heard]
    if roots:
        why, absent = roots[0].text, [roots[0].rank]
        record.closed = record.closed.replace(record.stopped, why)
    elif not record.has_store:
        why = (
            "the group's store does not answer, so that nothing is known of the others: the rank or the host "
            f"that keeps it (rank 0, or torchrun) has probably died. Look at its output first ({error})"
        )
        absent = []
    elif absent:
        why = (
            f"{name_ranks(absent)} did not come within {seconds} or ended the connection: died, stalled or "
            f"made another call. Look at the output of those ranks first ({error})"
        )
    else:
        causes = "; ".join([stop.text for stop in stops[:8]])
        why = f"the message did not end within {seconds} ({error}), nor did those of the others: {causes}"
    return PeerLost(f"{here}, and {why}. {REMEDY}", absent)


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks, at most eight of them.

    >>> name_ranks([3]), name_ranks(range(8)), name_ranks(range(9))
    ('rank 3', 'ranks 0, 1, 2, 3, 4, 5, 6, 7', 'ranks 0, 1, 2, 3, 4, 5, 6, 7, ...')
    """
    text = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {text}"


def _append(group: Any, entry: LogEntry) -> None:
    """Append an entry to the group's log."""

    def write(store: dist.Store) -> None:
        store.set(f"entry {store.add('entries', 1)}", json.dumps(entry))

    _ask_store(group, write)


def _read(group: Any, record: Record) -> bool:
    """Read new entries of the group's log. Returns False if the host of the store is lost."""

    def read(store: dist.Store) -> None:
        while store.check([key := f"entry {len(record.entries) + 1}"]):
            record.entries.append(LogEntry(*json.loads(store.get(key))))

    return _ask_store(group, read)


def _ask_store(group: Any, work: Callable[[dist.Store], None]) -> bool:
    """Call a function with the group's store, and bound the time it takes. A store that fails or does not
    answer is not used again. Returns False if it failed."""
    record = _RECORDS.of(group)
    if not record.has_store:
        return True
    answers: list[bool] = []

    def run() -> None:
        try:
            work(dist.PrefixStore("tritoncp failures", group.get_group_store()))
            answers.append(True)
        except RuntimeError as error:
            answers.append(False)
            log.warning("the store of group %r failed: %s", group.group_name, str(error).splitlines()[0])

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(STORE_TIMEOUT)
    record.has_store = answers == [True]
    return answers != [False]

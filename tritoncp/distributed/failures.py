"""Calls that raise on one rank: they close the group for that rank, and the other ranks learn who and why.

All ranks of a group start the same messages in the same order. A rank whose call raised starts no further
message, so that no later call of it can meet an older one of another rank. It appends an entry to a log in
the group's store: its rank, the call, the first line of the error, and how many messages it has started. A
rank that waits longer than a second reads the log: after an entry with fewer messages than its own it waits
in vain, and raises.

Ranks that all stopped after equally many messages are in step: the next call opens the group again.
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

import torch.distributed as dist

from tritoncp.core.bounded_cache import OwnedState
from tritoncp.core.log_lines import area_logger

SLICE = 1.0  # seconds of a wait before the log is read
AGREEMENT = 5.0  # seconds in which all ranks fail, if they fail alike
PATIENCE = 5.0  # seconds to wait for a rank for which another group was closed
STORE_TIMEOUT = 2.0  # seconds to wait for a store's answer
MAX_LINE = 500  # characters of an error
FAILED, CLOSED, ELSEWHERE = "failed", "closed", "elsewhere"
REMEDY = "End the job, or make a new group on all ranks (torch.distributed.new_group) and pass that"
log = area_logger("ranks")


class GroupClosed(RuntimeError):
    """Raised by calls on a group after a call on it failed. absent: the ranks that are the cause, where they
    are known."""

    def __init__(self, message: str, absent: Sequence[int] = ()):
        super().__init__(message)
        self.absent = tuple(absent)


class PeerLost(GroupClosed):
    """Raised where a message between ranks will not come: another rank's call failed, a message failed, or it
    took longer than the group's timeout."""


class Entry(NamedTuple):
    """An entry of a group's log.

    messages: that the rank had started
    kind:     FAILED: a call of the rank raised; CLOSED: the rank will not come back, for example as it
              heard of a failure; ELSEWHERE: another group was closed for the rank
    """

    rank: int
    messages: int
    kind: str
    text: str


@dataclass(slots=True)
class Record:
    """One rank's record of a group.

    messages: that this rank has started
    calls:    that have ended
    arrived:  messages after which all ranks had come, at the end of the last call
    stopped:  the failure of the last call; "" where calls may go on
    closed:   the error of all further calls; "" while all ranks may have failed alike
    """

    messages: int = 0
    calls: int = 0
    arrived: int = 0
    stopped: str = ""
    closed: str = ""
    entries: list[Entry] = field(default_factory=list)
    reader: threading.Thread | None = None

    def end_call(self) -> None:
        self.calls += 1
        self.arrived = self.messages

    def stops(self, size: int) -> list[Entry]:
        """List the entries of ranks that stopped, without those where all ranks stopped alike."""
        ranks: dict[int, set[int]] = {}
        for entry in self.entries:
            if entry.kind == FAILED:
                ranks.setdefault(entry.messages, set()).add(entry.rank)
        return [x for x in self.entries if x.kind != FAILED or len(ranks[x.messages]) < size]


_RECORDS = OwnedState(Record)  # by group


def record_of(group: Any) -> Record:
    """Return this rank's record of a group. Raises GroupClosed after a call that failed, unless all ranks
    failed alike."""
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
    """Close a group, whose call raised ``error`` on this rank, unless all ranks fail alike; tell the other
    ranks. An error that all ranks raise together, as its attribute ``is_shared`` says, closes nothing."""
    if group is None or group.size() == 1 or dist.get_backend(group) == "fake":
        return
    record = _RECORDS.of(group)
    if record.closed or getattr(error, "is_shared", False):
        return
    if record.stopped and getattr(error, "stopped_at", None) == record.messages:
        return  # an inner call has told it
    if record.stopped:
        try:
            _reopen(group, record)
        except GroupClosed:
            return
    line = (f"{type(error).__name__}: {error}".splitlines() or [""])[0][:MAX_LINE]
    record.stopped = f"call {record.calls + 1} of rank {group.rank()} failed: {line}"
    error.stopped_at = record.messages  # type: ignore[attr-defined]
    log.error("%s; group %r is closed, unless all ranks failed", record.stopped, group.group_name)
    _append(group, Entry(group.rank(), record.messages, FAILED, record.stopped))


def close(group: Any, record: Record, text: str) -> None:
    """Close a group for this process: every further call raises GroupClosed. Ranks of its other groups
    learn of it, which may wait for this rank."""
    record.stopped = record.stopped or text
    record.closed = (
        f"group {group.group_name!r} is closed in this process: {text}. A further call could meet an older "
        f"one of another rank. {REMEDY}"
    )
    _append(group, Entry(group.rank(), record.messages, CLOSED, text))
    for other, its in _RECORDS.items():
        if other is not group and its.messages and not its.stopped and other.size() > 1:
            _append(other, Entry(other.rank(), its.messages, ELSEWHERE, f"in another group, {text}"))


def _reopen(group: Any, record: Record) -> None:
    """Open a group again if all ranks failed after equally many messages, else raise GroupClosed."""
    deadline = time.monotonic() + AGREEMENT
    while not record.closed:
        _read(group, record)
        stops = record.stops(group.size())
        own = Entry(group.rank(), record.messages, FAILED, record.stopped)
        if own in record.entries and own not in stops:
            record.messages += 1  # so that this failure is older than all to come
            record.stopped = ""
            return
        if time.monotonic() > deadline or any(
            x.kind == CLOSED or (x.kind == FAILED and x.messages != record.messages) for x in stops
        ):
            close(group, record, record.stopped)
        else:
            time.sleep(0.02)
    raise GroupClosed(record.closed)


def wait(
    work: Any, group: Any, record: Record, purpose: Callable[[], str], timeout: Callable[[Any], timedelta]
) -> None:
    """Wait for a message between hosts, in slices, between which the log is read. Raises PeerLost."""
    start, error = time.monotonic(), None
    while True:
        is_done = work.is_completed()
        try:
            work.wait(timedelta(seconds=SLICE))
            return
        except RuntimeError as caught:
            error = caught
        if is_done:  # the error is the message's own
            raise peer_lost(group, record, purpose(), timeout(group), error) from error
        check(group, record, purpose(), timeout(group), time.monotonic() - start, error)


def check(
    group: Any, record: Record, purpose: str, timeout: timedelta, waited: float, error: object
) -> None:  # fmt: skip
    """Raise PeerLost if this rank, which has waited for ``waited`` seconds, waits in vain."""
    _read(group, record)
    for stop in record.stops(group.size()):
        is_in_vain = stop.rank != group.rank() and stop.messages < record.messages
        if stop.kind == ELSEWHERE:
            is_in_vain = is_in_vain and stop.messages >= record.arrived and waited >= PATIENCE
        if is_in_vain:
            raise peer_lost(group, record, purpose, timeout, error)
    if waited >= timeout.total_seconds():
        raise peer_lost(group, record, purpose, timeout, error)


def peer_lost(group: Any, record: Record, purpose: str, timeout: timedelta, error: object) -> PeerLost:
    """Close the group, as a message will not come, and return the error. It names the rank that failed first,
    else those from which nothing is heard while the others report that they wait."""
    here = f"rank {group.rank()} of {group.size()} was at {purpose}"
    close(group, record, f"call {record.calls + 1} of rank {group.rank()} waited in vain at {purpose}")
    deadline = time.monotonic() + 2 * SLICE
    while True:
        stops = [x for x in record.stops(group.size()) if x.rank != group.rank()]
        roots = [x for x in stops if x.kind == FAILED] or [x for x in stops if x.kind == ELSEWHERE]
        heard = {x.rank for x in stops} | {group.rank()}
        if roots or len(heard) == group.size() or time.monotonic() > deadline:
            break
        time.sleep(0.05)
        _read(group, record)
    if roots:
        record.closed = record.closed.replace(record.stopped, roots[0].text)
        return PeerLost(f"{here}, and {roots[0].text}. {REMEDY}", [roots[0].rank])
    absent = [rank for rank in range(group.size()) if rank not in heard]
    ranks = name_ranks(absent) if absent else "another rank"
    return PeerLost(
        f"{here}, and {ranks} did not come within {timeout.total_seconds():g} s or ended the connection: it "
        f"died, stalled or made another call. Look at the output of those ranks first. {REMEDY}. ({error})",
        absent,
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks, at most eight of them: "ranks 0, 2"."""
    text = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {text}"


def _store(group: Any) -> dist.Store:
    return dist.PrefixStore("tritoncp failures", group.get_group_store())


def _append(group: Any, entry: Entry) -> None:
    """Append an entry to the group's log. A store that does not answer, as its host may be the rank that
    died, is passed over."""

    def write() -> None:
        store = _store(group)
        store.set(f"entry {store.add('entries', 1)}", json.dumps(entry))

    _in_time(write)


def _read(group: Any, record: Record) -> None:
    """Read new entries of the group's log. A store that does not answer is not asked again."""

    def read() -> None:
        store = _store(group)
        while store.check([key := f"entry {len(record.entries) + 1}"]):
            record.entries.append(Entry(*json.loads(store.get(key))))

    if record.reader is None:
        record.reader = _in_time(read)


def _in_time(work: Callable[[], None]) -> threading.Thread | None:
    """Run a function on a store, whose reads have no timeout. Returns its thread if that goes on."""

    def run() -> None:
        try:
            work()
        except RuntimeError as error:
            log.warning("the store of a process group failed: %s", error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(STORE_TIMEOUT)
    return thread if thread.is_alive() else None

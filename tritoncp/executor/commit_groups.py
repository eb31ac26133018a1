"""Asynchronous operations with commit groups and waits: cp.async, wgmma, TMA stores, tensor memory."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class CommitGroups:
    """The commit groups of all lanes. pending: for each operation in progress, the lanes that issued it, the
    groups of the lanes, and the unit's notes for each lane"""

    def __init__(self, count: int) -> None:
        self.commits = np.zeros(count, np.int64)
        self.pending: list[list[Array]] = []

    def add(self, lanes: Array, *notes: Array) -> None:
        self.pending.append([lanes, self.commits[lanes], *notes])

    def commit(self, lanes: Array) -> None:
        self.commits[lanes] += 1

    def wait(self, lanes: Array, left: int) -> list[list[Array]]:
        """Remove all but the `left` newest groups of some lanes; return lanes and notes of their
        operations."""
        if not self.pending:
            return []
        active = np.zeros(len(self.commits), bool)
        active[lanes] = True
        complete, under_way = [], []
        for operation in self.pending:
            issuer, group, *notes = operation
            done = active[issuer] & (group < self.commits[issuer] - left)
            if done.any():
                complete.append([x[done] for x in (issuer, *notes)])
            if not done.all():
                under_way.append([x[~done] for x in operation])
        self.pending = under_way
        return complete

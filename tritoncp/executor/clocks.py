"""Vector clocks for race detection: the happens-before order of accesses by warps and asynchronous units.

An agent is a warp, the tensor core (tcgen05), the engine of TMA loads or of TMA stores, or the products of a
warpgroup (wgmma). A tag `clock << 6 | agent` stands for the accesses of an agent up to a release. They happen
before later accesses of a warp if the warp's row of the matrix has that clock, from a barrier, an mbarrier or
a wait. All clocks of a CTA count the same events, so that tags below one number, the floor, happen before the
accesses of all warps.

A second matrix has the clocks of writes that a `fence.proxy.async` made visible to the asynchronous proxy.
The fence may be by the writer, or by any warp after the write: PTX's memory model requires one between the
write and its use.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
SHIFT, AGENTS = 6, 63  # number of bits, and mask, of the agent in a tag


class Clocks:
    """The vector clocks of some CTAs: `knows` and `fenced` [cta, warp, agent] are the two parts of `rows`."""

    def __init__(self, ctas: int, warps: int) -> None:
        self.warps = warps
        self.tensor, self.copy, self.bulk = warps, warps + 1, warps + 2
        self.group = warps + 3  # first of the warpgroups' agents
        self.groups = -(-warps // 4)
        # Parts of products: each warp waits for its part; a product is done when all four parts are
        self.part = self.group + self.groups
        agents = self.part + 4 * self.groups
        self.rows = np.zeros((ctas, warps, 2, agents), np.int32)
        self.knows, self.fenced = self.rows[:, :, 0], self.rows[:, :, 1]
        own = np.arange(warps)
        self.knows[:, own, own] = 1
        self.last = np.zeros((ctas, agents), np.int32)  # clock of an agent's current accesses
        self.last[:, :warps] = 1
        self.now = np.ones(ctas, np.int32)
        self.floor = np.full(ctas, AGENTS, np.int32)  # as a tag
        self.version = 0

    def current_tags(self, cta: Array, warp: Array) -> Array:
        return (self.last[cta, warp] << SHIFT) | warp.astype(np.int32)

    def lower_floor(self, ctas: Any = slice(None)) -> None:
        """Recompute the floor, after rows changed: the newest clock that all warps have for all agents."""
        knows = self.knows[ctas]
        parts = knows[..., self.part :].reshape(*knows.shape[:-1], self.groups, 4)
        knows[..., self.group : self.part] = parts.min(-1)
        self.knows[ctas] = knows
        now = self.now[ctas][..., None, None]
        floor = np.where(knows >= self.last[ctas][..., None, :], now, knows).min((-1, -2))
        self.floor[ctas] = (floor << SHIFT) | AGENTS
        self.version += 1

    def meet(self, ctas: Array, present: Array) -> None:
        """Join the rows of warps that meet at a barrier. present: bool [ctas, warps]"""
        rows, at_barrier = self.rows[ctas], present[:, :, None, None]
        joined = np.where(at_barrier, rows, 0).max(1)
        self.rows[ctas] = np.where(at_barrier, joined[:, None], rows)
        c, w = np.nonzero(present)
        self.begin(ctas[c], w)
        self.lower_floor(ctas)

    def begin(self, cta: Array, warp: Array) -> None:
        """Start a new clock for later accesses of these warps."""
        self.now[np.unique(cta)] += 1
        self.last[cta, warp] = self.knows[cta, warp, warp] = self.now[cta]
        self.version += 1

    def fence(self, cta: Array, warp: Array, whole: Array) -> None:
        """`fence.proxy.async` of warps. By a part of a warp, it does not cover the warp's present
        accesses."""
        own = self.knows[cta, warp, warp] - ~whole
        fenced = np.maximum(self.fenced[cta, warp], self.knows[cta, warp])
        fenced[np.arange(len(warp)), warp] = np.maximum(self.fenced[cta, warp, warp], own)
        self.fenced[cta, warp] = fenced
        self.begin(cta, warp)

    def release(self, cta: int, warp: int) -> Array:
        """Return a copy of a warp's rows, for warps that wait for its arrival; later accesses get a new
        clock."""
        rows = self.rows[cta, warp].copy()
        self.begin(np.full(1, cta), np.full(1, warp))
        return rows

    def acquire(self, cta: int, warps: Array, rows: Array) -> None:
        self.rows[cta, warps] = np.maximum(self.rows[cta, warps], rows)
        self.lower_floor(cta)

    def start(self, cta: Array | int, agent: Array | int) -> Array:
        """Start and return a new clock for the next accesses of an asynchronous unit."""
        self.now[cta] += 1
        self.last[cta, agent] = self.now[cta]
        self.lower_floor(cta)
        return self.now[cta].copy()

    def learn(self, cta: int, warps: Array, agent: int, clock: int) -> None:
        """Record that warps have waited for a unit up to a clock."""
        self.knows[cta, warps, agent] = np.maximum(self.knows[cta, warps, agent], clock)
        self.lower_floor(cta)

    def unordered(self, tags: Array, cta: Array, warp: Array, own: int | None = None) -> Array | None:
        """Return which tags [n, k] do not happen before the current accesses of a warp; None if all do.

        own: an agent for which the warp acts; its accesses are ordered
        """
        late = tags > self.floor[cta][:, None]
        if not late.any():
            return None
        agent = tags & AGENTS
        late &= agent != warp[:, None]
        if own is not None:
            late &= agent != own
        i, j = np.nonzero(late)
        if len(i):
            late[i, j] = self.knows[cta[i], warp[i], agent[i, j]] < tags[i, j] >> SHIFT
        return late if late.any() else None

    def unfenced(self, tags: Array, cta: Array, warp: Array) -> Array:
        """Return for which writes, by tags [n, k], there is no fence before the current accesses of a
        warp."""
        return self.fenced[cta[:, None], warp[:, None], tags & AGENTS] < tags >> SHIFT

    def agent_name(self, tag: int) -> str:
        agent = tag & AGENTS
        if agent < self.warps:
            return f"warp {agent}"
        names = {self.tensor: "tcgen05.mma", self.copy: "a TMA load", self.bulk: "a TMA store"}
        return names.get(agent, f"wgmma of warpgroup {agent - self.group}")

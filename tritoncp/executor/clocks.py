"""Vector clocks: which accesses of one warp, or of one asynchronous unit, come before those of another.

An agent is a warp, the tensor core (tcgen05), the engine of TMA loads, that of TMA stores, or the products of
a warpgroup (wgmma). A tag `clock << 6 | agent` names what an agent did up to a release; a warp knows of it
once its row of the matrix has that clock, by a barrier, an mbarrier or a wait. All clocks of a CTA count the
same events, so that one number, the floor, tells that a tag is known to all.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
SHIFT, AGENTS = 6, 63  # bits of the agent in a tag


class Clocks:
    """The clocks of a number of CTAs, `knows[cta, warp, agent]`."""

    def __init__(self, ctas: int, warps: int) -> None:
        self.warps = warps
        self.tensor, self.copy, self.bulk = warps, warps + 1, warps + 2
        self.group = warps + 3  # and those after it, one a warpgroup
        self.groups = -(-warps // 4)
        # Parts of products that a warp waits for itself; a product is done when all its four parts are
        self.part = self.group + self.groups
        agents = self.part + 4 * self.groups
        self.knows = np.zeros((ctas, warps, agents), np.int32)
        own = np.arange(warps)
        self.knows[:, own, own] = 1
        self.last = np.zeros((ctas, agents), np.int32)  # clock of what an agent does now
        self.last[:, :warps] = 1
        self.now = np.ones(ctas, np.int32)
        self.floor = np.full(ctas, AGENTS, np.int32)  # as a tag
        self.version = 0

    def own_tags(self, cta: Array, warp: Array) -> Array:
        return (self.last[cta, warp] << SHIFT) | warp.astype(np.int32)

    def lower_floor(self, ctas: Any = slice(None)) -> None:
        """Find the newest clock that every warp knows of every agent. Called when rows change."""
        knows = self.knows[ctas]
        parts = knows[..., self.part :].reshape(*knows.shape[:-1], self.groups, 4)
        knows[..., self.group : self.part] = parts.min(-1)
        self.knows[ctas] = knows
        now = self.now[ctas][..., None, None]
        known = np.where(knows >= self.last[ctas][..., None, :], now, knows).min((-1, -2))
        self.floor[ctas] = (known << SHIFT) | AGENTS
        self.version += 1

    def meet(self, ctas: Array, present: Array) -> None:
        """Warps at a barrier know of the same events; `present` [ctas, warps]."""
        rows = self.knows[ctas]
        joined = np.where(present[:, :, None], rows, 0).max(1)
        rows = np.where(present[:, :, None], joined[:, None], rows)
        self.now[ctas] += 1
        c, w = np.nonzero(present)
        now = self.now[ctas][c]
        rows[c, w, w] = now
        self.knows[ctas] = rows
        self.last[ctas[c], w] = now
        self.lower_floor(ctas)

    def release(self, cta: int, warp: int) -> Array:
        """Copy a warp's clock for the warps that wait for its arrival; later accesses are not in it."""
        row = self.knows[cta, warp].copy()
        self.now[cta] += 1
        self.knows[cta, warp, warp] = self.last[cta, warp] = self.now[cta]
        self.version += 1
        return row

    def acquire(self, cta: int, warps: Array, row: Array) -> None:
        self.knows[cta, warps] = np.maximum(self.knows[cta, warps], row)
        self.lower_floor(cta)

    def start(self, cta: Array | int, agent: Array | int) -> Array:
        """A clock for what an asynchronous unit does next."""
        self.now[cta] += 1
        self.last[cta, agent] = self.now[cta]
        self.lower_floor(cta)
        return self.now[cta].copy()

    def learn(self, cta: int, warps: Array, agent: int, clock: int) -> None:
        """Warps have waited for a unit."""
        self.knows[cta, warps, agent] = np.maximum(self.knows[cta, warps, agent], clock)
        self.lower_floor(cta)

    def unordered(self, tags: Array, cta: Array, warp: Array, own: int | None = None) -> Array | None:
        """Where tags [n, k] name accesses that do not come before what a warp does now; None where none does.

        own: an agent on whose behalf the warp acts, which knows of its own work.
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

    def agent_name(self, tag: int) -> str:
        agent = tag & AGENTS
        if agent < self.warps:
            return f"warp {agent}"
        names = {self.tensor: "tcgen05.mma", self.copy: "a TMA load", self.bulk: "a TMA store"}
        return names.get(agent, f"wgmma of warpgroup {agent - self.group}")

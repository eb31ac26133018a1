"""Vector clocks: which accesses of one warp, or of one asynchronous unit, come before those of another.

An agent is a warp, the tensor core (tcgen05), the engine of TMA loads, that of TMA stores, or the products of
a warpgroup (wgmma). A tag `clock << 6 | agent` names what an agent did up to a release; a warp knows of it
once its row of the matrix has that clock, by a barrier, an mbarrier or a wait. All clocks of a CTA count the
same events, so that one number, the floor, tells that a tag is known to all.

A second matrix has the clocks of writes that a `fence.proxy.async` made visible to the asynchronous proxy.
The fence may be the writer's, or that of any warp which knows of the write: the memory model of PTX asks for
one on the way from the write to its use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tritoncp.executor.threads import Access

Array = np.ndarray[Any, Any]
SHIFT, AGENTS = 6, 63  # bits of the agent in a tag


class Clocks:
    """The clocks of a number of CTAs: `knows` and `fenced` [cta, warp, agent] are the two parts of `rows`."""

    def __init__(self, ctas: int, warps: int) -> None:
        self.warps = warps
        self.tensor, self.copy, self.bulk = warps, warps + 1, warps + 2
        self.group = warps + 3  # and those after it, one a warpgroup
        self.groups = -(-warps // 4)
        # Parts of products that a warp waits for itself; a product is done when all its four parts are
        self.part = self.group + self.groups
        agents = self.part + 4 * self.groups
        self.rows = np.zeros((ctas, warps, 2, agents), np.int32)
        self.knows, self.fenced = self.rows[:, :, 0], self.rows[:, :, 1]
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
        rows, here = self.rows[ctas], present[:, :, None, None]
        joined = np.where(here, rows, 0).max(1)
        self.rows[ctas] = np.where(here, joined[:, None], rows)
        c, w = np.nonzero(present)
        self.begin(ctas[c], w)
        self.lower_floor(ctas)

    def begin(self, cta: Array, warp: Array) -> None:
        """Let what these warps do next have a clock of its own."""
        self.now[np.unique(cta)] += 1
        self.last[cta, warp] = self.knows[cta, warp, warp] = self.now[cta]
        self.version += 1

    def fence(self, cta: Array, warp: Array, whole: Array) -> None:
        """`fence.proxy.async` of warps; a part of a warp does not fence what the warp wrote last."""
        own = self.knows[cta, warp, warp] - ~whole
        fenced = np.maximum(self.fenced[cta, warp], self.knows[cta, warp])
        fenced[np.arange(len(warp)), warp] = np.maximum(self.fenced[cta, warp, warp], own)
        self.fenced[cta, warp] = fenced
        self.begin(cta, warp)

    def release(self, cta: int, warp: int) -> Array:
        """Copy a warp's clock for the warps that wait for its arrival; later accesses are not in it."""
        rows = self.rows[cta, warp].copy()
        self.begin(np.full(1, cta), np.full(1, warp))
        return rows

    def acquire(self, cta: int, warps: Array, rows: Array) -> None:
        self.rows[cta, warps] = np.maximum(self.rows[cta, warps], rows)
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

    def unfenced(self, tags: Array, cta: Array, warp: Array) -> Array:
        """Where tags [n, k] name writes of which no fence lies before what a warp does now."""
        return self.fenced[cta[:, None], warp[:, None], tags & AGENTS] < tags >> SHIFT

    def agent_name(self, tag: int) -> str:
        agent = tag & AGENTS
        if agent < self.warps:
            return f"warp {agent}"
        names = {self.tensor: "tcgen05.mma", self.copy: "a TMA load", self.bulk: "a TMA store"}
        return names.get(agent, f"wgmma of warpgroup {agent - self.group}")


class Shadow:
    """Tags of each cell of a memory: of its last writer, its last reader, and another reader before that."""

    def __init__(self, memory: str, clocks: Clocks, *arrays: Array) -> None:
        self.memory, self.clocks = memory, clocks
        self.writer, self.reader, self.reader2 = arrays

    def shaped(self, *shape: int) -> Shadow:
        """The same cells in another shape."""
        parts = (self.writer, self.reader, self.reader2)
        return Shadow(self.memory, self.clocks, *(x.reshape(shape) for x in parts))

    def check(
        self,
        access: Access,
        cells: Any,
        kind: str,
        writes: bool = False,
        address: Array | None = None,
        own: int | None = None,
        same: Array | None = None,
    ) -> bool:
        """Report threads whose access to cells does not come after the last write of these; where it writes,
        after the last reads too. Whether there are any.

        own:  an agent on whose behalf the threads act
        same: threads that write what the cells hold: no race with another write
        """
        before = [("write", self.writer), ("read", self.reader), ("read", self.reader2)]
        faulty = False
        for what, tags_of in before if writes else before[:1]:
            tags = tags_of[cells].reshape(len(access), -1)
            late = self.clocks.unordered(tags, access.cta, access.warp, own)
            if late is not None and what == "write" and same is not None:
                late &= ~same[:, None]
            if late is None or not late.any():
                continue
            row = int(np.flatnonzero(late.any(1))[0])
            name = self.clocks.agent_name(int(tags[row][late[row]][0]))
            unit = "another warp" if name.startswith("warp") else name.split(" of ")[0]
            text = f"warp {int(access.warp[row])} does not wait for {name}"
            faulty = access.fault(
                f"race on {self.memory} memory: {kind} after the {what} of {unit}", late, address, None, text
            )
            if what == "read":
                break
        return faulty

    def note_reader(self, cells: Any, tag: Array) -> None:
        """Tag cells with their last reader; one of another agent before it stays known as the second one."""
        before = self.reader[cells]
        self.reader[cells] = tag
        now = self.reader[cells]
        for other in (before, tag):  # several agents may read one cell at once
            lost = (other != 0) & ((other ^ now) & AGENTS != 0)
            if not lost.any():
                continue
            at, tags = np.nonzero(lost), np.broadcast_to(other, lost.shape)
            if isinstance(cells, tuple):  # of slices
                self.reader2[cells][at] = tags[at]
            else:  # an index of which cells may come twice
                self.reader2[(cells[at[: cells.ndim]], *at[cells.ndim :])] = tags[at]


def no_accesses(memory: str, clocks: Clocks, cells: int) -> Shadow:
    """The shadow of a memory that nobody accessed."""
    return Shadow(memory, clocks, *(np.zeros(cells, np.int32) for _ in range(3)))

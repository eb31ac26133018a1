"""The shadow of a memory, by which races are found: who wrote and read each cell last."""

from __future__ import annotations

from typing import Any

import numpy as np

from tritoncp.executor.clocks import AGENTS, Array, Clocks
from tritoncp.executor.threads import Access


class Shadow:
    """Shadow of a memory: for each cell the tags of its last writer, its last reader, and a previous reader
    by another agent."""

    def __init__(self, memory: str, clocks: Clocks, *arrays: Array) -> None:
        self.memory, self.clocks = memory, clocks
        self.writer, self.reader, self.reader2 = arrays

    def shaped(self, *shape: int) -> Shadow:
        """Return a view of the same cells in another shape."""
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
        """Report threads whose access does not happen after the last write of their cells, or whose write
        does not happen after the last reads. Return whether there are any.

        own:  an agent for which the threads act
        same: threads that write the cells' current values, which is no race with another write
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
        """Tag cells with their last reader; a previous reader by another agent becomes the second reader."""
        before = self.reader[cells]
        self.reader[cells] = tag
        now = self.reader[cells]
        for other in (before, tag):  # several agents may read a cell in one access
            lost = (other != 0) & ((other ^ now) & AGENTS != 0)
            if not lost.any():
                continue
            at, tags = np.nonzero(lost), np.broadcast_to(other, lost.shape)
            if isinstance(cells, tuple):  # slices
                self.reader2[cells][at] = tags[at]
            else:  # an index, which may repeat cells
                self.reader2[(cells[at[: cells.ndim]], *at[cells.ndim :])] = tags[at]


def no_accesses(memory: str, clocks: Clocks, cells: int) -> Shadow:
    """Return the shadow of a memory that was not accessed yet."""
    return Shadow(memory, clocks, *(np.zeros(cells, np.int32) for _ in range(3)))

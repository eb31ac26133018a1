"""Steps whose sums do not depend on the number of ranks: all keys that a rank reads, in global order.

The last bits of a row depend on its tiles of keys and their order. Here the pieces of a mask block that are
on several ranks are joined, so that every tile begins at the same position for any number of ranks. Full
blocks and masked blocks are visited in one order, by position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tritoncp.core.bounded_cache import computed_once
from tritoncp.core.records import replace
from tritoncp.core.upload import DeviceCopy
from tritoncp.masks.runs.block_runs import ramps
from tritoncp.planning.derived import DerivedTables
from tritoncp.planning.placement import Placement
from tritoncp.planning.plan import Plan

NO_ROW = 1 << 40  # a row past the end of every buffer


@dataclass(frozen=True, eq=False)
class OrderedStep:
    """A step of a rank over rows in global order.

    plan:         the step as a plan of one rank, which has exactly these rows
    q_rows:       for each query of the step, its row among the rank's queries: int64 [Bp, n]; NO_ROW if a
                  batch row has fewer
    kv_rows:      the same for keys, in the buffer of all keys that the rank reads
    """

    plan: Plan
    q_rows: Tensor
    kv_rows: Tensor

    @computed_once
    def _copies(self, device: torch.device) -> DeviceCopy[tuple[Tensor, ...]]:
        return DeviceCopy([self.q_rows, self.kv_rows], device, lambda *rows: rows)

    def rows(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return ``q_rows`` and ``kv_rows`` on a device."""
        return self._copies(device).on_current_stream()


def ordered_step(plan: Plan) -> OrderedStep:
    """Return the step of a plan's rank over its shard and the rows that it fetches. The plan keeps it."""
    key = "ordered", plan.rank, plan.heads, plan.first_row
    step: OrderedStep | None = plan.derived.parts.get(key)
    return plan.derived.parts.put(key, _make(plan)) if step is None else step


def _make(plan: Plan) -> OrderedStep:
    mask = replace(plan.mask, runs=plan.mask.runs.with_full_bounded(), window=None)
    buffer = "held" if plan.world_size > 1 else plan.rank
    slots = plan.q.slots[plan.rank], plan.derived.slots(plan.rank, buffer)
    sides, rows = [], []
    for one, side in zip(slots, (plan.q, plan.kv), strict=True):
        joined, at = join_slots(one, side.block)
        sides.append(Placement(side.length, side.block, (joined,), (at.shape[1],)))
        rows.append(at)
    q, kv = sides
    derived = DerivedTables(mask, q, kv)
    own: Any = replace(plan, mask=mask, q=q, kv=kv, rank=0, derived=derived, handle=None)
    return OrderedStep(own, *rows)


def join_slots(slots: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Join slots [Bp, n, 3] that have adjacent positions in one block into slots of a new buffer, in which
    their rows are adjacent: int32 [Bp, m, 3]. Also return the old row of each new row: int64 [Bp, rows],
    NO_ROW if a batch row has fewer.

    >>> slots = torch.tensor([[[9, 0, 3], [0, 3, 1], [1, 4, 4], [5, 9, 1], [6, 11, 1], [0, 0, 0]]])
    >>> [x.tolist() for x in join_slots(slots, 4)]
    [[[[0, 0, 4], [4, 4, 4], [8, 9, 1], [9, 11, 1]]], [[9, 10, 11, 0, 1, 2, 3, 4, 5, 6]]]
    """
    tables, places = [], []
    for table in slots.long():
        row, position, tokens = table[table[:, 2] > 0].unbind(1)
        opens = torch.ones(len(row), dtype=torch.bool)
        opens[1:] = (position[1:] % block == 0) | (position[1:] > (position + tokens)[:-1])
        first = (tokens.cumsum(0) - tokens)[opens]
        counts = torch.diff(first, append=tokens.sum()[None])
        tables.append(torch.stack([first, position[opens], counts], 1))
        places.append(ramps(row, tokens))
    rows = pad_sequence(places, batch_first=True, padding_value=NO_ROW)
    return pad_sequence(tables, batch_first=True).int(), rows

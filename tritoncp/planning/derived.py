"""Tables derived from a mask and two placements: the keys that each rank sees, sends and receives, and the
tables of each step. They are computed at their first use."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from tritoncp.core.bounded_cache import BoundedCache, computed_once
from tritoncp.core.upload import DeviceCopy
from tritoncp.masks.mask import Mask
from tritoncp.masks.runs.block_runs import Runs, content
from tritoncp.planning.costs import traffic as key_traffic
from tritoncp.planning.parts import needed_chunks
from tritoncp.planning.placement import Placement
from tritoncp.planning.step_tables import Tables, slot_runs, tables_of

T = TypeVar("T")
MAX_PARTS = 64  # max number of plans of parts that are cached with a plan
CHUNK = 1 << 21  # max number of (rank, block) pairs in memory while the table of a large world is made


class PlanCache(Generic[T]):
    """What a module keeps with each plan: one value, which the views of all ranks share. It is made at the
    first use, and freed with the plan's tables.

    >>> from tritoncp import causal, create_block_mask, make_plan
    >>> plan, names = make_plan(create_block_mask(causal(), 1, 1, 64, 64), world_size=2), PlanCache(list)
    >>> names.of(plan.derived).append("ours")
    >>> names.of(plan.for_rank(1).derived)
    ['ours']
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make

    def of(self, tables: DerivedTables) -> T:
        """Return the value of the plan with these tables."""
        value: T | None = tables.caches.get(self)
        return tables.caches.setdefault(self, self._make()) if value is None else value


@dataclass(frozen=True, eq=False)
class DerivedTables:
    """Tables that follow from a mask and the placements of queries and keys, for all ranks. All views of a
    plan share them. They keep one result for each rank, buffer and device.

    A buffer of keys and values is "gathered" (all ranks' shards, ``kv.s_max`` rows each), a rank (its shard),
    "fetched", or "held": a rank's shard, then the rows that it fetches.

    whole: tables of the whole plan, if one fetch serves all of its parts; None: this plan fetches for itself
    """

    mask: Mask
    q: Placement
    kv: Placement
    whole: DerivedTables | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name in ("mask", "q", "kv", "_digest")}

    @cached_property
    def caches(self) -> dict[PlanCache[Any], Any]:
        """Values of :class:`PlanCache`. They are freed with the tables."""
        return {}

    @cached_property
    def parts(self) -> BoundedCache[tuple[Any, ...], Any]:
        """Plans of ranges of batch rows, of chunks of each rank's rows, and between rows of the mesh."""
        return BoundedCache(MAX_PARTS)

    @computed_once
    def digest(self, schedule: str, first_row: int) -> bytes:
        """Digest the blocks and their owners."""
        mask, runs, slots = self.mask, self.mask.runs, (*self.q.slots, *self.kv.slots)
        geometry = mask.q_len, mask.kv_len, mask.q_block, mask.kv_block, first_row
        counts = self.q.lengths, self.kv.lengths, [slot.shape for slot in slots]
        hashed = hashlib.sha256(repr((geometry, schedule, counts)).encode())
        for tensor in (*runs.stored, *(mask.interval or ()), *slots):
            hashed.update(content(tensor))
        return hashed.digest()

    @property
    def _ranks_at_once(self) -> int:
        """Ranks whose tables of key blocks are in memory at a time."""
        return max(1, CHUNK // max(1, self.mask.runs.n_cols))

    @cached_property
    def visible_blocks(self) -> Tensor:
        """KV blocks that each rank's queries see in any head: bool [W, Bn, KV blocks]."""
        chunks = torch.arange(self.q.world_size).split(self._ranks_at_once)
        return torch.cat(
            [key_traffic.count_queries(self.mask, self.q, ranks.tolist()) > 0 for ranks in chunks]
        )

    @cached_property
    def traffic(self) -> Tensor:
        """Number of rank s's keys that rank r's queries see, at [r, s], summed over the batch rows of mask
        and placement: int64 [W, W]. Off the diagonal, these are the rows that rank s sends."""
        parts = self.visible_blocks.split(self._ranks_at_once)
        return torch.cat([key_traffic.sum_by_owner(part, self.kv) for part in parts])

    @cached_property
    def reads_only_own_keys(self) -> bool:
        """Whether no rank's queries see keys of another rank."""
        return self.q.world_size == 1 or int(self.traffic.sum()) == int(self.traffic.trace())

    @cached_property
    def ring_route(self) -> tuple[int, Tensor]:
        """Direction in which K and V are sent around the ring (1 or -1), and the number of hops of each
        rank's K and V."""
        return key_traffic.ring_route(self.traffic > 0)

    @computed_once
    def ring(self, rank: int) -> tuple[key_traffic.Hop, ...]:
        """The steps of a rank in the ring."""
        return key_traffic.ring(self.traffic > 0, rank, self.ring_route)

    @computed_once
    def fetch(self, rank: int) -> key_traffic.Fetch:
        """The rows that a rank sends and receives if each rank fetches exactly the keys that it sees."""
        if self.whole is not None:
            return self.whole.fetch(rank)
        return key_traffic.fetch(self.visible_blocks, self.kv, rank)

    @computed_once
    def needed_chunks(self, count: int, first_row: int) -> Tensor:
        """Return which chunks of keys the queries of each of ``count`` chunks see."""
        return needed_chunks(self.mask, self.q, self.kv, count, first_row)

    @computed_once
    def fetch_rows(self, rank: int, device: torch.device) -> DeviceCopy[Tensor]:
        """Copy ``fetch(rank).rows`` to a device."""
        return DeviceCopy([self.fetch(rank).rows], device, lambda rows: rows)

    @computed_once
    def query_positions(self, rank: int, device: torch.device) -> DeviceCopy[Tensor]:
        """Copy the positions of a rank's queries to a device."""
        return DeviceCopy([self.q.positions(rank)], device, lambda positions: positions)

    @computed_once
    def gathered_slots(self, buffer: int | str) -> Tensor:
        """The slots of a buffer that is equal on all ranks."""
        return self.kv.gathered(None if buffer == "gathered" else [int(buffer)])

    def slots(self, rank: int, buffer: int | str) -> Tensor:
        """The slots of a rank's buffer."""
        if buffer == "held":
            return key_traffic.held_slots(self.kv.slots[rank], self.fetch(rank), self.kv.lengths[rank])
        return self.fetch(rank).slots if buffer == "fetched" else self.gathered_slots(buffer)

    @computed_once
    def runs(self, rank: int, buffer: int | str) -> Runs:
        """The runs of a buffer's slots that each Q slot of a rank sees."""
        return slot_runs(self.mask, self.q.slots[rank], self.slots(rank, buffer))

    @computed_once
    def tables(
        self, rank: int, buffer: int | str, by_intervals: bool, device: torch.device
    ) -> DeviceCopy[Tables]:
        """The tables of a rank's step with a buffer, copied to a device. by_intervals: whether the mask's row
        intervals hold for the call."""
        own = self.q.slots[rank], self.q.positions(rank)
        interval = self.mask.interval if by_intervals else None
        buffered = self.slots(rank, buffer), self.runs(rank, buffer)
        return tables_of(self.mask, *own, *buffered, interval).copy_to(device)

"""Plans: the owner of each block, the order of the steps and the reads of each step.

A plan is made before the first byte moves.  It is frozen, derived from the mask alone, and equal on every
rank but for the rank's own number; it refers to no process group.
"""

import copy
import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tritoncp.core.handles import handle_of
from tritoncp.core.host_copy import on_host
from tritoncp.core.upload import DeviceCopy
from tritoncp.masks.block_runs import Runs, content
from tritoncp.masks.mask import Mask
from tritoncp.planning import cost
from tritoncp.planning import traffic as steps
from tritoncp.planning.balance import Balancer, block_costs, deal, resolve_balancer, views
from tritoncp.planning.placement import Placement, by_blocks, natural, without_padding
from tritoncp.planning.step_tables import Tables, slot_runs, tables_of

if TYPE_CHECKING:
    from PIL import Image

MAX_CACHED_PARTS = 64  # plans of ranges of batch rows that are cached with the whole plan
MAX_CHECKED_CALLS = 1024  # keys of calls whose checks passed
SCHEDULES = ("allgather", "ring", "fetch", "ulysses", "ulysses+ring")


@dataclass(frozen=True, eq=False)
class Plan:
    """One rank's part of one attention layer, made by :func:`tritoncp.make_plan`.

    mask:     the global mask, in runs
    q, kv:    placements of queries and keys
    rank:     the rank whose view this is
    balancer: name of the balancer ("natural" for contiguous pieces in order)
    schedule: name of the schedule that brings K and V to the queries
    reason:   why the schedule was chosen
    degree:   ranks that exchange heads under "ulysses"; 0 = as many as the number of heads allows
    heads:    query heads of the layer, if a call has only part of them; else 0
    mask_digest: of the mask's code and values, if ranks may have to compare it
    first_row: batch row of the whole plan that is row 0 of this one, see :meth:`batch_rows`
    handle:   0-d int64 CPU tensor that names the plan to the registered ops and keeps it alive there
    """

    mask: Mask
    q: Placement
    kv: Placement
    rank: int
    balancer: str
    schedule: str
    reason: str = ""
    degree: int = 0
    heads: int = 0
    mask_digest: bytes = b""
    first_row: int = 0
    handle: Tensor | None = None
    _shared: dict = field(default_factory=dict, repr=False)

    @property
    def world_size(self) -> int:
        return self.q.world_size

    @property
    def s_local(self) -> int:
        """Rows of this rank's query shard, padding included."""
        return self.q.lengths[self.rank]

    @property
    def positions(self) -> Tensor:
        """Global position of each local row, -1 at padding: int64 [Bp, s_local]."""
        return self.q.positions(self.rank)

    @property
    def valid(self) -> Tensor:
        """Mask of the local rows that are tokens, not padding: bool [Bp, s_local]."""
        return self.positions >= 0

    def for_rank(self, rank: int) -> "Plan":
        """Return the same plan from another rank's view."""
        view = self.seen_by(rank)
        return view if self.handle is None else view.pinned()

    def seen_by(self, rank: int) -> "Plan":
        """Return the view of :meth:`for_rank` without a handle: compiled graphs cannot name the result."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the plan's world of {self.world_size}")
        if rank == self.rank:
            return self
        view = object.__new__(Plan)  # as replace() does, in a fifth of the time
        vars(view).update(vars(self), rank=rank, handle=None)
        return view

    def pinned(self) -> "Plan":
        """Return the plan with a handle, by which the ops find the plan as long as the handle lives."""
        return self if self.handle is not None else replace(self, handle=handle_of(self))

    @property
    def digest(self) -> bytes:
        """Digest of the blocks and their owners: equal for equal plans, on every rank."""

        def digest() -> bytes:
            runs, slots = self.mask.runs, (*self.q.slots, *self.kv.slots)
            mask = self.mask
            geometry = mask.q_len, mask.kv_len, mask.q_block, mask.kv_block, self.first_row
            counts = self.q.lengths, self.kv.lengths, [slot.shape for slot in slots]
            hashed = hashlib.sha256(repr((geometry, self.schedule, counts)).encode())
            for tensor in (runs.ptr, runs.runs, *(self.mask.interval or ()), *slots):
                hashed.update(content(tensor))
            return hashed.digest()

        return self._once(("digest", self.schedule), digest)

    @property
    def identity(self) -> Any:
        """Hashable key of the plan's contents: equal for equal plans, on every rank, and for no other
        plans."""

        def identity() -> Any:
            if self.balancer == "natural" and self.mask_digest:  # mask and lengths determine the plan
                return self.mask_digest, self.schedule, self.q.lengths, self.kv.lengths
            return self.mask_digest, self.digest

        return self._once(("identity", self.schedule), identity)

    @cached_property
    @on_host
    def owners(self) -> Tensor:
        """Rank that holds (the first token of) each query block, -1 for padding: int64 [Bp, blocks]."""
        return self.q.owners()

    @cached_property
    @on_host
    def work(self) -> list[float]:
        """Visible blocks of each rank's queries, summed over the mask's batch rows and heads. A masked block
        counts ``balance.MASKED``; a slot of part of a block counts for that part."""
        cost = block_costs(self.mask.runs)  # [Bm, rows]
        totals = []
        for slots in self.q.slots:
            rows = (slots[..., 1] // self.mask.q_block).to(torch.int64)
            share = slots[..., 2].double() / self.mask.q_block
            batch = max(cost.shape[0], rows.shape[0])
            picked = cost.expand(batch, -1).gather(1, rows.expand(batch, -1))
            totals.append(float((picked * share).sum()))
        return totals

    @property
    def imbalance(self) -> float:
        """Largest work of a rank over the mean: 1.0 is perfect."""
        mean = sum(self.work) / self.world_size
        return max(self.work) / mean if mean else 1.0

    def bytes_sent(
        self,
        *,
        batch: int,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        itemsize: int = 2,
        backward: bool = True,
        heads: int | None = None,
    ) -> int:
        """Count the bytes that this rank sends in one layer: K and V forward, K and V again plus float32
        dK/dV backward. Under "ulysses" also queries, outputs and their gradients, of ``heads`` query heads
        (None: kv_heads)."""
        width = head_dim + (head_dim if v_head_dim is None else v_head_dim)
        stats, passes = max(4, itemsize), 2 if backward else 1
        if not self.schedule.startswith("ulysses"):
            rows, grad_rows = self._rows_sent(batch)
            return kv_heads * width * (passes * rows * itemsize + backward * grad_rows * stats)
        heads = heads or kv_heads
        degree = self.degree_for(heads)
        at, (q_heads, kv_parts) = self.rank % degree, steps.trade(heads, kv_heads, degree)
        own, remote = len(q_heads[at]), heads - len(q_heads[at])
        keys = sum(map(len, kv_parts)) - len(kv_parts[at])
        back = own * (degree - 1)
        q_rows, kv_rows = batch * self.q.s_max, batch * self.kv.s_max
        e = width - head_dim
        sent = q_rows * (remote * head_dim * itemsize + back * (e * itemsize + stats))
        sent += kv_rows * keys * width * itemsize
        if backward:
            sent += q_rows * (remote * (width * itemsize + 2 * stats) + back * head_dim * itemsize)
            summed = degree < self.world_size or steps.share(kv_parts)  # of several ranks' parts
            row_bytes = stats if summed else itemsize
            sent += kv_rows * width * (keys * itemsize + len(kv_parts[at]) * (degree - 1) * row_bytes)
        between = replace(self.rows(degree, heads), schedule=_between(self.schedule))
        rows, grad_rows = between._rows_sent(batch)
        return sent + len(kv_parts[at]) * width * (passes * rows * itemsize + backward * grad_rows * stats)

    def _rows_sent(self, batch: int) -> tuple[int, int]:
        """Count the rows of K and V that this rank sends forward, and the rows of their gradient backward."""
        if self.schedule == "fetch":
            copies, stays = 1 if self.batched else batch, int(self.traffic[self.rank, self.rank])
            sends, takes = self.traffic[:, self.rank].sum(), self.traffic[self.rank].sum()
            return (int(sends) - stays) * copies, (int(takes) - stays) * copies
        hops = [self.world_size - 1] * 2
        if self.schedule == "ring":
            hops = list(steps.hops_sent(self.ring_route, self.rank))
        return hops[0] * self.kv.s_max * batch, hops[1] * self.kv.s_max * batch

    @on_host
    def explain(self, hardware: cost.Hardware | None = None, **shape: int) -> str:
        """Format the costs of each schedule for this placement as a table.

        shape: batch, heads, kv_heads, head_dim, v_head_dim, itemsize of a layer; see
        :class:`tritoncp.planning.cost.Shape` for the defaults.

        >>> from tritoncp import causal, create_block_mask, make_plan
        >>> plan = make_plan(create_block_mask(causal(), 1, 1, 65536, 65536), world_size=4, rank=0)
        >>> len(plan.explain(heads=16, kv_heads=16).splitlines())
        7
        """
        from tritoncp.planning.report import Facts, table

        return "\n".join(table(Facts.of(self, hardware, **shape)))

    @on_host
    def plot(
        self, path: str | Path | None = None, hardware: cost.Hardware | None = None, **shape: int
    ) -> "Image.Image":
        """Draw the plan: the mask in its owners' colours, the work of each rank, the keys that ranks read of
        each other, and the cost of a layer under each schedule. Needs Pillow: pip install 'tritoncp[plot]'.

        path: a file to save the picture to: .png, or .html for a self-contained page. shape: as for
        :meth:`explain`. Returns a PIL image, which a notebook shows.
        """
        from tritoncp.planning.picture import html, paint
        from tritoncp.planning.report import Facts

        facts, target = Facts.of(self, hardware, **shape), None if path is None else Path(path)
        if target is not None and target.suffix not in (".png", ".html"):
            raise ValueError(f"path {str(path)!r}: the picture is a .png, the page an .html")
        image = paint(facts)
        if target is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            image.save(target) if target.suffix == ".png" else target.write_text(html(facts))
        return image

    def degree_for(self, heads: int) -> int:
        """Return the number of ranks that exchange heads under "ulysses": the plan's ``degree``, or the
        largest that divides the world and does not exceed ``heads``."""
        if self.degree > heads:
            raise ValueError(
                f"the plan trades heads among {self.degree} ranks, the query has {heads}; make the mesh's "
                "second dimension smaller"
            )
        fitting = (d for d in range(1, self.world_size + 1) if self.world_size % d == 0 and d <= heads)
        return self.degree or max(fitting)

    def rows(self, degree: int, heads: int) -> "Plan":
        """Return the plan between rows of the mesh: ``degree`` neighbouring ranks as one rank each, for a
        layer of ``heads`` query heads."""

        def merge_ranks() -> Plan:
            q, kv = self.q.merged(degree), self.kv.merged(degree)
            return replace(self, q=q, kv=kv, rank=0, heads=heads, handle=None, _shared={})

        return self._once(("rows", degree, heads), merge_ranks).for_rank(self.rank // degree)

    @property
    def batch(self) -> int:
        """Number of batch rows if mask or placement differ between them, else 1."""
        return max(self.mask.B, self.q.batch, self.kv.batch)

    def batch_rows(self, first: int, count: int) -> "Plan":
        """Return the plan of ``count`` rows of the batch from ``first`` on, for tensors that hold only these:
        their row i is row ``first + i`` to mask_mod and score_mod.

        >>> from tritoncp import create_block_mask, make_plan
        >>> ends = torch.tensor([100, 200, 300])
        >>> mask = create_block_mask(lambda b, h, q, kv: kv < ends[b], 3, 1, 384, 384)
        >>> make_plan(mask).batch_rows(1, 2).mask.B
        2
        """
        if first < 0 or count < 1 or not (self.batch == 1 or first + count <= self.batch):
            raise ValueError(
                f"rows {first} to {first + count - 1} of a batch are asked for, and the plan's mask has "
                f"{self.batch} (one that has 1 serves any): pass where the query's rows begin in its batch"
            )
        parts: dict[Any, Plan] = self._once("batch rows", dict)
        key = first, count, self.rank
        if (part := parts.get(key)) is None:
            self.check_sources()
            if len(parts) >= MAX_CACHED_PARTS:
                parts.clear()
            part = parts[key] = self._part(first, count).pinned()
        return part

    def _part(self, first: int, count: int) -> "Plan":
        mask = self.mask.listed_rows(first, count)
        q, kv = (side.batch_rows(first, count) for side in (self.q, self.kv))
        shared: dict[Any, Any] = {
            name: self._shared[name] for name in ("mask_mod", "evaluators") if name in self._shared
        }
        if self.world_size > 1:  # ranks that compared the whole compared its rows
            shared["identity", self.schedule] = self.identity
        first += self.first_row
        return replace(self, mask=mask, q=q, kv=kv, first_row=first, handle=None, _shared=shared)

    @property
    def visible_blocks(self) -> Tensor:
        """KV blocks that each rank's queries see: bool [W, Bn, KV blocks]."""
        return self._once("seen", lambda: steps.seen_blocks(self.mask, self.q))

    @property
    def traffic(self) -> Tensor:
        """Rows of rank s's keys that rank r's queries see, at [r, s], summed over the batch rows of mask and
        placement: int64 [W, W]."""
        return self._once("traffic", lambda: steps.traffic(self.visible_blocks, self.kv))

    @property
    def batched(self) -> bool:
        """Whether batch rows see or hold different keys, so that the rows sent differ between them."""
        return self.batch > 1

    @property
    def ring_route(self) -> tuple[int, Tensor]:
        """Direction in which K and V travel around the ring (1 or -1), and the hops of each rank's K and
        V."""
        return self._once("around", lambda: steps.ring_route(self.traffic > 0))

    @property
    def ring(self) -> tuple[steps.Hop, ...]:
        """This rank's turns of the ring."""
        return self._once(
            ("ring", self.rank), lambda: steps.ring(self.traffic > 0, self.rank, self.ring_route)
        )

    @property
    def fetch(self) -> steps.Fetch:
        """The rows that this rank sends and receives if each rank fetches exactly the keys that it sees."""
        return self._once(("fetch", self.rank), lambda: steps.fetch(self.visible_blocks, self.kv, self.rank))

    def fetch_rows(self, device: torch.device) -> Tensor:
        """Return ``fetch.rows`` on a device."""

        def copy_rows() -> DeviceCopy[Tensor]:
            return DeviceCopy([self.fetch.rows], device, lambda rows: rows)

        return self._once(("fetch rows", self.rank, device), copy_rows).on_current_stream()

    def tables(
        self,
        device: torch.device | str = "cpu",
        batch: int = 1,
        heads: int = 1,
        buffer: int | str = "gathered",
    ) -> Tables:
        """Return the tables of one KV buffer, on ``device``, for queries of ``batch`` rows and ``heads``
        heads.

        buffer: "gathered" (all ranks' shards, ``kv.s_max`` rows each), a rank (its shard) or "fetched".
        """
        interval = self.mask.interval_for(batch, self.heads or heads)
        key = "tables", self.rank, buffer, interval is None
        if (device_copy := self._shared.get((*key, device))) is None:

            def on_host() -> Tables:
                own = self.q.slots[self.rank], self.positions
                return tables_of(self.mask, *own, *self.listed(buffer), interval)

            tables, place = self._once(key, on_host), torch.device(device)
            device_copy = self._once((*key, place), lambda: tables.copy_to(place))
        return device_copy.on_current_stream()

    def listed(self, buffer: int | str = "gathered") -> tuple[Tensor, Runs]:
        """Return the slots of a KV buffer, and the runs of them that each Q slot of this rank sees."""
        slots = self._slots(buffer)
        own = self.q.slots[self.rank]
        return slots, self._once(("runs", self.rank, buffer), lambda: slot_runs(self.mask, own, slots))

    def _slots(self, buffer: int | str) -> Tensor:
        if buffer == "fetched":
            return self.fetch.slots
        ranks = None if buffer == "gathered" else [int(buffer)]
        return self._once(("slots", buffer), lambda: self.kv.gathered(ranks))

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Compute a value once and cache it for all ranks' views of the plan."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    @property
    def checked_calls(self) -> set[Any]:
        """Keys of this rank's calls that passed their checks
        (:func:`tritoncp.frontend.validate.call_key`)."""
        return self._once(("checked calls", self.rank), set)

    def note_checked(self, call_key: Any) -> None:
        """Note that calls of this key passed their checks; None is the key of no call."""
        if len(self.checked_calls) >= MAX_CHECKED_CALLS:
            self.checked_calls.clear()
        if call_key is not None:
            self.checked_calls.add(call_key)

    def check_sources(self) -> None:
        """Refuse to run when state that the mask_mod reads has changed since the mask was made."""
        self.mask.check_state(user="plan")

    def __copy__(self) -> "Plan":
        return replace(self, handle=None).pinned()

    def __deepcopy__(self, memo: dict) -> "Plan":
        return copy.copy(self)  # functions are not copied, and the other fields are immutable

    def __getstate__(self) -> dict:
        state = {name: value for name, value in vars(self).items() if name in self.__dataclass_fields__}
        digests = {} if self.world_size == 1 else {("digest", self.schedule): self.digest}
        return state | {"_shared": digests, "handle": None}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        object.__setattr__(self, "handle", replace(self).pinned().handle)

    @on_host
    def __str__(self) -> str:
        from tritoncp.planning.report import picture

        return picture(self)


@on_host
def build(
    mask: Mask,
    world_size: int = 1,
    rank: int = 0,
    *,
    balancer: str | Balancer | None = "ptrr",
    lengths: Sequence[int] | None = None,
    kv_lengths: Sequence[int] | None = None,
    schedule: str = "auto",
    weighed: Sequence[Mask] = (),
    degree: int = 0,
) -> Plan:
    """Place a mask's blocks on ``world_size`` ranks.

    ``balancer=None`` is natural order: rank r holds the r-th contiguous piece, ``lengths[r]`` tokens long
    (``kv_lengths`` for the keys, if they differ). ``weighed``: masks whose work is summed, so that their
    plans share one placement; this mask is one of them. ``degree``: ranks that exchange heads under
    "ulysses", which is then the schedule.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is outside a world of {world_size}")
    by_name = None if balancer is None else resolve_balancer(balancer)
    if schedule not in ("auto", *SCHEDULES):
        raise ValueError(f"unknown schedule {schedule!r}; known: auto, {', '.join(SCHEDULES)}")
    if degree:
        schedule = "ulysses" if schedule == "auto" else schedule
        if not schedule.startswith("ulysses") or world_size % degree:
            raise ValueError(
                f"a mesh of two dimensions, {world_size // degree} x {degree} ranks here, goes with "
                f"'ulysses' and 'ulysses+ring': the second one trades heads; got schedule={schedule!r}"
            )
    sizes = {(m.q_len, m.kv_len, m.q_block, m.kv_block) for m in (mask, *weighed)}
    if len(sizes) > 1:
        size_text = ", ".join(f"{a} x {b} in blocks of {c} x {d}" for a, b, c, d in sorted(sizes))
        raise ValueError(
            f"masks that share a placement are {size_text}; make them for the same lengths and BLOCK_SIZE"
        )
    if any(not _same_tokens(mask, other) for other in weighed):
        raise ValueError(
            "masks that share a placement have padding in different places; make them from the same "
            "cu_seqlens"
        )
    if by_name is None or world_size == 1:
        q = natural(_pieces("query", lengths, mask.q_len, world_size), mask.q_block)
        same = kv_lengths is None and mask.kv_len == mask.q_len
        kv = natural(_pieces("key", lengths if same else kv_lengths, mask.kv_len, world_size), mask.kv_block)
        name = "natural"
    else:
        name, q, kv = by_name[0], *_balance(mask, weighed or [mask], world_size, by_name[1])
    if mask.tokens is not None:
        q, kv = (
            without_padding(side, tokens, name != "natural") for side, tokens in zip((q, kv), mask.tokens)
        )
    if schedule != "auto":
        return Plan(mask, q, kv, rank, name, schedule, reason="asked for", degree=degree)
    plan = Plan(mask, q, kv, rank, name, "allgather")
    if world_size == 1:
        return plan
    hardware = cost.hardware_of(world_size)
    estimates = cost.costs(plan, cost.Shape(), hardware)
    return replace(plan, schedule=estimates[0].schedule, reason=cost.why(estimates, hardware))


def pieces(total: int, world_size: int) -> list[int]:
    """Return the lengths of natural-order pieces that differ by at most one token.

    >>> pieces(10, 4)
    [3, 3, 2, 2]
    """
    return [total // world_size + (rank < total % world_size) for rank in range(world_size)]


def _between(schedule: str) -> str:
    """Return the schedule between the rows of the mesh under "ulysses"."""
    return schedule.partition("+")[2] or "fetch"


def _pieces(side: str, lengths: Sequence[int] | None, total: int, world_size: int) -> Sequence[int]:
    if lengths is None:
        return pieces(total, world_size)
    if len(lengths) != world_size or sum(lengths) != total:
        raise ValueError(
            f"the {side} shards of the ranks are {list(lengths)} tokens long, {sum(lengths)} together, but "
            f"the mask is for {total}; pass the global mask, and shards that add up to it in rank order"
        )
    return lengths


def _same_tokens(mask: Mask, other: Mask) -> bool:
    if mask.tokens is None or other.tokens is None:
        return mask.tokens is other.tokens
    return all(map(torch.equal, mask.tokens, other.tokens))


def _balance(
    mask: Mask, weighed: Sequence[Mask], world_size: int, balancer: Balancer
) -> tuple[Placement, Placement]:
    owners = [deal(balancer, work) for work in views(weighed, world_size)]
    q = by_blocks(mask.q_len, mask.q_block, owners)
    if mask.kv_len == mask.q_len and mask.kv_block == mask.q_block:
        return q, q
    if mask.kv_len == mask.q_len:  # same tokens, other blocks: cut the same placement at KV blocks
        return q, _recut(q, mask.kv_block)
    owners = [deal(balancer, work) for work in views(weighed, world_size, side="kv")]
    return q, by_blocks(mask.kv_len, mask.kv_block, owners)


def _recut(placement: Placement, block: int) -> Placement:
    """Cut the slots of a placement so that none crosses a multiple of ``block``."""
    tables = []
    for slots in placement.slots:
        rows = []
        for batch in slots.tolist():
            cut = []
            for row, position, tokens in batch:
                edges = [
                    position,
                    *range((position // block + 1) * block, position + tokens, block),
                    position + tokens,
                ]
                cut += [(row + a - position, a, b - a) for a, b in itertools.pairwise(edges)]
            rows.append(cut)
        width = max(map(len, rows))
        padded = [cut + [(0, 0, 0)] * (width - len(cut)) for cut in rows]
        tables.append(torch.tensor(padded, dtype=torch.int32).view(len(rows), width, 3))
    return Placement(placement.length, block, tuple(tables), placement.lengths)

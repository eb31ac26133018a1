"""The plan of a rank: which rank holds which block, the schedule, and the tables of each step.

A plan is made before the first byte is sent. It is frozen, derived from the mask alone, and equal on every
rank except for the rank's number; it refers to no process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from tritoncp.core.handles import handle_of, stand_for
from tritoncp.core.host_copy import on_host
from tritoncp.core.pytrees import register_handled
from tritoncp.core.records import fields_of, record, replace
from tritoncp.masks.block_mask_interface import BlockMaskInterface, selected_numbers
from tritoncp.masks.closed_forms import causal
from tritoncp.masks.mask import Mask, create_block_mask, full_mask
from tritoncp.masks.runs.block_runs import Runs
from tritoncp.planning.costs import traffic as key_traffic
from tritoncp.planning.costs.hardware import Hardware
from tritoncp.planning.derived import DerivedTables
from tritoncp.planning.late_binding import load_bound
from tritoncp.planning.parts import check_keys, check_part, chunk_rows, rows_of_placement
from tritoncp.planning.placement import Placement, check_side
from tritoncp.planning.step_tables import Tables
from tritoncp.planning.work import block_costs, costs_of_selected

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")


class Reports(Protocol):
    """Text, figures and pictures of plans. They measure the schedules, which carry out plans, so they stand
    above both: :mod:`tritoncp.report`."""

    def count_bytes_sent(self, plan: Plan, backward: bool, shape: dict[str, int], /) -> int: ...
    def explain(self, plan: Plan, hardware: Hardware | None, shape: dict[str, int], /) -> str: ...
    def metrics(
        self, plan: Plan, hardware: Hardware | None, shape: dict[str, int], /
    ) -> dict[str, float]: ...
    def plot(
        self, plan: Plan, path: str | Path | None, hardware: Hardware | None, shape: dict[str, int], /
    ) -> Figure: ...
    def text(self, plan: Plan, /) -> str: ...


def _reports() -> Reports:
    """Return the reports, which the package's root binds: a plan knows nothing of what stands above it."""
    reports: Reports = load_bound("reports of plans").REPORTS
    return reports


@record()
class Plan(BlockMaskInterface):
    """One rank's part of one attention layer, made by :func:`tritoncp.make_plan`: which rank holds which
    block, the order of the steps and the keys that each step reads.

    mask:     the global mask, in runs
    q, kv:    placements of queries and keys
    rank:     the rank whose steps and shard these are
    balancer: name of the balancer ("natural" for contiguous pieces in order)
    schedule: name of the schedule that brings K and V to the queries
    reason:   why the schedule was chosen
    degree:   number of ranks that exchange heads under "ulysses"; 0 = as many as the heads allow
    heads:    number of query heads of the layer, if a call has only part of them; else 0
    selected: keys that a query selects at run time, by which work is weighed; 0: all that the mask shows
    mask_digest: digest of the mask's code and values, if ranks may have to compare it
    first_row: index in the batch of this plan's batch row 0, see :meth:`batch_rows`
    whole:    identity of the whole plan if this is a part of it, for ranks to compare
    handle:   0-d int64 CPU tensor that names the plan to the registered ops and keeps it alive there
    derived:  tables that follow from the mask and the placements
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
    selected: int = 0
    mask_digest: bytes = b""
    first_row: int = 0
    whole: Any = field(default=None, repr=False)
    handle: Tensor | None = None
    derived: DerivedTables = field(default=None, repr=False)  # type: ignore[assignment] # made below

    def __post_init__(self) -> None:
        old = self.derived
        if old is None or old.mask is not self.mask or old.q is not self.q or old.kv is not self.kv:
            object.__setattr__(self, "derived", DerivedTables(self.mask, self.q, self.kv))

    @property
    def world_size(self) -> int:
        return self.q.world_size

    @cached_property
    def is_local(self) -> bool:
        """Whether attention is one step without messages: no rank reads keys of another, and ranks do not
        exchange heads."""
        return self.world_size == 1 or (
            not self.schedule.startswith("ulysses") and self.derived.reads_only_own_keys
        )

    @property
    def s_local(self) -> int:
        """Rows of this rank's query shard, padding included."""
        return self.q.lengths[self.rank]

    def side(self, side: str) -> Placement:
        """Return the placement of queries ("q"), or of keys and values ("kv")."""
        check_side(side)
        return self.q if side == "q" else self.kv

    @property
    def positions(self) -> Tensor:
        """Global position of each local row, -1 at padding: int64 [Bp, s_local]."""
        return self.q.positions(self.rank)

    def positions_on(self, device: torch.device) -> Tensor:
        """Return ``positions`` on a device."""
        return self.derived.query_positions(self.rank, device).on_current_stream()

    @property
    def valid(self) -> Tensor:
        """Mask of the local rows that are tokens, not padding: bool [Bp, s_local]."""
        return self.positions >= 0

    def for_rank(self, rank: int) -> Plan:
        """Return the plan of another rank.

        >>> from tritoncp import causal, create_block_mask, make_plan
        >>> plan = make_plan(create_block_mask(causal(), 1, 1, 512, 512), world_size=2, rank=0)
        >>> plan.rank, plan.for_rank(1).rank
        (0, 1)

        Args:
            rank: a rank of the plan's world.

        Returns:
            A Plan with the same placement and schedule.

        Raises:
            ValueError: for a rank outside of the world.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the plan's world of {self.world_size}")
        if rank == self.rank:
            return self
        view = replace(self, rank=rank, handle=None)
        return view if self.handle is None else view.pinned()

    def pinned(self) -> Plan:
        """Return the plan with a handle, by which ops find it while the handle exists."""
        if self.handle is not None:
            return self
        pinned = replace(self, handle=handle_of(self))
        stand_for(pinned, pinned.handle)
        return pinned

    @property
    def digest(self) -> bytes:
        """Digest of the blocks and their owners. Equal plans have equal digests on all ranks."""
        return self.derived.digest(self.schedule, self.first_row)

    @property
    def identity(self) -> Any:
        """Hashable key of the plan's contents. Two plans have one key, on any ranks, only if they are
        equal."""
        if self.whole is not None:
            return self.whole
        if self.balancer == "natural" and self.mask_digest:  # mask and lengths determine the plan
            return self.mask_digest, self.schedule, self.q.lengths, self.kv.lengths
        return self.mask_digest, self.digest

    @cached_property
    @on_host
    def owners(self) -> Tensor:
        """Rank that has (the first token of) each query block, -1 for padding: int64 [Bp, blocks]."""
        return self.q.owners()

    @cached_property
    @on_host
    def work(self) -> list[float]:
        """Visible blocks of each rank's queries, summed over the mask's batch rows and heads. A masked block
        counts ``work.MASKED_BLOCK_COST``; a part of a block counts as a fraction. With ``selected`` a row
        counts the visible keys, at most as many."""
        mask, selected = self.mask, self.selected
        cost = costs_of_selected(mask, selected) if selected else block_costs(mask.runs)  # [Bm, rows]
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
        """Max work of a rank over the mean: 1.0 is perfect."""
        mean = sum(self.work) / self.world_size
        return max(self.work) / mean if mean else 1.0

    def degree_for(self, heads: int) -> int:
        """Return the number of ranks that exchange heads under "ulysses": the plan's ``degree``, or the max
        number up to ``heads`` that divides the world."""
        if self.degree > heads:
            raise ValueError(
                f"query has {heads} heads, which the plan exchanges among {self.degree} ranks; make the "
                "second dimension of the mesh smaller"
            )
        world = self.world_size
        return self.degree or max(d for d in range(1, min(world, heads) + 1) if world % d == 0)

    def rows(self, degree: int, heads: int) -> Plan:
        """Return the plan between rows of the mesh, in which ``degree`` neighbouring ranks count as one, for
        a layer of ``heads`` query heads."""

        def merge() -> Plan:
            q, kv = self.q.merged(degree), self.kv.merged(degree)
            return replace(self, q=q, kv=kv, rank=0, heads=heads, handle=None)

        return self.keep(("rows", degree, heads), merge).for_rank(self.rank // degree)

    def keep(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """Return the value of a key, made once and kept with the plan's tables."""
        value: T | None = self.derived.parts.get(key)
        return self.derived.parts.put(key, make()) if value is None else value

    @property
    def batch(self) -> int:
        """Number of batch rows if mask or placement differ between them, else 1."""
        return max(self.mask.B, self.q.batch, self.kv.batch)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, Q_LEN, KV_LEN) of the global mask, in tokens: of all ranks together."""
        return self.mask.shape

    @property
    def BLOCK_SIZE(self) -> tuple[int, int]:
        """(queries, keys) of a block, in tokens."""
        return self.mask.BLOCK_SIZE

    @property
    def nbytes(self) -> int:
        """Bytes of the mask and the placements."""
        return self.mask.nbytes + self.q.nbytes + self.kv.nbytes

    def sparsity(self) -> float:
        """Return the percentage of the global mask outside of listed blocks."""
        return self.mask.sparsity()

    def check_sources(self) -> None:
        """Raise RuntimeError if state that the mask_mod reads has changed since the mask was made.

        A call asks where it takes its mask (`call.plan_cache.current_mask`), a backward pass as it begins
        (`call.autograd.backward_pass`), and an op that a graph or torch.jit may run again, at each run
        (`call.op_arguments.decode`, `call.key_exchange`, `api.selected_keys`).
        """
        self.mask.check_state(user="plan")

    # -- parts of a plan ------------------------------------------------------------------------------

    def __getitem__(self, index: int | slice) -> Plan:
        """Return the plan of one batch row or of adjacent ones, like :meth:`batch_rows`. Raises IndexError
        for other indices: select heads and rows of the mask, before its plan is made."""
        rows = selected_numbers(index, (self.batch, 1, 1))[0] or tuple(range(self.batch))
        if isinstance(index, tuple) or rows != tuple(range(rows[0], rows[-1] + 1)):
            raise IndexError(
                f"plan[{index!r}]: one batch row or a slice of adjacent ones is needed; for other parts "
                "make a plan of the indexed mask: make_plan(mask[...], mesh)"
            )
        return self.batch_rows(rows[0], len(rows))

    def part(self, index: int, count: int, *, keys: int | None = None) -> Plan:
        """Return the plan for one of ``count`` chunks of the rows of every rank's shard.

        >>> from tritoncp import causal, create_block_mask, make_plan
        >>> plan = make_plan(create_block_mask(causal(), 1, 1, 512, 512))
        >>> part = plan.part(1, 4, keys=2)
        >>> part.positions[0, :2].tolist(), part.q.lengths, part.kv.lengths
        ([128, 129], (128,), (256,))

        Queries of other chunks are left out. Chunks have ``ceil(rows / count)`` rows, the last one the rest.
        For chunks of the batch, see :meth:`batch_rows`.

        Args:
            index: number of the chunk.
            count: number of chunks.
            keys: use the keys and values of the first ``keys`` chunks only; None: of all chunks.

        Returns:
            A Plan for tensors of these rows.

        Raises:
            ValueError: for numbers out of range, and if a query sees keys after the first ``keys`` chunks.
        """
        check_part(index, count, keys)
        return self._part_once((index, count, keys), lambda: self._part_of_rows(index, count, keys))

    def _part_of_rows(self, index: int, count: int, keys: int | None) -> Plan:
        if keys is not None:
            check_keys(self.needs(count), index, keys)
        q, kv = rows_of_placement(self.q, chunk_rows(self.q, index, count, "queries")), self.kv
        if keys is not None:
            prefix = [range(0, rows.stop) for rows in chunk_rows(kv, keys - 1, count, "keys")]
            kv = rows_of_placement(kv, prefix)
        whole = (self.identity, index, count, keys) if self.world_size > 1 else None
        return replace(self, q=q, kv=kv, whole=whole, handle=None).pinned()

    @on_host
    def needs(self, count: int) -> Tensor:
        """Return which chunks of keys the queries of each chunk see, on any rank.

        >>> from tritoncp import causal, create_block_mask, make_plan
        >>> make_plan(create_block_mask(causal(), 1, 1, 512, 512)).needs(2).tolist()
        [[True, False], [True, True]]

        Args:
            count: number of chunks of each rank's rows.

        Returns:
            bool [count, count]: [query chunk, key chunk].
        """
        return self.derived.needed_chunks(count, self.first_row)

    def batch_rows(self, first: int, count: int) -> Plan:
        """Return the plan of some batch rows, for tensors of these rows only.

        >>> from tritoncp import create_block_mask, make_plan
        >>> ends = torch.tensor([100, 200, 300])
        >>> mask = create_block_mask(lambda b, h, q, kv: kv < ends[b], 3, 1, 384, 384)
        >>> make_plan(mask).batch_rows(1, 2).mask.B
        2

        mask_mod and score_mod get b = ``first + i`` for batch row i of the tensors.

        Args:
            first: first batch row.
            count: number of batch rows.

        Returns:
            A Plan.

        Raises:
            ValueError: for batch rows that the plan does not have.
        """
        if first < 0 or count < 1 or first + count > self.batch > 1:
            raise ValueError(
                f"batch rows {first} to {first + count - 1} of a plan for {self.batch} batch rows; pass "
                "batch_offset= the first row of the query in the batch"
            )
        return self._part_once((first, count), lambda: self._rows_of_batch(first, count))

    def of_heads(self, first: int, count: int) -> Plan:
        """Return the plan of ``count`` query heads from ``first`` on, for tensors of these heads only: the
        mask gets h = ``first + i`` for head i of the tensors."""
        key = "heads", first, count

        def make() -> Any:
            mask = self.mask.head_range(first, count)
            return self if mask is self.mask else self._with_mask(mask, key)

        return self._part_once(key, make)

    def of_sdpa(self, is_causal: bool) -> Plan:
        """Return the plan with the same placement and scaled_dot_product_attention's mask: causal, or
        full."""
        mask = self.mask
        if is_causal and mask.window == (-1, 0):
            return self
        if mask.tokens is not None:
            raise ValueError(
                "is_causal with a plan that has padding, which scaled_dot_product_attention would read: "
                "call flex_attention with this plan in that layer too"
            )

        def make() -> Any:
            size = mask.q_len, mask.kv_len
            if is_causal:
                own = create_block_mask(causal(), None, None, *size, BLOCK_SIZE=mask.BLOCK_SIZE)
            else:
                own = full_mask(*size, block=mask.BLOCK_SIZE)
            return self._with_mask(own, ("sdpa", is_causal))

        return self._part_once(("sdpa", is_causal), make)

    def _part_once(self, key: tuple[Any, ...], make: Callable[[], Plan]) -> Plan:
        """Return the plan of a part. It is made once for each rank."""
        key = *key, self.rank, self.schedule, self.first_row
        part: Plan | None = self.derived.parts.get(key)
        if part is None:
            self.check_sources()
            part = make()
            if part is not self:
                self.derived.parts.put(key, part)
        return part

    def _with_mask(self, mask: Mask, change: tuple[Any, ...]) -> Plan:
        """Return the plan of another mask on the same placement. change: key that identifies the other mask,
        equal on all ranks."""
        whole = (self.identity, *change) if self.world_size > 1 else None
        return replace(self, mask=mask, whole=whole, handle=None).pinned()

    def _rows_of_batch(self, first: int, count: int) -> Plan:
        mask = self.mask.listed_rows(first, count)
        q, kv = (side.batch_rows(first, count) for side in (self.q, self.kv))
        whole = self.identity if self.world_size > 1 else None  # ranks compare the whole plan
        first += self.first_row
        own = DerivedTables(mask, q, kv)
        part = replace(self, mask=mask, q=q, kv=kv, first_row=first, whole=whole, handle=None, derived=own)
        return part.pinned()

    # -- tables of a step -----------------------------------------------------------------------------

    @property
    def traffic(self) -> Tensor:
        """:attr:`DerivedTables.traffic`."""
        return self.derived.traffic

    @property
    def ring(self) -> tuple[key_traffic.Hop, ...]:
        """This rank's steps of the ring."""
        return self.derived.ring(self.rank)

    @property
    def fetch(self) -> key_traffic.Fetch:
        """The rows that this rank sends and receives if each rank fetches exactly the keys that it sees."""
        return self.derived.fetch(self.rank)

    def fetch_rows(self, device: torch.device) -> Tensor:
        """Return ``fetch.rows`` on a device."""
        return self.derived.fetch_rows(self.rank, device).on_current_stream()

    def returned_parts(self, grads: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pair the rows that each rank fetched of this one with the rows of ``grads`` [sum(fetch.sends), ...]
        that it returns, rank after rank."""
        sends = list(self.fetch.sends)
        return zip(self.fetch_rows(grads.device).split(sends), grads.split(sends), strict=True)

    def tables(
        self,
        device: torch.device | str,
        batch: int,
        heads: int,
        buffer: int | str = "gathered",
    ) -> Tables:
        """Return the tables of one KV buffer, on ``device``, for queries of ``batch`` rows and ``heads``
        heads.

        buffer: one of :class:`tritoncp.planning.derived.DerivedTables`
        """
        by_intervals = self.mask.interval_for(batch, self.heads or heads) is not None
        if not isinstance(device, torch.device):
            device = torch.device(device)
        return self.derived.tables(self.rank, buffer, by_intervals, device).on_current_stream()

    def tables_for(self, q: Tensor, buffer: int | str = "gathered") -> Tables:
        """Return :meth:`tables` for queries [B, H, S, D]."""
        return self.tables(q.device, q.shape[0], q.shape[1], buffer)

    def listed(self, buffer: int | str = "gathered") -> tuple[Tensor, Runs]:
        """Return the slots of a KV buffer, and the runs of them that each Q slot of this rank sees."""
        return self.derived.slots(self.rank, buffer), self.derived.runs(self.rank, buffer)

    # -- costs, text and picture ----------------------------------------------------------------------

    def bytes_sent(self, *, kv_heads: int, head_dim: int, backward: bool = True, **shape: int) -> int:
        """Count the bytes that this rank sends in one layer.

        >>> from tritoncp import causal, create_block_mask, make_plan
        >>> mask = create_block_mask(causal(), 1, 1, 65536, 65536)
        >>> plan = make_plan(mask, world_size=4, rank=0, schedule="ring")
        >>> plan.bytes_sent(kv_heads=8, head_dim=128, backward=False) >> 20     # MiB
        192

        They are K and V in the forward pass, and K and V again plus float32 dK/dV in the backward pass. Under
        "ulysses" they include queries, outputs and their gradients; a latent is sent in place of K and V.

        Args:
            kv_heads: number of KV heads.
            head_dim: head dim of queries and keys.
            backward: whether the backward pass is counted too.
            shape: further sizes as for :meth:`explain`; by default heads is ``kv_heads`` and v_head_dim is
                ``head_dim``.

        Returns:
            Number of bytes.
        """
        sizes = {"heads": kv_heads, "v_head_dim": head_dim, **shape, "kv_heads": kv_heads}
        return _reports().count_bytes_sent(self, backward, sizes | {"head_dim": head_dim})

    @on_host
    def explain(self, hardware: Hardware | None = None, **shape: int) -> str:
        """Format the costs of each schedule for this placement as a table.

        >>> from tritoncp import causal, create_block_mask, make_plan
        >>> plan = make_plan(create_block_mask(causal(), 1, 1, 65536, 65536), world_size=4, rank=0)
        >>> print(plan.explain(heads=16, kv_heads=16).splitlines()[-1])  # doctest: +ELLIPSIS
        order ptrr, schedule ... (predicted ms a layer on H100/H200, NVLink: ...)

        Args:
            hardware: rates of the GPU and the interconnect, a
                :class:`tritoncp.planning.costs.hardware.Hardware`; None: assumed from the number of ranks.
            shape: batch, heads, kv_heads, head_dim, v_head_dim, itemsize of a layer. Defaults are in
                :class:`tritoncp.planning.costs.layer.Shape`; batch is the plan's by default.

        Returns:
            The table, and the reason of the plan's order and schedule.
        """
        return _reports().explain(self, hardware, shape)

    @on_host
    def metrics(self, hardware: Hardware | None = None, **shape: int) -> dict[str, float]:
        """Predict evenness, bytes sent, memory and time of a layer.

        >>> from tritoncp import causal, create_block_mask, make_plan
        >>> mask = create_block_mask(causal(), 1, 1, 65536, 65536)
        >>> metrics = make_plan(mask, world_size=4, rank=0, schedule="ring").metrics(heads=16, kv_heads=16)
        >>> metrics["forward_extra_bytes"] >> 20, metrics["backward_peak_bytes"] >> 20
        (386, 1474)

        "Does it fit?" is ``backward_peak_bytes`` plus what the model's other layers keep, at least their
        ``shard_bytes``. The page "Logs, traces and figures" explains all numbers. To log them with Weights &
        Biases or with TensorBoard::

            wandb.log({f"plan/{name}": value for name, value in plan.metrics().items()})
            for name, value in plan.metrics().items(): writer.add_scalar(f"plan/{name}", value, step)

        Args:
            hardware: as for :meth:`explain`.
            shape: as for :meth:`explain`.

        Returns:
            A flat dict of numbers.
        """
        return _reports().metrics(self, hardware, shape)

    @on_host
    def plot(self, path: str | Path | None = None, hardware: Hardware | None = None, **shape: int) -> Figure:
        """Draw the plan. Needs Matplotlib: pip install matplotlib.

        The picture shows the mask in the colours of its ranks, the work of each rank, the keys that ranks
        read from each other, and the cost of a layer under each schedule.

        Args:
            path: file to save the picture to, in a format of Matplotlib (.png, .svg, .pdf); None: no file.
            hardware: as for :meth:`explain`.
            shape: as for :meth:`explain`.

        Returns:
            A Matplotlib figure, which a notebook shows.
        """
        return _reports().plot(self, path, hardware, shape)

    @on_host
    def __str__(self) -> str:
        return _reports().text(self)

    def __repr__(self) -> str:
        """
        >>> from tritoncp import causal, create_block_mask, make_plan
        >>> make_plan(create_block_mask(causal(), 1, 1, 512, 512), world_size=2, rank=1, schedule="ring")
        Plan(rank=1 of 2, s_local=256, balancer='ptrr', schedule='ring', mask=Mask(B=1, H=1, q=512, kv=512, \
block=(128, 128), sparsity=37.50%, rows see intervals))
        """
        rank = f"rank={self.rank} of {self.world_size}, s_local={self.s_local}"
        return f"Plan({rank}, balancer={self.balancer!r}, schedule={self.schedule!r}, mask={self.mask!r})"

    # -- pickled copies -----------------------------------------------------------------------------------

    def __getstate__(self) -> dict:
        if self.world_size > 1:
            self.digest  # noqa: B018 - computed once, also for the process that reads the copy
        state = {name: value for name, value in vars(self).items() if name in fields_of(self)}
        return state | {"handle": None}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        object.__setattr__(self, "handle", replace(self).pinned().handle)


register_handled(Plan)

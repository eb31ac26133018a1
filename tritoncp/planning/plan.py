"""The public class of plans: the contents of a plan with its costs, its text and its picture."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from tritoncp.core.host_copy import on_host
from tritoncp.masks.block_mask_interface import BlockMaskInterface, selected_numbers
from tritoncp.planning import memory
from tritoncp.planning.cost import Hardware
from tritoncp.planning.parts import check_keys, check_part, chunk_rows, rows_of_placement
from tritoncp.planning.plan_data import PlanData
from tritoncp.planning.report.drawing import draw_figure, write_drawing
from tritoncp.planning.report.facts import Facts
from tritoncp.planning.report.text import format_costs, format_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Plan(PlanData, BlockMaskInterface):
    """One rank's part of one attention layer, made by :func:`tritoncp.make_plan`: who owns which block, the
    order of the steps and the reads of each step. Its fields are those of
    :class:`tritoncp.planning.plan_data.PlanData`."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, Q_LEN, KV_LEN) of the global mask, in tokens: of all ranks together."""
        return self.mask.shape

    @property
    def BLOCK_SIZE(self) -> tuple[int, int]:
        """(queries, keys) of a block, in tokens."""
        return self.mask.BLOCK_SIZE

    def sparsity(self) -> float:
        """Return the percentage of the global mask outside of listed blocks."""
        return self.mask.sparsity()

    def __getitem__(self, index: int | slice) -> Plan:
        """Return the plan of one batch row or of adjacent ones, as :meth:`batch_rows`. Raises IndexError for
        other indices: heads and rows are selected of a mask, before its plan is made."""
        rows = selected_numbers(index, (self.batch, 1, 1))[0] or tuple(range(self.batch))
        if isinstance(index, tuple) or rows != tuple(range(rows[0], rows[-1] + 1)):
            raise IndexError(
                f"plan[{index!r}]: a plan is indexed by one batch row or a slice of adjacent ones; select of "
                "the mask, and make a plan of that: make_plan(mask[...], mesh)"
            )
        return self.batch_rows(rows[0], len(rows))

    def of_batch(self, rows: int) -> Plan:
        """Return the plan of a call on ``rows`` batch rows: of a chunk of the batch, the plan of its rows."""
        if not self.batch_chunk:
            return self
        return replace(self, batch_chunk=0, handle=None).batch_rows(self.batch_chunk * rows, rows)

    def part(self, index: int, count: int, *, dim: str = "seq", keys: int | None = None) -> Plan:
        """Return the plan of one of ``count`` equal chunks of the rows of every rank's shard.

        dim: "seq": queries of the chunk, at their places; "batch": batch rows of the chunk
        keys: by "seq", the keys and values are those of the first ``keys`` chunks; None: of all

        >>> from tritoncp import causal, create_block_mask, make_plan
        >>> plan = make_plan(create_block_mask(causal(), 1, 1, 512, 512))
        >>> part = plan.part(1, 4, keys=2)
        >>> part.positions[0, :2].tolist(), part.q.lengths, part.kv.lengths
        ([128, 129], (128,), (256,))
        """
        check_part(index, count, dim, keys)
        if dim == "batch":
            return self._part_once(("batch", index, count), lambda: self._part_of_batch(index, count))
        return self._part_once(("seq", index, count, keys), lambda: self._part_of_rows(index, count, keys))

    def _part_of_batch(self, index: int, count: int) -> Plan:
        if self.batch == 1:
            return replace(self, batch_chunk=index, handle=None).pinned()
        if self.batch % count:
            raise ValueError(
                f"{self.batch} batch rows are no multiple of {count} chunks; pass a number that divides them"
            )
        return self.batch_rows(index * (self.batch // count), self.batch // count)

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
        """Return which chunks of keys the queries of each of ``count`` chunks see, on any rank: bool [count,
        count], see :func:`tritoncp.planning.parts.needed_chunks`."""
        return self.derived.needed_chunks(count, self.first_row)

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
        latent: int = 0,
    ) -> int:
        """Count the bytes that this rank sends in one layer: K and V forward, K and V again plus float32
        dK/dV backward. Under "ulysses" also queries, outputs and their gradients, of ``heads`` query heads
        (None: kv_heads). latent: channels of a token's latent, which is sent in place of K and V; 0: none."""
        shape = memory.Shape(
            batch, heads or kv_heads, kv_heads, head_dim, v_head_dim or head_dim, itemsize, latent
        )
        return memory.bytes_sent(self, shape, backward)

    @on_host
    def explain(self, hardware: Hardware | None = None, **shape: int) -> str:
        """Format the costs of each schedule for this placement as a table, and the reason of the plan's order
        and schedule.

        shape: batch, heads, kv_heads, head_dim, v_head_dim, itemsize of a layer; see
        :class:`tritoncp.planning.memory.Shape` for the defaults, but batch is the plan's.

        >>> from tritoncp import causal, create_block_mask, make_plan
        >>> plan = make_plan(create_block_mask(causal(), 1, 1, 65536, 65536), world_size=4, rank=0)
        >>> print(plan.explain(heads=16, kv_heads=16).splitlines()[-1])  # doctest: +ELLIPSIS
        order ptrr, schedule ... (predicted ms a layer on H100/H200, NVLink: ...)
        """
        reason = f" ({self.reason})" if self.reason else ""
        choice = f"order {self.balancer}, schedule {self.schedule}{reason}"
        return "\n".join([*format_costs(Facts.of(self, hardware, **shape)), choice])

    @on_host
    def metrics(self, hardware: Hardware | None = None, **shape: int) -> dict[str, float]:
        """Predict evenness, bytes sent, memory and time of a layer: a flat dict of numbers. The
        page "Logs, traces and figures" has their meanings.

        shape: as for :meth:`explain`. "Does it fit?" is ``backward_peak_bytes`` plus what the model's other
        layers keep, at least their ``shard_bytes``. To log it, with Weights & Biases or with TensorBoard::

            wandb.log({f"plan/{name}": value for name, value in plan.metrics().items()})
            for name, value in plan.metrics().items(): writer.add_scalar(f"plan/{name}", value, step)

        >>> from tritoncp import causal, create_block_mask, make_plan
        >>> mask = create_block_mask(causal(), 1, 1, 65536, 65536)
        >>> metrics = make_plan(mask, world_size=4, rank=0, schedule="ring").metrics(heads=16, kv_heads=16)
        >>> metrics["forward_extra_bytes"] >> 20, metrics["backward_peak_bytes"] >> 20
        (386, 1730)
        """
        return Facts.of(self, hardware, **shape).metrics

    @on_host
    def plot(self, path: str | Path | None = None, hardware: Hardware | None = None, **shape: int) -> Figure:
        """Draw the plan: the mask in its owners' colours, the work of each rank, the keys that ranks read of
        each other, and the cost of a layer under each schedule. Needs Matplotlib: pip install matplotlib.

        path: a file to save the picture to, in a format of Matplotlib (.png, .svg, .pdf). shape: as for
        :meth:`explain`. Returns a Matplotlib figure, which a notebook shows.
        """
        facts = Facts.of(self, hardware, **shape)
        if path is not None:
            write_drawing(facts, Path(path))
        return draw_figure(facts)

    @on_host
    def __str__(self) -> str:
        return "\n".join(format_lines(Facts.of(self)))

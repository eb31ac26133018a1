"""dK and dV of keys that are selected one by one: the launches of a step, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritoncp.kernels.launch import Launch
from tritoncp.kernels.opaque_integers import opaque_fields
from tritoncp.kernels.program_order import check_grid
from tritoncp.kernels.selected.attention import Places
from tritoncp.kernels.selected.gradients import KeyOrder, sum_dkdv_kernel
from tritoncp.kernels.tile_rules import Config
from tritoncp.kernels.tiles import channels, view

MULTIPLE = 16  # rows of a chunk: Triton compiles one kernel for all multiples
ROWS_OF_KEY = 4  # partial sums for each row of the buffer, in a chunk
SUMMED = 8  # partial sums of a key that are added at a time
LEAST_ROWS = 1 << 16  # partial sums of all heads and batch rows, for as many programs as a GPU runs at a time


def rows_of_chunk(rows: int, width: int, num_keys: int, buffers: int) -> int:
    """Return the rows of the selection in a chunk, a multiple of 16.

    width: partial sums of a row, for one KV head; num_keys: rows of the buffer of keys; buffers: KV heads
    times batch rows

    >>> rows_of_chunk(1 << 17, 2048, 1 << 17, 1), rows_of_chunk(1000, 64, 1000, 1)
    (256, 1008)
    """
    limit = max(ROWS_OF_KEY * num_keys, LEAST_ROWS // max(1, buffers))
    most = max(1, limit // max(1, width) // MULTIPLE) * MULTIPLE
    return min(most, max(1, -(-rows // MULTIPLE)) * MULTIPLE)


def sums_launch(dk: Tensor, dv: Tensor, order: KeyOrder, places: Places, heads: int, add: bool) -> Launch:
    """Prepare the sums of partial sums of ``heads`` heads, for a chunk that is the only one."""
    batch, kv_heads, num_keys, dim = dk.shape
    v_dim = dv.shape[3]
    values = {
        **{name: view(None) for name in ("dk_parts", "dv_parts", "dk_before", "dv_before")},
        **{
            "dk": view(dk),
            "dv": view(dv),
            "order": opaque_fields(order),
            "places": opaque_fields(places),
            "first": 0,
        },
        "PARTS": heads // kv_heads,
        "LISTS": heads // order.slots.shape[1],
        "BLOCK_N": SUMMED,
        "QK": channels(dim, 128),
        "VO": channels(v_dim, 128),
        "ADD": add,
    }
    config = Config(1, SUMMED, 1)
    grid = check_grid(num_keys, kv_heads, batch)
    return Launch(sum_dkdv_kernel, grid, [values[name] for name in sum_dkdv_kernel.arg_names], config, [])


class KeyGradients(NamedTuple):
    """The launches of dK and dV of a step. A call allocates the partial sums of a chunk, and sums in their
    dtype between chunks.

    partial: launch for the first chunk, of `partial_dkdv_kernel`, without its results
    sums:    launch of `sum_dkdv_kernel`, which writes dk and dv
    order:   of the entries of the lists
    dk, dv:  [B, Hkv, rows of the buffer, D|E]
    rows:    rows of the selection
    sums_dtype: of partial sums
    """

    partial: Launch
    sums: Launch
    order: KeyOrder
    dk: Tensor
    dv: Tensor
    rows: int
    sums_dtype: torch.dtype

    @property
    def parts(self) -> tuple[Launch, ...]:
        """All launches, in order."""
        return tuple(self._launches())

    def __call__(self) -> None:
        for launch in self._launches():
            launch()

    def _launches(self) -> Iterator[Launch]:
        order, (programs, heads, batch) = self.order, self.partial.grid
        parts = self._pair("{}_parts", (batch, heads, order.entries))
        totals = self._pair("{}", self.dk.shape[:3]) if order.chunks > 1 else {}
        before = {f"{name}_before": x for name, x in totals.items()}
        compiled: dict[tuple[bool, bool], list[Any]] = {}
        for first in range(0, order.chunks * order.rows, order.rows):
            grid = min(order.rows, self.rows - first) * (programs // order.rows), heads, batch
            yield self.partial.with_args(first=first, **parts)._replace(grid=grid)
            kind = is_first, is_last = first == 0, first == (order.chunks - 1) * order.rows
            args = ({} if is_first else before) | ({} if is_last else {**totals, "ADD": False})
            launch = self.sums.with_args(first=first, **parts, **args)
            yield launch._replace(compiled=compiled.setdefault(kind, []))

    def _pair(self, name: str, shape: Sequence[int]) -> dict[str, Any]:
        """Allocate tensors of partial sums for dk and dv. name: of their arguments"""
        dtype, device = self.sums_dtype, self.dk.device
        return {
            name.format(which): view(torch.empty(*shape, x.shape[3], dtype=dtype, device=device))
            for which, x in (("dk", self.dk), ("dv", self.dv))
        }

"""The Triton kernel of the probabilities of selected keys, as an engine whose forward steps write them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tritoncp.core.opaque_integers import opaque
from tritoncp.kernels.launch import Launch
from tritoncp.kernels.opaque_integers import opaque_fields
from tritoncp.kernels.program_order import check_grid
from tritoncp.kernels.scores import Origin
from tritoncp.kernels.selected.attention import Places, QueryTiling
from tritoncp.kernels.selected.probabilities import SelectedEntries, selected_probabilities_kernel
from tritoncp.kernels.tile_rules import architecture, selected, selected_rows
from tritoncp.kernels.tiles import channels, view
from tritoncp.planning.step_tables import ForwardStep, PreparedStep
from tritoncp.selection.lists import list_heads, visible_keys
from tritoncp.selection.lookup import rows_of_positions
from tritoncp.selection.triton_engine import SelectedTritonEngine, heads_of_tile, places_of


@dataclass(frozen=True, kw_only=True)
class TritonProbabilities(SelectedTritonEngine):
    """A :class:`SelectedTritonEngine` whose forward step adds the probabilities of its keys to ``sums``.

    lse:  [B, Hq, S] of all steps and sinks, natural log
    sums: [B, heads of the selection, S, n], in the order of the selection, in lse's dtype
    """

    lse: Tensor
    sums: Tensor

    def forward(self, step: ForwardStep) -> PreparedStep:
        """Prepare the probabilities of the keys of a step. Queries are taken in parts: no table of all
        selected keys is made besides ``sums``."""

        def run() -> None:
            places = rows_of_positions(step.tables.kv_slots, self.pairs.mask.kv_len)
            where = places_of(self.selected, places, step.q, step.k)
            batch, heads, length, _ = step.q.shape
            own, height = range(self.base.first_head, self.base.first_head + heads), self.selected.query_block
            share = heads // len(list_heads(self.selected, self.pairs, own))
            for (b, i, at), chosen, visible in visible_keys(self.selected, self.pairs, places, batch, own):
                rows = slice(at.start * height, min(at.stop * height, length))
                keys = torch.where(visible, chosen.keys[:, None], -1).int().flatten(0, 1)
                keys = keys[: rows.stop - rows.start]
                found = torch.zeros_like(keys, dtype=self.lse.dtype)
                part = b, slice(i * share, (i + 1) * share), rows
                self._launch_sums(step, part, where, keys, found)()
                by_entry = found.unflatten(1, (-1, self.selected.block_size)).sum(2)
                self.sums[b, i * share * self.sums.shape[1] // heads, rows] += by_entry

        return run

    def _launch_sums(
        self, step: ForwardStep, part: tuple[int, slice, slice], where: Places, keys: Tensor, found: Tensor
    ) -> Launch:
        """Prepare the launch for a part of the queries, a batch row, heads that share a list, and rows. keys:
        rows of the buffer that they see, -1 for none, [rows, width]; found: result, like keys"""
        b, heads, rows = part
        own, group = slice(b, b + 1), step.q.shape[1] // step.k.shape[1]
        share = heads.stop - heads.start
        kv_heads = slice(heads.start // group, -(-heads.stop // group))
        q, k = step.q[own, heads, rows], step.k[own, kv_heads]
        lse = self.lse[own, heads, rows].clone()  # aligned: another alignment would be another kernel
        dim, arch = q.shape[3], self.base.arch or architecture(q.device)
        tile = heads_of_tile(min(share, group), 1, selected_rows(arch, dim, q.dtype))
        config = selected("forward", arch, tile, dim, q.dtype)
        values = {
            **{name: view(x) for name, x in (("q", q), ("k", k), ("lse", lse))},
            "sums": found,
            "entries": opaque_fields(SelectedEntries(keys, 1, *keys.shape), "shares", "num_rows"),
            "places": opaque_fields(places_of_part(where, b, rows)),
            "score_mod": self.base.mods.score,
            "origin": Origin(opaque(self.base.first_row + b), opaque(self.base.first_head + heads.start)),
            "SCALE": self.base.scale,
            "GROUP": min(share, group),
            "SHARE": share,
            "TILING": QueryTiling(tile, 1, 1, 1),
            "BLOCK_M": config.BLOCK_M,
            "BLOCK_N": config.BLOCK_N,
            "QK": channels(dim, 128),
            "PRECISION": self.base.options.get("PRECISION", "ieee"),
        }
        kernel = selected_probabilities_kernel
        grid = check_grid(len(keys), 1, 1)
        return Launch(kernel, grid, [values[name] for name in kernel.arg_names], config, [])


def places_of_part(places: Places, b: int, rows: slice) -> Places:
    """Return the positions of some queries of a batch row, and of the buffer's rows."""
    queries, keys = (x[b % len(x)][None] for x in (places.queries, places.keys))
    count = rows.stop - rows.start
    return places._replace(
        queries=queries[:, rows], query_stride=0, keys=keys, key_stride=0, num_queries=count
    )

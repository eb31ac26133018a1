"""The Triton kernel of the probabilities of selected keys, as an engine whose forward steps write them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tritoncp.kernels.launch import Launch
from tritoncp.kernels.program_order import check_grid
from tritoncp.kernels.scores import Origin
from tritoncp.kernels.selected.attention import QueryTiling
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
        """Prepare the probabilities of the keys of a step."""

        def run() -> None:
            places = rows_of_positions(step.tables.kv_slots, self.pairs.mask.kv_len)
            keys = self._keys(step, places)
            found = torch.zeros_like(keys, dtype=self.lse.dtype)
            self._launch_sums(step, keys, found, places)()
            by_entry = found.unflatten(3, (-1, self.selected.block_size)).sum(4)
            self.sums.add_(by_entry.unflatten(1, (self.sums.shape[1], -1)).sum(2))

        return run

    def _keys(self, step: ForwardStep, places: Tensor) -> Tensor:
        """Return the keys of :class:`SelectedEntries`."""
        batch, heads, length, _ = step.q.shape
        own = range(self.base.first_head, self.base.first_head + heads)
        indices, height = self.selected.indices, self.selected.query_block
        count = len(list_heads(self.selected, self.pairs, own))
        rows, width = indices.shape[2] * height, indices.shape[3] * self.selected.block_size
        keys = torch.empty(batch, count, rows, width, dtype=torch.int32, device=step.q.device)
        blocks = keys.unflatten(2, (-1, height))
        for (b, share, at), chosen, visible in visible_keys(self.selected, self.pairs, places, batch, own):
            blocks[b, share, at] = torch.where(visible, chosen.keys[:, None], -1).int()
        return keys[:, :, :length].contiguous()

    def _launch_sums(self, step: ForwardStep, keys: Tensor, found: Tensor, places: Tensor) -> Launch:
        """Prepare the launch. found: result, like keys"""
        q, k = step.q, step.k
        share, group = q.shape[1] // keys.shape[1], q.shape[1] // k.shape[1]
        dim, arch = q.shape[3], self.base.arch or architecture(q.device)
        heads = heads_of_tile(min(share, group), 1, selected_rows(arch, dim, q.dtype))
        config = selected("forward", arch, heads, dim, q.dtype)
        values = {
            **{name: view(x) for name, x in (("q", q), ("k", k), ("lse", self.lse))},
            "sums": found,
            "entries": SelectedEntries(keys, *keys.shape[1:]),
            "places": places_of(self.selected, places, q, k),
            "score_mod": self.base.mods.score,
            "origin": Origin(self.base.first_row, self.base.first_head),
            "SCALE": self.base.scale,
            "GROUP": group,
            "SHARE": share,
            "TILING": QueryTiling(heads, 1, 1, 1),
            "BLOCK_M": config.BLOCK_M,
            "BLOCK_N": config.BLOCK_N,
            "QK": channels(dim, 128),
            "PRECISION": self.base.options.get("PRECISION", "ieee"),
        }
        kernel = selected_probabilities_kernel
        grid = check_grid(q.shape[2], keys.shape[1], q.shape[0])
        return Launch(kernel, grid, [values[name] for name in kernel.arg_names], config, [])

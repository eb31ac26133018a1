"""What an indexer needs to know of the call of its layer: the mask, the ranks, and the packed documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tritoncp.api.reshard import unshard
from tritoncp.integrations.transformers.graph import checked_plan
from tritoncp.integrations.transformers.masks import ModelMask, create_mask, default_mask, mask_of_call
from tritoncp.integrations.transformers.whole_sequences import plan_of_call
from tritoncp.masks.mask import Mask, create_block_mask
from tritoncp.masks.mask_mod import MaskMod
from tritoncp.masks.varlen import Documents
from tritoncp.planning.plan import Plan


@dataclass(frozen=True)
class LayerCall:
    """The call of an attention layer with an indexer.

    block_mask: the plan of the layer, or on one process its mask of the whole sequence
    mesh:       the ranks of the plan
    documents:  index of the document of each token, [1 or B, S], if a row has several
    tokens:     which tokens of the whole sequence are no padding, bool [B, S]; None: all
    """

    block_mask: Plan | Mask
    mesh: Any = None
    documents: Tensor | None = None
    tokens: Tensor | None = None

    @property
    def mask(self) -> Mask:
        return self.block_mask.mask if isinstance(self.block_mask, Plan) else self.block_mask

    @property
    def length(self) -> int:
        """Tokens of the whole sequence."""
        return self.mask.kv_len

    def positions(self, device: torch.device) -> Tensor:
        """Return the position of each local query, -1 for padding: int64 [1 or B, rows]."""
        if isinstance(self.block_mask, Plan):
            return self.block_mask.positions.to(device)
        return torch.arange(self.length, device=device)[None]

    def gather(self, x: Tensor) -> Tensor:
        """Return the whole sequence of x [B, S_local, ...], without gradients."""
        if not isinstance(self.block_mask, Plan):
            return x
        return unshard(x.detach(), self.block_mask, self.mesh, dim=1, side="kv")

    def segments(self, device: torch.device) -> Tensor:
        """Return the index of the document of each token, int64 [1 or B, S], -1 for padding."""
        if self.documents is None:
            ids = torch.zeros(1, self.length, dtype=torch.int64, device=device)
        else:
            ids = self.documents.long().to(device)
        return ids if self.tokens is None else ids.masked_fill(~self.tokens.bool().to(device), -1)


def read_call(module: nn.Module, kwargs: dict[str, Any]) -> LayerCall | None:
    """Return what an indexer needs from the keyword arguments of its attention layer; None for a call that
    the indexer's own code serves, such as a step of generation."""
    mask, batch = kwargs.get("attention_mask"), kwargs.get("context_parallel") or plan_of_call(module)
    is_padding = isinstance(mask, Tensor) and mask.ndim == 2  # layers beside recurrent ones get no other mask
    if batch is not None:
        plan = checked_plan(batch, None if is_padding else mask, kwargs.get("position_ids"))
        return LayerCall(plan, batch.mesh, batch.documents, batch.attention_mask)
    has_cache = any(kwargs.get(name) is not None for name in ("past_key_values", "cache"))
    if isinstance(mask, Tensor) and is_padding and not has_cache:
        rows, length = mask.shape
        mask = create_mask(rows, length, length, attention_mask=mask)
    if not isinstance(mask, ModelMask):
        return None
    documents = None if mask.pattern is None else mask.pattern.documents
    cu = kwargs.get("cu_seq_lens_q")
    if cu is None:
        return LayerCall(mask.block_mask, None, documents, mask.attention_mask)
    mod = mask_of_call(mask, default_mask(True, None), cu, kwargs.get("cu_seq_lens_k"))
    assert isinstance(mod, MaskMod)
    documents = Documents.of("cu_seq_lens_q", cu, cu, mask.q_len).of_rows()[0][None].to(cu.device)
    return LayerCall(create_block_mask(mod, None, None, mask.q_len, mask.kv_len), None, documents)

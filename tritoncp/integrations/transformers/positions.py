"""Checks of position_ids, to detect a shard that is passed without its plan.

transformers reads packed documents from position_ids: a step other than +1 begins a document. The positions
of a shard in a plan's order have such steps too, so that the model would silently attend within pieces of the
shard. But documents begin at position 0; a piece that begins elsewhere is part of a larger sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tritoncp.core.bounded_cache import TensorCache
from tritoncp.integrations.transformers.masks import ModelMask

NO_PLAN = (
    "this looks like a shard without its plan. Pass all of shard_batch(batch, model.config, mesh) to the "
    "model, model(**batch); if the model does not pass keyword arguments on to its attention, call "
    "shard_batch(batch, model, mesh), with the model in place of its config"
)
_WHOLE = TensorCache(64)  # positions that passed the check: all layers get one tensor


def refuse_local_positions(mask: Any, position_ids: Tensor | None, from_start: bool) -> None:
    """Raise ValueError if a call without a plan has the positions of a shard. Checked only where there are
    several ranks; synchronises once for each tensor of positions, in inference mode in each layer.

    mask: mask of the call; with padding nothing is checked. from_start: whether there are no earlier keys
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    if position_ids is None and isinstance(mask, ModelMask) and mask.pattern is not None:
        position_ids = mask.pattern.positions
    unpadded = isinstance(mask, ModelMask) and mask.padding is None
    if position_ids is None or position_ids.ndim != 2 or not (unpadded and from_start):
        return
    if _WHOLE.find(id(position_ids), [position_ids]):
        return
    begins = torch.nn.functional.pad(position_ids.diff(dim=1) != 1, (1, 0), value=True)
    continuations = begins & (position_ids != 0)
    if bool(continuations.any()):
        row, column = (int(i) for i in continuations.nonzero()[0])
        raise ValueError(
            f"position_ids of row {row} continue at {int(position_ids[row, column])} in column {column}, "
            f"while documents begin at 0: {NO_PLAN}"
        )
    _WHOLE.keep(id(position_ids), [position_ids], True)

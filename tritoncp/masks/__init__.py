"""Masks of visible pairs of query and key: compact block masks, closed forms, classification of blocks.

May import: mods, core, kernels.
"""

from tritoncp.masks.classification.classify import masked_blocks
from tritoncp.masks.closed_forms import causal, document, prefix_lm, sliding_window
from tritoncp.masks.from_torch import from_block_mask
from tritoncp.masks.mask import Mask, create_block_mask, full_mask
from tritoncp.masks.mask_mod import MaskMod, and_masks, not_, or_masks
from tritoncp.masks.prefix_tree import tree
from tritoncp.masks.runs.block_runs import ABSENT, Kind, Runs

__all__ = [
    "ABSENT", "Kind", "Mask", "MaskMod", "Runs", "and_masks", "causal", "create_block_mask", "document",
    "from_block_mask", "full_mask", "masked_blocks", "not_", "or_masks", "prefix_lm", "sliding_window",
    "tree",
]  # fmt: skip

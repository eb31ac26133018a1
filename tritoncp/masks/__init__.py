"""Masks: which pairs of query and key are visible. Compact masks, closed forms, classification of blocks.

May import: mods, core, kernels.  Names are imported from their modules at first use, as in `tritoncp`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tritoncp.masks.block_runs import ABSENT as ABSENT
    from tritoncp.masks.block_runs import Kind as Kind
    from tritoncp.masks.block_runs import Runs as Runs
    from tritoncp.masks.classification.classify import masked_blocks as masked_blocks
    from tritoncp.masks.closed_forms import causal as causal
    from tritoncp.masks.closed_forms import document as document
    from tritoncp.masks.closed_forms import prefix_lm as prefix_lm
    from tritoncp.masks.closed_forms import sliding_window as sliding_window
    from tritoncp.masks.from_torch import from_block_mask as from_block_mask
    from tritoncp.masks.mask import Mask as Mask
    from tritoncp.masks.mask import create_block_mask as create_block_mask
    from tritoncp.masks.mask import full_mask as full_mask
    from tritoncp.masks.mask_mod import MaskMod as MaskMod
    from tritoncp.masks.mask_mod import and_masks as and_masks
    from tritoncp.masks.mask_mod import not_ as not_
    from tritoncp.masks.mask_mod import or_masks as or_masks

_NAMES = {
    "block_runs": ("ABSENT", "Kind", "Runs"),
    "classification.classify": ("masked_blocks",),
    "closed_forms": ("causal", "document", "prefix_lm", "sliding_window"),
    "from_torch": ("from_block_mask",),
    "mask": ("Mask", "create_block_mask", "full_mask"),
    "mask_mod": ("MaskMod", "and_masks", "not_", "or_masks"),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tritoncp.masks' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tritoncp.masks.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__

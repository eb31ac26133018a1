"""Context-parallel flex attention in Triton.

Names are looked up where they live when they are first used (PEP 562), so that `import tritoncp` costs
nothing and masks and plans can be made on a machine without Triton.

>>> import tritoncp
>>> "causal" in dir(tritoncp)
True
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tritoncp.api import flex_attention as flex_attention
    from tritoncp.api import make_plan as make_plan
    from tritoncp.api import positions as positions
    from tritoncp.api import shard as shard
    from tritoncp.api import unshard as unshard
    from tritoncp.balance import balancers as balancers
    from tritoncp.building import create_block_mask as create_block_mask
    from tritoncp.masks import Mask as Mask
    from tritoncp.masks import and_masks as and_masks
    from tritoncp.masks import causal as causal
    from tritoncp.masks import document as document
    from tritoncp.masks import from_block_mask as from_block_mask
    from tritoncp.masks import full_mask as full_mask
    from tritoncp.masks import not_ as not_
    from tritoncp.masks import or_masks as or_masks
    from tritoncp.masks import prefix_lm as prefix_lm
    from tritoncp.masks import sliding_window as sliding_window
    from tritoncp.packed import contiguous_to_dual_chunk as contiguous_to_dual_chunk
    from tritoncp.packed import dual_chunk_to_contiguous as dual_chunk_to_contiguous
    from tritoncp.packed import varlen_attention as varlen_attention
    from tritoncp.parallel import SAVE_OPS as SAVE_OPS
    from tritoncp.parallel import ContextParallel as ContextParallel
    from tritoncp.parallel import checkpoint_policy as checkpoint_policy
    from tritoncp.plan import Plan as Plan
    from tritoncp.plan_cache import plan_cache_clear as plan_cache_clear
    from tritoncp.plan_cache import plan_cache_info as plan_cache_info
    from tritoncp.varlen import varlen_mask as varlen_mask
    from tritoncp.world import simulate as simulate

__version__ = "0.1.0"

_WHERE = {
    "api": ("flex_attention", "make_plan", "positions", "shard", "unshard"),
    "balance": ("balancers",),
    "building": ("create_block_mask",),
    "masks": (
        "Mask",
        "and_masks",
        "causal",
        "document",
        "from_block_mask",
        "full_mask",
        "not_",
        "or_masks",
        "prefix_lm",
        "sliding_window",
    ),
    "packed": ("contiguous_to_dual_chunk", "dual_chunk_to_contiguous", "varlen_attention"),
    "parallel": ("SAVE_OPS", "ContextParallel", "checkpoint_policy"),
    "plan": ("Plan",),
    "plan_cache": ("plan_cache_clear", "plan_cache_info"),
    "varlen": ("varlen_mask",),
    "world": ("simulate",),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tritoncp' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"tritoncp.{_MODULE_OF[name]}"), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

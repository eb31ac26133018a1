"""Context-parallel flex attention in Triton.

Names are imported lazily from their modules (PEP 562), so that `import tritoncp` is fast, and masks and plans
can be made on a machine without Triton.

>>> import tritoncp
>>> "causal" in dir(tritoncp)
True
"""

import importlib
import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from typing import TYPE_CHECKING, Any

from tritoncp._version import __version__ as __version__
from tritoncp.planning.late_binding import BOUND as _BOUND

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput as AuxOutput
    from torch.nn.attention.flex_attention import AuxRequest as AuxRequest
    from torch.nn.attention.flex_attention import BlockMask as BlockMask
    from torch.nn.attention.flex_attention import FlexKernelOptions as FlexKernelOptions
    from torch.nn.attention.flex_attention import create_mask as create_mask
    from torch.nn.attention.flex_attention import noop_mask as noop_mask

    from tritoncp.api.attention import flex_attention as flex_attention
    from tritoncp.api.masks import create_block_mask as create_block_mask
    from tritoncp.api.parallel import SAVE_OPS as SAVE_OPS
    from tritoncp.api.parallel import ContextParallel as ContextParallel
    from tritoncp.api.parallel import checkpoint_policy as checkpoint_policy
    from tritoncp.api.plans import make_plan as make_plan
    from tritoncp.api.reshard import reshard as reshard
    from tritoncp.api.reshard import unshard as unshard
    from tritoncp.api.roll import roll as roll
    from tritoncp.api.selected_keys import select_keys as select_keys
    from tritoncp.api.shards import positions as positions
    from tritoncp.api.shards import shard as shard
    from tritoncp.api.simulate import simulate as simulate
    from tritoncp.api.trees import pack_trajectories as pack_trajectories
    from tritoncp.api.trees import tree_edges as tree_edges
    from tritoncp.api.varlen import contiguous_to_dual_chunk as contiguous_to_dual_chunk
    from tritoncp.api.varlen import dual_chunk_to_contiguous as dual_chunk_to_contiguous
    from tritoncp.api.varlen import varlen_attention as varlen_attention
    from tritoncp.call.plan_cache import plan_cache_clear as plan_cache_clear
    from tritoncp.call.plan_cache import plan_cache_info as plan_cache_info
    from tritoncp.masks.closed_forms import causal as causal
    from tritoncp.masks.closed_forms import document as document
    from tritoncp.masks.closed_forms import prefix_lm as prefix_lm
    from tritoncp.masks.closed_forms import sliding_window as sliding_window
    from tritoncp.masks.drafts import block_diffusion as block_diffusion
    from tritoncp.masks.drafts import draft_blocks as draft_blocks
    from tritoncp.masks.from_torch import from_block_mask as from_block_mask
    from tritoncp.masks.mask import Mask as Mask
    from tritoncp.masks.mask import full_mask as full_mask
    from tritoncp.masks.mask_mod import and_masks as and_masks
    from tritoncp.masks.mask_mod import not_ as not_
    from tritoncp.masks.mask_mod import or_masks as or_masks
    from tritoncp.masks.named import alibi as alibi
    from tritoncp.masks.named import softcap as softcap
    from tritoncp.masks.prefix_tree import tree as tree
    from tritoncp.masks.varlen import varlen_mask as varlen_mask
    from tritoncp.planning.balance import balancers as balancers
    from tritoncp.planning.packer import pack_batches as pack_batches
    from tritoncp.planning.packer import pack_stream as pack_stream
    from tritoncp.planning.plan import Plan as Plan
    from tritoncp.selection.selection import Selection as Selection
    from tritoncp.selection.selection import SelectionAuxOutput as SelectionAuxOutput
    from tritoncp.selection.selection import SelectionAuxRequest as SelectionAuxRequest


def _find_kernels() -> None:
    """Make `tritoncp.kernels` and `tritoncp.perf` importable: folders of the installed package, or in a
    checkout namespace packages beside it. Raises ImportError if they are missing."""
    package = os.path.dirname(os.path.abspath(__file__))
    checkout = os.path.dirname(package)
    if os.path.isfile(os.path.join(package, "kernels", "engine.py")):
        return
    if not os.path.isfile(os.path.join(checkout, "kernels", "engine.py")):
        raise ImportError(
            f"tritoncp has no kernels: neither {package}/kernels nor {checkout}/kernels has engine.py. "
            "Install from a complete checkout or archive of the repository (pip install .), or install a "
            "wheel"
        )
    for name in ("kernels", "perf"):
        spec = ModuleSpec(f"{__name__}.{name}", None, is_package=True)
        spec.submodule_search_locations = [os.path.join(checkout, name)]
        globals()[name] = sys.modules[spec.name] = module_from_spec(spec)


_find_kernels()
_BOUND["reports of plans"] = "tritoncp.report"

_WHERE = {
    "api.attention": ("flex_attention",),
    "api.plans": ("make_plan",),
    "api.reshard": ("reshard", "unshard"),
    "api.roll": ("roll",),
    "api.shards": ("positions", "shard"),
    "planning.balance": ("balancers",),
    "api.masks": ("create_block_mask",),
    "masks.mask": ("Mask", "full_mask"),
    "masks.mask_mod": ("and_masks", "not_", "or_masks"),
    "masks.closed_forms": ("causal", "document", "prefix_lm", "sliding_window"),
    "masks.drafts": ("block_diffusion", "draft_blocks"),
    "masks.from_torch": ("from_block_mask",),
    "masks.named": ("alibi", "softcap"),
    "api.trees": ("pack_trajectories", "tree_edges"),
    "api.varlen": ("contiguous_to_dual_chunk", "dual_chunk_to_contiguous", "varlen_attention"),
    "api.parallel": ("SAVE_OPS", "ContextParallel", "checkpoint_policy"),
    "planning.packer": ("pack_batches", "pack_stream"),
    "planning.plan": ("Plan",),
    "call.plan_cache": ("plan_cache_clear", "plan_cache_info"),
    "masks.prefix_tree": ("tree",),
    "masks.varlen": ("varlen_mask",),
    "api.simulate": ("simulate",),
    "api.selected_keys": ("select_keys",),
    "selection.selection": ("Selection", "SelectionAuxOutput", "SelectionAuxRequest"),
}
_MODULE_OF = {name: f"tritoncp.{module}" for module, names in _WHERE.items() for name in names}
__all__ = sorted(_MODULE_OF)
# The objects of torch, so that an import line from torch works with tritoncp.
_MODULE_OF |= dict.fromkeys(
    ("AuxOutput", "AuxRequest", "BlockMask", "FlexKernelOptions", "create_mask", "noop_mask"),
    "torch.nn.attention.flex_attention",
)


if not TYPE_CHECKING:  # type checkers take a module with this function to have every name

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'tritoncp' has no attribute {name!r}; it has {', '.join(__all__)}")
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = value  # later look-ups do not call this function
        return value


def _offer_operators(torch: Any) -> None:
    """Make ``torch.ops.tritoncp`` register all operators at its first use, for saved programs that are loaded
    before any call. torch: None if it is not imported"""
    if torch is None:
        return

    class Operators(torch._ops._OpNamespace):
        __module__ = "torch._ops"  # the names of operators follow from these

        def __getattr__(self, name: str) -> Any:
            if "tritoncp.graph.dispatch" not in sys.modules:  # the import registers them
                importlib.import_module("tritoncp.api.parallel")
            return super().__getattr__(name)

    torch.ops.tritoncp = Operators("tritoncp")


_offer_operators(sys.modules.get("torch"))


def __dir__() -> list[str]:
    """List public names, imported submodules and the names that every module has, without helpers of this
    file."""
    own = [
        name
        for name, x in globals().items()
        if name.startswith("__") or sys.modules.get(f"tritoncp.{name}") is x
    ]
    return sorted({*_MODULE_OF, *own})

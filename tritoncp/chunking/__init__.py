"""Graph chunking: a training graph cut by batch or sequence, through attention, so that the exchange of one
chunk can run under the compute of another.

The chunked graph is a plain ``torch.fx.GraphModule``. Every node that belongs to one chunk of a region has
``node.meta["custom"]["tritoncp_chunk"] = (region, index)``: the path of its module, as ``"layers.0"``, and
the chunk's number. Its other metadata are the original node's, ``meta["val"]`` has the chunk's sizes. Nodes
that cut, join and sum chunks, and nodes that all chunks share, have no such mark.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tritoncp.chunking.compile_pass import Pass as Pass
    from tritoncp.chunking.concrete import concretise as concretise
    from tritoncp.chunking.eager import Eager as Eager
    from tritoncp.chunking.report import Report as Report
    from tritoncp.chunking.rewrite import chunk as chunk
    from tritoncp.chunking.size_mark import mark as mark
    from tritoncp.chunking.streams.node_order import order as order
    from tritoncp.chunking.streams.timeline import Timeline as Timeline
    from tritoncp.chunking.streams.timeline import simulate as simulate

_NAMES = {
    "compile_pass": ("Pass",),
    "concrete": ("concretise",),
    "eager": ("Eager",),
    "streams.node_order": ("order",),
    "report": ("Report",),
    "rewrite": ("chunk",),
    "size_mark": ("mark",),
    "streams.timeline": ("Timeline", "simulate"),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tritoncp.chunking' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tritoncp.chunking.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__

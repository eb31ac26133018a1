"""Graph chunking: a training graph cut by batch or sequence, through attention, so that the exchange of one
chunk can run under the compute of another.

The chunked graph is a plain ``torch.fx.GraphModule``. Every node that belongs to one chunk of a region carries
``node.meta["custom"]["tritoncp_chunk"] = (region, index)``: the path of its module, as ``"layers.0"``, and the
chunk's number. Its other metadata are the original node's, ``meta["val"]`` has the chunk's sizes. Nodes that
cut, join and sum chunks, and nodes that all chunks share, have no such mark.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tritoncp.chunking.concrete import concretise as concretise
    from tritoncp.chunking.eager import Eager as Eager
    from tritoncp.chunking.mark import mark_size as mark
    from tritoncp.chunking.order import order as order
    from tritoncp.chunking.report import Report as Report
    from tritoncp.chunking.rewrite import Pass as Pass
    from tritoncp.chunking.rewrite import chunk as chunk
    from tritoncp.chunking.timeline import Timeline as Timeline
    from tritoncp.chunking.timeline import simulate as simulate

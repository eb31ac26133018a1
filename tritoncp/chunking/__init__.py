"""Graph chunking: splits a training graph into chunks of the batch or sequence, through attention, so that
the communication of one chunk can overlap with the computation of another.

The chunked graph is a plain ``torch.fx.GraphModule``. Every node that belongs to one chunk of a region has
``node.meta["custom"]["tritoncp_chunk"] = (region, index)``: the path of its module, as ``"layers.0"``, and
the chunk's index. Its other metadata are the original node's; ``meta["val"]`` has the chunk's sizes. Nodes
that cut, join and sum chunks, and nodes that all chunks share, have no such mark.
"""

from tritoncp.chunking.compile_pass import Pass
from tritoncp.chunking.concrete import concretise
from tritoncp.chunking.eager import Eager
from tritoncp.chunking.report import Report
from tritoncp.chunking.rewrite import chunk
from tritoncp.chunking.sizes import mark
from tritoncp.chunking.streams.node_order import order
from tritoncp.chunking.streams.timeline import Timeline, predict_timeline

__all__ = ["Eager", "Pass", "Report", "Timeline", "chunk", "concretise", "mark", "order", "predict_timeline"]

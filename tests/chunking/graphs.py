"""Graphs written node by node: an element has one byte, a byte of memory takes a second, a byte of a message
half a second."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from tritoncp.planning.costs.hardware import Hardware

UNIT = Hardware("unit", flops=1.0, bandwidth=2.0, latency=0.0, scattered=1.0, source="", memory=1.0)
ATEN, C10D = torch.ops.aten, torch.ops._c10d_functional


class Builder:
    """Builds a graph whose nodes have fake values, by running each op on fake tensors."""

    def __init__(self) -> None:
        self.graph, self.mode = Graph(), FakeTensorMode()

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.uint8) -> Node:
        """Add an input of the graph."""
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        """Add a call of an op."""
        node = self.graph.call_function(op, args, kwargs)
        values = torch.fx.node.map_arg((args, kwargs), lambda arg: arg.meta["val"])
        with self.mode:
            node.meta["val"] = op(*values[0], **values[1])
        return node

    def send(self, x: Node) -> Node:
        """Start an exchange between two ranks."""
        half = x.meta["val"].shape[0] // 2
        return self.call(C10D.all_to_all_single.default, x, [half, half], [half, half], "pair")

    def wait(self, x: Node) -> Node:
        """Wait for an exchange."""
        return self.call(C10D.wait_tensor.default, x)

    def module(self, *outputs: Node) -> GraphModule:
        """Finish the graph."""
        self.graph.output(outputs)
        return GraphModule(torch.nn.Module(), self.graph)


def names(gm: GraphModule) -> list[str]:
    """List the names of a graph's nodes in their order."""
    return [node.name for node in gm.graph.nodes]

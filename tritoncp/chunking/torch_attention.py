"""Chunks of torch's flex attention by batch: each chunk gets its rows of the mask's block lists, and its mods
get batch indices of the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from tritoncp.chunking.regions import is_backward

forward_op, backward_op = (
    torch.ops.higher_order.flex_attention,
    torch.ops.higher_order.flex_attention_backward,
)

# Indices of arguments of both ops: the mask's block lists and mask_mod; captures of the mods.
BLOCKS, SCORE_CAPTURES, MASK_CAPTURES = -5, -2, -1
SCORE_MODS = {forward_op: (3,), backward_op: (7, 8)}  # argument indices of the score_mod and its gradient


def is_torch_attention(node: Node) -> bool:
    return node.target in SCORE_MODS


def captures(node: Node) -> set[Node]:
    """Return the nodes that the mods of an attention capture, which all chunks share."""
    args: Any = node.args
    return {x for place in (SCORE_CAPTURES, MASK_CAPTURES) for x in args[place] if isinstance(x, Node)}


def chunk_arguments(rewrite: Any, node: Node, c: int) -> tuple[Any, ...]:
    """Return the arguments of the attention of chunk c."""
    own: Any = node.args
    args: list[Any] = list(map_arg(own, lambda x: rewrite.chunk_node(x, c)))
    for place in (SCORE_CAPTURES, MASK_CAPTURES):
        args[place] = tuple(map_arg(own[place], rewrite.whole_node))
    *lists, mask_mod = args[BLOCKS]
    lists = [_rows_of_list(rewrite, x, c) if isinstance(x, Node) else x for x in lists]
    mask_mods, args[MASK_CAPTURES] = _shift(rewrite, node, [mask_mod], 0, args[MASK_CAPTURES], c)
    args[BLOCKS] = (*lists, *mask_mods)
    places = SCORE_MODS[node.target]
    mods, args[SCORE_CAPTURES] = _shift(
        rewrite, node, [args[place] for place in places], 1, args[SCORE_CAPTURES], c
    )
    for place, mod in zip(places, mods, strict=True):
        args[place] = mod
    return tuple(args)


def _rows_of_list(rewrite: Any, x: Node, c: int) -> Node:
    """Return chunk c's batch rows of a tensor of the mask; the tensor itself if it has one row for all."""
    value = x.meta.get("val")
    if not isinstance(value, Tensor) or rewrite.cut.carries(x) or value.shape[0] == 1:
        return x
    count = rewrite.sizes.chunks
    return rewrite.once(("rows", x), lambda: rewrite.split(x, 0, 1, count, {}))[c]


def _shift(
    rewrite: Any, node: Node, mods: list[Node], place: int, captures: tuple[Any, ...], c: int
) -> tuple[list[Node], tuple[Any, ...]]:
    """Return mods and captures that get batch indices of the whole batch: if a mod reads the batch index, the
    chunk's first row becomes another capture, which is added to the index.

    place: index of the batch index among the inputs of each mod
    """
    graphs = [rewrite.graph.owning_module.get_submodule(mod.target) for mod in mods]
    if not any(graph.graph.find_nodes(op="placeholder")[place].users for graph in graphs):
        return mods, captures
    first = rewrite.once(("first row", c, is_backward(node)), lambda: _first_row(rewrite, node, c))
    shifted = [
        rewrite.once(("shifted", mod), lambda mod=mod, graph=graph: _add_shifted(rewrite, mod, graph, place))
        for mod, graph in zip(mods, graphs, strict=True)
    ]
    return shifted, (*captures, first)


def _first_row(rewrite: Any, node: Node, c: int) -> Node:
    """Add a 0-d tensor with the index of chunk c's first batch row."""
    query: Any = node.args[0]
    number = rewrite.first_row(c, rewrite.cut.factor(query, 0))
    options = {"dtype": torch.int32, "device": query.meta["val"].device, "pin_memory": False}
    first: Node = rewrite.add_call(
        torch.ops.aten.full.default, ([], number), rewrite.stage_of(node), **options
    )
    return first


def _add_shifted(rewrite: Any, mod: Node, module: GraphModule, place: int) -> Node:
    """Add a copy of a mod with one more input, which is added to its batch index. (The gradient function of a
    mod gets one more result, None.)"""
    module = copy.deepcopy(module)
    graph = module.graph
    inputs, output = graph.find_nodes(op="placeholder"), graph.output_node()
    with graph.inserting_after(inputs[-1]):
        first = graph.placeholder("first_row")
    with graph.inserting_after(first):
        index = graph.call_function(torch.ops.aten.add.Tensor, (inputs[place], first))
    inputs[place].replace_all_uses_with(index, delete_user_cb=lambda user: user is not index)
    if isinstance(output.args[0], list | tuple):
        output.args = ([*output.args[0], None],)
    module.recompile()
    name = f"{mod.target}_from_row"
    rewrite.graph.owning_module.add_submodule(name, module)
    return rewrite.add_node("get_attr", name)

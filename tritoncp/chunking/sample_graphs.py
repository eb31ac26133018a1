"""Joint graphs of a small mixture-of-experts transformer, whole and cut eagerly, traced on fake tensors.

They serve the simulator's figures: no process group, no weights and no device are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from tritoncp.api.attention import flex_attention
from tritoncp.api.plans import make_plan
from tritoncp.chunking.timeline import chunk_of
from tritoncp.masks.create import create_block_mask

CUTS = ("none", "experts", "batch", "sequence")


@dataclass(frozen=True)
class Model:
    """The sizes of a transformer whose experts are spread over ranks, each with its own tokens.

    tokens:  of one batch row on a rank
    ranks:   that exchange tokens; each has experts / ranks of the experts
    topk:    experts of a token
    hidden:  of an expert's feed-forward net
    """

    tokens: int = 4096
    batch: int = 2
    layers: int = 2
    dim: int = 2048
    heads: int = 16
    experts: int = 64
    topk: int = 6
    hidden: int = 1408
    ranks: int = 8

    def parameters(self) -> list[list[Tensor]]:
        """Make the parameters of each layer: projections of attention in and out, router, experts up and
        down."""
        here, dim = self.experts // self.ranks, self.dim
        sizes = (
            (dim, 3 * dim),
            (dim, dim),
            (dim, self.experts),
            (here, dim, 2 * self.hidden),
            (here, self.hidden, dim),
        )
        return [[torch.empty(size, dtype=torch.bfloat16) for size in sizes] for _ in range(self.layers)]


class Exchange(torch.autograd.Function):
    """An all-to-all of equal pieces; its gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return _exchange(x, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchange(grads[0].contiguous(), ctx.ranks), None


def _exchange(x: Tensor, ranks: int) -> Tensor:
    pieces = [len(x) // ranks] * ranks
    sent = torch.ops._c10d_functional.all_to_all_single(x, pieces, pieces, "experts")
    return torch.ops._c10d_functional.wait_tensor(sent)


def trace_model(model: Model, cut: str = "none", chunks: int = 2) -> GraphModule:
    """Trace loss and gradients of the model as one graph.

    cut: "none" for the whole; "batch" or "sequence" for all layers run once a chunk; "experts" for attention
        whole and the experts once a chunk of the sequence
    """
    if cut not in CUTS:
        raise ValueError(f"cut={cut!r}: a graph is cut by one of {', '.join(CUTS)}")
    runs = cut_plans(model, cut, chunks)

    def step(parameters: list[list[Tensor]], x: Tensor) -> list[Tensor]:
        leaves = [[p.detach().requires_grad_() for p in layer] for layer in parameters]
        start = x.detach().requires_grad_()
        parts = (
            list(start.chunk(chunks, 0 if cut == "batch" else 1)) if cut in ("batch", "sequence") else [start]
        )
        for layer in leaves:
            parts = run_layer(model, layer, parts, runs, chunks if cut == "experts" else 1)
        loss = torch.stack([part.float().square().sum() for part in parts]).sum()
        flat = [start, *(p for layer in leaves for p in layer)]
        return [loss.detach(), *torch.autograd.grad(loss, flat)]

    with FakeTensorMode(), fx_traceback.preserve_node_meta():
        x = torch.empty(model.batch, model.tokens, model.dim, dtype=torch.bfloat16)
        gm = make_fx(step)(model.parameters(), x)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    if cut != "none":
        _mark_backward(gm)
    return gm


def _mark_backward(gm: GraphModule) -> None:
    """Give each node without a mark the chunk of its inputs, if all marked ones are of one chunk. Layers mark
    their forward nodes while they are traced."""
    for node in gm.graph.nodes:
        chunks = {chunk_of(arg) for arg in node.all_input_nodes} - {None}
        if chunk_of(node) is None and len(chunks) == 1 and node.op != "output":
            node.meta["custom"] = {"tritoncp_chunk": chunks.pop()}


def cut_plans(model: Model, cut: str, chunks: int) -> list[Any]:
    """Make the plan of each part's attention, causal: queries of a chunk against keys up to its end."""
    parts, plans = chunks if cut == "sequence" else 1, []
    for part in range(parts):
        rows = model.tokens // parts
        mod, keys = _causal_from(part * rows), (part + 1) * rows
        plans.append(make_plan(create_block_mask(mod, 1, 1, rows, keys), world_size=1, rank=0))
    return plans


def _causal_from(first: int) -> Any:
    """Return the causal mask of queries whose first one is at place ``first`` of the keys."""

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q + first >= kv

    return mask


def run_layer(
    model: Model, layer: Sequence[Tensor], parts: list[Tensor], plans: Sequence[Any], pieces: int
) -> list[Tensor]:
    """Run a layer once a part, and its experts once a piece of each part. Later parts of a sequence attend to
    the keys of earlier ones."""
    results: list[Tensor] = []
    past: list[Tensor] = []  # keys and values of each part so far, stacked
    for at, x in enumerate(parts):
        plan = plans[at if len(plans) > 1 else 0]
        with mark_chunk(at, len(parts)):
            hidden = run_attention(model, layer[:2], x, past if len(plans) > 1 else [], plan)
        pieces_of_x = list(hidden.chunk(pieces, 1))
        outs = []
        for index, piece in enumerate(pieces_of_x):
            with mark_chunk(at + index, max(len(parts), pieces)):
                outs.append(piece + run_experts(model, layer[2:], piece))
        results.append(torch.cat(outs, 1) if pieces > 1 else outs[0])
    return results


def mark_chunk(index: int, count: int) -> AbstractContextManager[Any]:
    """Mark the nodes traced in this context as those of a chunk, if there are several."""
    if count == 1:
        return nullcontext()
    return fx_traceback.annotate({"tritoncp_chunk": ("layers", index)})


def run_attention(model: Model, layer: Sequence[Tensor], x: Tensor, past: list[Tensor], plan: Any) -> Tensor:
    """Add attention to a part of the tokens. Its keys and values join ``past``, which it attends to."""
    project_in, project_out = layer
    qkv = (_normalise(x) @ project_in).view(*x.shape[:2], 3, model.heads, -1)
    q, *_ = (one.transpose(1, 2) for one in qkv.unbind(2))
    past.append(qkv[:, :, 1:])
    kv = torch.cat(past, 1) if len(past) > 1 else past[0]
    k, v = (one.transpose(1, 2) for one in kv.unbind(2))
    out = flex_attention(q, k, v, block_mask=plan)
    return x + out.transpose(1, 2).reshape(x.shape) @ project_out


def _normalise(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def run_experts(model: Model, parameters: Sequence[Tensor], x: Tensor) -> Tensor:
    """Send every token to its experts and back, and sum their results by the router's weights. Experts get
    equally many tokens, whatever the router says, so that no size depends on data."""
    router, up, down = parameters
    tokens = _normalise(x).flatten(0, 1)
    weights, choice = (tokens @ router).softmax(-1).topk(model.topk, -1)
    places = choice.flatten().argsort()
    rows = places // model.topk
    sent = Exchange.apply(tokens.index_select(0, rows), model.ranks)
    here = model.experts // model.ranks
    groups = sent.view(model.ranks, here, -1, model.dim).transpose(0, 1).reshape(here, -1, model.dim)
    gate, value = torch.bmm(groups, up).chunk(2, -1)
    result = torch.bmm(F.silu(gate) * value, down)
    result = result.view(here, model.ranks, -1, model.dim).transpose(0, 1).reshape(-1, model.dim)
    back = Exchange.apply(result, model.ranks) * weights.flatten()[places][:, None]
    return torch.zeros_like(tokens).index_add(0, rows, back).view(x.shape)

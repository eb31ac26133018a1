"""Joint graphs of a small mixture-of-experts transformer, whole and cut by the pass.

No process group, no weights and no device are needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import default_partition
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from tritoncp.api.attention import flex_attention
from tritoncp.chunking.report import Report
from tritoncp.chunking.rewrite import chunk
from tritoncp.chunking.streams.value_sizes import on_meta, value_of
from tritoncp.masks.closed_forms import causal

CUTS = {
    "experts": ("layers.*.experts", "seq"),
    "batch": ("layers.*", "batch"),
    "sequence": ("layers.*", "seq"),
}


@dataclass(frozen=True)
class Model:
    """The sizes of a transformer whose experts are spread over ranks, each with its own tokens.

    tokens:  of one batch row on a rank
    ranks:   that exchange tokens; each has experts / ranks of the experts
    topk:    experts of a token
    hidden:  of an expert's feed-forward net
    """

    tokens: int = 4096
    batch: int = 4
    layers: int = 2
    dim: int = 2048
    heads: int = 16
    experts: int = 64
    topk: int = 6
    hidden: int = 1408
    ranks: int = 8


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


class Attention(nn.Module):
    """Causal attention of [B, S, dim], with its norm before."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.heads = model.heads
        self.project_in = _parameter(model.dim, 3 * model.dim)
        self.project_out = _parameter(model.dim, model.dim)

    def forward(self, x: Tensor) -> Tensor:
        qkv = (_normalise(x) @ self.project_in).unflatten(-1, (3, self.heads, -1))
        q, k, v = (one.transpose(1, 2) for one in qkv.unbind(2))
        out = flex_attention(q, k, v, block_mask=causal())
        return out.transpose(1, 2).flatten(2) @ self.project_out


class Experts(nn.Module):
    """Routed experts of [B, S, dim], with their norm before. Experts get equally many tokens, whatever the
    router says, so that no size depends on data."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        here = model.experts // model.ranks
        self.router = _parameter(model.dim, model.experts)
        self.up = _parameter(here, model.dim, 2 * model.hidden)
        self.down = _parameter(here, model.hidden, model.dim)

    def forward(self, x: Tensor) -> Tensor:
        """Send every token to its experts and back, and sum their results by the router's weights."""
        model, here = self.model, len(self.up)
        tokens = _normalise(x).flatten(0, 1)
        weights, choice = (tokens @ self.router).softmax(-1).topk(model.topk, -1)
        places = choice.flatten().argsort()
        rows = places // model.topk
        sent = Exchange.apply(tokens.index_select(0, rows), model.ranks)
        groups = sent.view(model.ranks, here, -1, model.dim).transpose(0, 1).reshape(here, -1, model.dim)
        gate, value = torch.bmm(groups, self.up).chunk(2, -1)
        result = torch.bmm(F.silu(gate) * value, self.down)
        result = result.view(here, model.ranks, -1, model.dim).transpose(0, 1).reshape(-1, model.dim)
        back = Exchange.apply(result, model.ranks) * weights.flatten()[places][:, None]
        return torch.zeros_like(tokens).index_add(0, rows, back).view(x.shape)


class Layer(nn.Module):
    """Attention and experts, each added to its input."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.attention, self.experts = Attention(model), Experts(model)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.experts(x)


class Transformer(nn.Module):
    """The loss of [B, S, dim] after all layers."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().sum()


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta"))


def _normalise(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def trace_model(model: Model, cut: str = "sequence") -> GraphModule:
    """Trace loss and gradients of the model as one graph by Dynamo and AOTAutograd on meta tensors; its batch
    or sequence is a symbol, so that the pass can cut it."""
    if cut not in CUTS:
        raise ValueError(f"cut={cut!r}: a graph is cut by one of {', '.join(CUTS)}")
    graphs: list[GraphModule] = []

    def partition(gm: GraphModule, inputs: Any, **kwargs: Any) -> Any:
        graphs.append(gm)
        return default_partition(gm, inputs, **kwargs)

    def compiler(gm: GraphModule, inputs: Any) -> Any:
        outputs: Any = gm.graph.output_node().args[0]
        values = [value_of(x) if isinstance(x, Node) else x for x in outputs]
        return make_boxed_func(lambda *args: [on_meta(value) for value in values])  # nothing is computed

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)
    x = _parameter(model.batch, model.tokens, model.dim).detach().requires_grad_()
    torch._dynamo.reset()  # it limits how often one class of modules is compiled
    torch._dynamo.mark_dynamic(x, 0 if cut == "batch" else 1)
    torch.compile(Transformer(model), backend=backend, fullgraph=True)(x).backward()
    return graphs[0]


def cut_model(model: Model, cut: str, chunks: int = 2) -> tuple[GraphModule, Report]:
    """Trace the model as one graph, cut it, and return it with the report of the pass.

    cut: "batch" or "sequence" for all layers; "experts" for the experts alone, by sequence
    """
    gm = trace_model(model, cut)
    region, dim = CUTS[cut]
    return gm, chunk(gm, region, dim=dim, chunks=chunks)

"""Transformer blocks shaped as Llama-3's and DeepSeek-V3's debug models, and their joint graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor, nn
from torch.fx import Interpreter, Node
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from tritoncp import flex_attention
from tritoncp.chunking import Eager


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. experts: 0 for a dense block; dispatch: "dense" or "sorted"."""

    width: int = 16
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 8
    hidden: int = 24
    layers: int = 1
    experts: int = 0
    top_k: int = 2
    dispatch: str = "dense"
    biased: bool = False


class Attention(nn.Module):
    """Rotary grouped-query attention of [B, S, width], between the ranks of ``mesh`` if it is set."""

    mesh: Any = None

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.query = nn.Linear(shape.width, shape.heads * shape.head_dim, bias=False)
        self.key = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.value = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.out = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=False)

    def forward(self, x: Tensor, turn: Tensor, mask: Any, score: Any = None) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (
            part.view(b, s, -1, self.shape.head_dim) for part in (self.query(x), self.key(x), self.value(x))
        )
        q, k = rotate(q, turn), rotate(k, turn)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        out = flex_attention(q, k, v, score, mask, enable_gqa=True, mesh=self.mesh)
        return self.out(out.transpose(1, 2).reshape(b, s, -1))


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turn the pairs of x [B, S, H, D] by angles [S, D / 2] or [B, S, D / 2]."""
    turn = turn.unsqueeze(-2)
    a, b = x.chunk(2, -1)
    return torch.cat([a * turn.cos() - b * turn.sin(), a * turn.sin() + b * turn.cos()], -1)


class MLP(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Routed experts with a counter of tokens, and a bias of the router that reads it if ``shape.biased``."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.up = nn.Parameter(torch.randn(shape.experts, shape.width, shape.hidden) * 0.2)
        self.down = nn.Parameter(torch.randn(shape.experts, shape.hidden, shape.width) * 0.2)
        self.register_buffer("tokens", torch.zeros(shape.experts))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        shape = self.shape
        rows = x.reshape(-1, shape.width)
        scores = self.router(rows).float().sigmoid()
        bias = -0.01 * self.tokens if shape.biased else torch.zeros_like(self.tokens)
        top = (scores + bias).topk(shape.top_k, -1).indices
        weights = scores.gather(1, top).to(x.dtype)
        chosen = F.one_hot(top, shape.experts)
        counts = chosen.sum((0, 1))
        with torch.no_grad():
            self.tokens.add_(counts)
            self.calls.add_(1)
        if shape.dispatch == "dense":
            gates = (chosen.to(x.dtype) * weights[..., None]).sum(1)  # [rows, experts]
            hidden = F.silu(torch.einsum("rw,ewh->erh", rows, self.up))
            out = torch.einsum("erh,ehw,re->rw", hidden, self.down, gates)
        else:
            out = self.dispatch_sorted(rows, top, weights, counts)
        return out.view_as(x)

    def dispatch_sorted(self, rows: Tensor, top: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        order = top.flatten().argsort(stable=True)
        token = order // self.shape.top_k
        sizes = counts.tolist()
        parts = rows[token].split(sizes)
        results = [F.silu(part @ up) @ down for part, up, down in zip(parts, self.up, self.down)]
        values = torch.cat(results) * weights.flatten()[order][:, None]
        return torch.zeros_like(rows).index_add(0, token, values)


class Block(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.before_attention = nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.before_mlp = nn.RMSNorm(shape.width)
        self.mlp = Experts(shape) if shape.experts else MLP(shape)

    def forward(self, x: Tensor, turn: Tensor, mask: Any, score: Any = None) -> Tensor:
        x = x + self.attention(self.before_attention(x), turn, mask, score)
        return x + self.mlp(self.before_mlp(x))


class Model(nn.Module):
    """Blocks between two projections of [B, S, width]; ``run`` may replace a layer's call."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.first = nn.Linear(shape.width, shape.width, bias=False)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)

    def forward(self, x: Tensor, turn: Tensor, mask: Any, score: Any = None) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, turn, mask, score)
        return self.norm(x)


# Functions of x [B, S, 16] that read neither B nor S.
ROW_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "rms norm": lambda x: F.rms_norm(x, x.shape[2:]),
    "layer norm": lambda x: F.layer_norm(x, x.shape[2:]),
    "softmax": lambda x: x.softmax(-1),
    "log-sum-exp": lambda x: x - x.logsumexp(-1, keepdim=True),
    "deviation": lambda x: x / x.std(-1, keepdim=True),
    "masked": lambda x: torch.where(x > 0, x, 0),
    "running sum": lambda x: x.cumsum(-1),
    "product": lambda x: (x.unflatten(-1, (4, 4)) @ x.unflatten(-1, (4, 4)).mT).flatten(2),
    "heads": lambda x: x.unflatten(-1, (2, -1)).transpose(1, 2).contiguous().sin().transpose(1, 2).flatten(2),
    "tokens first": lambda x: x.transpose(0, 1).contiguous().sin().transpose(0, 1),
    "one list of tokens": lambda x: x.flatten(0, 1).sin().view_as(x),
    "first channel": lambda x: x[..., :1].expand_as(x),
    "halves": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "gate": lambda x: F.glu(x.repeat(1, 1, 2)),
    "largest channels": lambda x: torch.zeros_like(x).scatter(-1, *x.topk(3, -1)[::-1]),
}


def in_chunks(model: nn.Module, chunks: int, dim: str) -> Any:
    """Return a copy of a model, each of whose layers runs in chunks without a graph."""
    eager: Any = copy.deepcopy(model)
    eager.layers = nn.ModuleList(Eager(layer, chunks, dim) for layer in eager.layers)
    return eager


class CheckedGraph(Interpreter):
    """Runs a graph, and compares dtype, sizes and strides of each tensor with those in its node's metadata,
    by which compilers of a graph place memory."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.sizes: dict[Any, int] = {}
        return super().run(*args, **kwargs)

    def run_node(self, node: Node) -> Any:
        result = super().run_node(node)
        if node.op == "output" or "val" not in node.meta:
            return result
        leaves = tree_leaves(node.meta["val"]), tree_leaves(result)
        for fake, value in zip(*leaves, strict="tritoncp" in str(node.target)):
            sizes = zip(fake.shape, value.shape) if isinstance(value, Tensor) else [(fake, value)]
            for size, number in sizes:
                if isinstance(size, SymInt) and size.node.expr.is_Symbol:
                    self.sizes.setdefault(size.node.expr, int(number))
            assert not isinstance(value, Tensor) or fake.dtype == value.dtype, node.format_node()
            if isinstance(value, Tensor) and value.numel():
                for d, size in enumerate(value.shape):
                    assert self.is_number(fake.shape[d], size), node.format_node()
                    assert size == 1 or self.is_number(fake.stride(d), value.stride(d)), node.format_node()
        return result

    def is_number(self, size: Any, number: int) -> bool:
        """Return whether a size is a number, or consists of symbols that the graph reads."""
        expr = size.node.expr.xreplace(self.sizes) if isinstance(size, SymInt) else size
        return expr == number or bool(getattr(expr, "free_symbols", ()))


def compiled(
    model: nn.Module,
    rewrite: Callable[[torch.fx.GraphModule], Any],
    *,
    dynamic: bool | None = None,
    finish: Callable[[torch.fx.GraphModule], Any] = lambda gm: None,
) -> Callable[..., Any]:
    """Compile a model by Dynamo and AOTAutograd: ``rewrite`` edits its joint graph, ``finish`` its forward
    and backward graphs, which then run eagerly as :class:`CheckedGraph`."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import default_partition

    def partition(gm: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        rewrite(gm)
        return default_partition(gm, inputs, **kwargs)

    def keep(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        finish(gm)
        return make_boxed_func(CheckedGraph(gm).run)

    def infer(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        rewrite(gm)
        return keep(gm, inputs)

    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, inference_compiler=infer, partition_fn=partition
    )
    return torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)

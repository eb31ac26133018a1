"""The transformer of the demo: RMSNorm, rotary positions, grouped query heads, a gated MLP."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the model. Every query head has a different ALiBi slope; two query heads share a KV head."""

    vocabulary: int = 256  # bytes
    layers: int = 2
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    hidden: int = 128


class Layer(nn.Module):
    def __init__(self, shape: ModelShape):
        super().__init__()
        self.shape = shape
        heads = shape.heads + 2 * shape.kv_heads
        self.before_attention = nn.RMSNorm(shape.width)
        self.qkv = nn.Linear(shape.width, heads * shape.head_dim, bias=False)
        self.out = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=False)
        self.before_mlp = nn.RMSNorm(shape.width)
        self.up = nn.Linear(shape.width, 2 * shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], attend: Attention) -> Tensor:
        x = x + self.attention(self.before_attention(x), turn, attend)
        gate, value = self.up(self.before_mlp(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)

    def attention(self, x: Tensor, turn: tuple[Tensor, Tensor], attend: Attention) -> Tensor:
        s = self.shape
        heads = rearrange(self.qkv(x), "b s (h d) -> b h s d", d=s.head_dim)  # h: query, key and value heads
        q, k, v = heads.split([s.heads, s.kv_heads, s.kv_heads], 1)
        out = attend(rotate(q, turn), rotate(k, turn), v)  # [B, Hq, S_local, D]
        return self.out(rearrange(out, "b h s d -> b s (h d)"))


class Transformer(nn.Module):
    """The model, which maps bytes to logits of the next byte. A shard is an ordinary batch: only `positions`
    and `attend` differ."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attention) -> Tensor:
        """Return logits [B, S_local, V]. tokens: int64 [B, S_local]; positions: int64 [B or 1, S_local],
        global"""
        turn = angles(positions, self.shape.head_dim)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, turn, attend)
        return self.head(self.norm(x))


def angles(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the rotary angles, each [B or 1, 1, S_local, D / 2]."""
    rate = 10000.0 ** (-torch.arange(0, head_dim, 2, device=positions.device) / head_dim)
    angle = positions[:, None, :, None] * rate
    return angle.cos(), angle.sin()


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = turn
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

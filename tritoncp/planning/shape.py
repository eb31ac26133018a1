"""The shape of an attention layer, by which costs and memory are predicted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The shape of one attention layer. The ranking of schedules depends mainly on heads / kv_heads."""

    batch: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    v_head_dim: int = 128
    itemsize: int = 2

    @property
    def row(self) -> int:
        """Elements of one token's K and V, over the batch."""
        return self.batch * self.kv_heads * (self.head_dim + self.v_head_dim)

"""Train mixture of block attention (MoBA), on several ranks and in one process, and compare the two.

    torchrun --nproc-per-node 4 examples/block_selection.py

Each head of a query attends to the block of keys that the query is in, and to the KEPT - 1 other blocks whose
mean key has the largest product with the query: queries and keys of the attention are the indexer too.
"""

from functools import partial

from einops import rearrange
from sparse_attention import compare, train_layers
from torch import Tensor
from train_loop import HEADS, Layer, launch, rotate

import tritoncp

BLOCK, KEPT = 32, 4


class BlockLayer(Layer):
    """Attention to the blocks of keys that each head chooses, then an MLP."""

    def attention(self, x: Tensor, positions: Tensor, attend: partial) -> Tensor:
        heads = rearrange(self.qkv(self.attention_norm(x)), "b s (h qkv d) -> qkv b h s d", qkv=3, h=HEADS)
        query, key, value = rotate(heads[0], positions), rotate(heads[1], positions), heads[2]
        chosen = tritoncp.select_keys(
            query, key, top=KEPT, block_size=BLOCK, activation="identity", **attend.keywords
        )  # the query's own block is always chosen
        out = attend(query, key, value, selected=chosen)
        return x + self.out(rearrange(out, "b h s d -> b s (h d)"))


train = partial(train_layers, BlockLayer)


if __name__ == "__main__":
    launch(partial(compare, train))

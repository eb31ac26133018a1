"""Train sparse attention as in DeepSeek-V3.2, on several ranks and in one process, and compare the two.

    torchrun --nproc-per-node 4 examples/sparse_attention.py

An indexer of small heads chooses KEPT keys for each query: `tritoncp.select_keys` compares the query with all
keys that the mask shows, whichever rank has them, and `tritoncp.flex_attention` attends to the chosen ones.
Of equal scores the lower position is chosen: any number of ranks chooses the same keys. The weights of the
indexer stay as they are: its choice has no gradient.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor, nn
from train_loop import HEADS, SIZE, WIDTH, Decoder, Layer, Result, add_up, batch_of, launch, loss_sum, rotate

import tritoncp

KEPT, INDEX_HEADS, INDEX_WIDTH = 64, 4, 16


class SparseLayer(Layer):
    """Attention to the keys that an indexer chooses, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.index_query = nn.Linear(WIDTH, INDEX_HEADS * INDEX_WIDTH).requires_grad_(False)
        self.index_key = nn.Linear(WIDTH, INDEX_WIDTH).requires_grad_(False)
        self.index_weights = nn.Linear(WIDTH, INDEX_HEADS).requires_grad_(False)

    def choose(self, x: Tensor, positions: Tensor, attend: partial) -> tritoncp.Selection:
        """Return the KEPT best keys of each query of x [B, S_local, WIDTH]; all heads share them."""
        query = rearrange(self.index_query(x), "b s (h d) -> b h s d", h=INDEX_HEADS)
        query, key = (rotate(part, positions) for part in (query, self.index_key(x)[:, None]))
        weights = self.index_weights(x).transpose(1, 2)
        return tritoncp.select_keys(query, key, weights, top=KEPT, **attend.keywords)  # of its mask and mesh

    def attention(self, x: Tensor, positions: Tensor, attend: partial) -> Tensor:
        x_ = self.attention_norm(x)
        heads = rearrange(self.qkv(x_), "b s (h qkv d) -> qkv b h s d", qkv=3, h=HEADS)
        query, key, value = rotate(heads[0], positions), rotate(heads[1], positions), heads[2]
        out = attend(query, key, value, selected=self.choose(x_.detach(), positions, attend))
        return x + self.out(rearrange(out, "b h s d -> b s (h d)"))


def train_layers(
    layer: type[Layer], mesh: dist.ProcessGroup | None = None, device: str = "cpu", steps: int = 2
) -> Result:
    """Return the loss of each step of a model of such layers, and the gradients of the last step."""
    torch.manual_seed(0)
    model = Decoder()
    model.layers = nn.ModuleList(layer() for _ in model.layers)
    model = model.to(device)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    mask = tritoncp.create_block_mask(tritoncp.causal(), 1, 1, SIZE, SIZE)
    plan = tritoncp.make_plan(mask, mesh, schedule="allgather")
    positions = tritoncp.positions(plan).to(device)
    attend = partial(tritoncp.flex_attention, block_mask=plan, mesh=mesh)
    losses = []
    for step in range(steps):
        text = batch_of(step)
        tokens = tritoncp.shard(text[:, :-1], plan, dim=1).to(device)
        labels = tritoncp.shard(text[:, 1:], plan, dim=1, pad=-100).to(device)
        loss = loss_sum(model(tokens, positions, attend), labels) / SIZE
        optimizer.zero_grad()
        loss.backward()
        gradients = [weight.grad for weight in trained]
        add_up([loss := loss.detach(), *gradients], mesh)
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients


train = partial(train_layers, SparseLayer)


def compare(train: Callable[..., Result], mesh: dist.ProcessGroup, device: str) -> Result:
    """Train on the ranks of a mesh, and on rank 0 alone, and print how far the two are apart."""
    losses, gradients = train(mesh, device)
    if mesh.rank() == 0:
        alone, expected = train(None, device)
        largest = max(gradient.abs().max() for gradient in expected)
        apart = max((a - b).abs().max() for a, b in zip(gradients, expected, strict=True)) / largest
        print(f"{mesh.size()} ranks: losses {losses}, one process: {alone}")
        print(f"gradients differ by {apart:.1e} of the largest one\n", end="")
    return losses, gradients


if __name__ == "__main__":
    launch(partial(compare, train))

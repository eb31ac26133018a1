"""Train a model of convolutions, attention, and a recurrence that cannot be cut, in two orders of the tokens.

    torchrun --nproc-per-node 3 examples/hybrid_layers.py

A convolution wants contiguous tokens: each rank has a piece of the text, and the last tokens of the piece
before it, the halo, come from the neighbour. Attention wants balanced work: a plan assigns blocks of tokens.
`tritoncp.reshard` moves activations from one order to the other. The recurrence runs on the whole sequence on
every rank: it costs time and memory, but no change of the layer.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from train_loop import SIZE, VOCABULARY, WIDTH, Layer, Result, add_up, batch_of, launch, loss_sum

import tritoncp

TAPS = 4  # a token's convolution reads 3 tokens before it


def with_halo(x: Tensor, mesh: dist.ProcessGroup | None) -> Tensor:
    """Put the last TAPS - 1 tokens of the previous rank in front of x [B, S_local, C]; zeros on rank 0."""
    rank, size = (0, 1) if mesh is None else (mesh.rank(), mesh.size())
    sends, receives = ([(TAPS - 1) * (r == peer) for r in range(size)] for peer in (rank + 1, rank - 1))
    halo = x[:, x.shape[1] - sum(sends) :].movedim(1, 0).contiguous()  # the last rank sends nothing
    if mesh is not None:
        halo = collectives.all_to_all_single_autograd(halo, receives, sends, mesh)  # gradients return
    zeros = x.new_zeros(len(x), TAPS - 1 - sum(receives), WIDTH)
    # Rank 0's halo is empty, and part of its graph: every rank takes part in the backward all-to-all.
    return torch.cat([zeros, halo.movedim(0, 1), x], 1)


class Convolution(nn.Module):
    """A causal convolution of each channel, on pieces of the text in natural order."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.taps = nn.RMSNorm(WIDTH), nn.Conv1d(WIDTH, WIDTH, TAPS, groups=WIDTH)

    def forward(self, x: Tensor, mesh: dist.ProcessGroup | None) -> Tensor:
        tokens = with_halo(self.norm(x), mesh)
        return x + F.silu(self.taps(tokens.transpose(1, 2)).transpose(1, 2))


class Recurrence(nn.Module):
    """A GRU over the whole text: gather, run, shard. Each rank's gradients of the weights are its tokens'."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, plan: tritoncp.Plan, mesh: dist.ProcessGroup | None) -> Tensor:
        whole = tritoncp.unshard(x, plan, mesh, dim=1, grad="sum")
        return x + tritoncp.shard(self.gru(whole)[0], plan, mesh, dim=1)


class Hybrid(nn.Module):
    """Logits of next tokens, in natural order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.first, self.attention, self.recurrence = Convolution(), Layer(), Recurrence()
        self.last = Convolution()

    def forward(self, tokens: Tensor, plan: tritoncp.Plan, mesh: dist.ProcessGroup | None) -> Tensor:
        positions = tritoncp.positions(plan).to(tokens.device)
        attend = partial(tritoncp.flex_attention, block_mask=plan, mesh=mesh)
        x = self.first(self.embed(tokens), mesh)
        x = tritoncp.reshard(x, None, plan, mesh, dim=1)  # to the plan's order
        x = self.recurrence(self.attention(x, positions, attend), plan, mesh)
        x = tritoncp.reshard(x, plan, None, mesh, dim=1)  # back to natural order
        return self.head(self.last(x, mesh))


def train(mesh: dist.ProcessGroup | None = None, device: str = "cpu", steps: int = 2) -> Result:
    """Return the loss of each step, and the gradients of the last step."""
    torch.manual_seed(0)
    model = Hybrid().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = tritoncp.make_plan(tritoncp.create_block_mask(tritoncp.causal(), 1, 1, SIZE, SIZE), mesh)
    losses = []
    for step in range(steps):
        text = batch_of(step)
        tokens = tritoncp.shard(text[:, :-1], None, mesh, dim=1).to(device)
        labels = tritoncp.shard(text[:, 1:], None, mesh, dim=1).to(device)  # shifted before they are cut
        loss = loss_sum(model(tokens, plan, mesh), labels) / SIZE
        optimizer.zero_grad()
        loss.backward()
        gradients = [weight.grad for weight in model.parameters()]
        add_up([loss := loss.detach(), *gradients], mesh)
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients


if __name__ == "__main__":
    launch(train)

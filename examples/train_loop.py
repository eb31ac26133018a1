"""Train a small decoder under context parallelism: own model, own loop.

    torchrun --nproc-per-node 2 examples/train_loop.py

Ranks use GPUs and NCCL if there are GPUs, else the CPU and gloo. `train()` without a mesh is one process.
"""

import os
from collections.abc import Callable, Iterable
from functools import partial
from itertools import cycle

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import tritoncp

SIZE, WIDTH, HEADS, LAYERS, VOCABULARY = 512, 64, 4, 2, 256
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Result = tuple[list[float], list[Tensor]]


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Turn heads [B, H, S, D] by rotary angles of the global positions [B or 1, S]."""
    rates = 10000 ** -torch.linspace(0, 1, x.shape[-1] // 2, device=x.device)
    angles = positions[:, None, :, None] * rates
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Layer(nn.Module):
    """Attention, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def attention(self, x: Tensor, positions: Tensor, attend: Attention) -> Tensor:
        heads = self.qkv(self.attention_norm(x))
        q, k, v = rearrange(heads, "b s (h qkv d) -> qkv b h s d", qkv=3, d=WIDTH // HEADS)
        out = attend(rotate(q, positions), rotate(k, positions), v)
        return x + self.out(rearrange(out, "b h s d -> b s (h d)"))

    def mlp(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.mlp_norm(x))))

    def forward(self, x: Tensor, positions: Tensor, attend: Attention) -> Tensor:
        return self.mlp(self.attention(x, positions, attend))


class Decoder(nn.Module):
    """Logits of next tokens. The tokens may be a shard: only `positions` and `attend` depend on ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, tokens: Tensor, positions: Tensor, *attend: Attention) -> Tensor:
        """tokens: [B, S_local]; attend: the attention of all layers, or several that layers take in turn."""
        x = self.embed(tokens)
        for layer, attend_of_layer in zip(self.layers, cycle(attend)):
            x = layer(x, positions, attend_of_layer)
        return self.head(x)


def batch_of(step: int, rows: int = 1) -> Tensor:
    """Return the text of a step, one token longer than its inputs: the same on every rank."""
    return torch.randint(VOCABULARY, (rows, SIZE + 1), generator=torch.Generator().manual_seed(step))


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the losses of this rank's labels."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")


def add_up(tensors: Iterable[Tensor], mesh: dist.ProcessGroup | None) -> None:
    """Sum each tensor over the ranks, in place."""
    for tensor in tensors if mesh is not None else ():
        dist.all_reduce(tensor, group=mesh)


def train(mesh: dist.ProcessGroup | None = None, device: str = "cpu", steps: int = 2) -> Result:
    """Return the loss of each step, and the gradients of the last step."""
    torch.manual_seed(0)  # the same weights on every rank
    model = Decoder().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mask = tritoncp.create_block_mask(tritoncp.causal(), 1, 1, SIZE, SIZE)
    plan = tritoncp.make_plan(mask, mesh)  # which rank has which blocks
    positions = tritoncp.positions(plan).to(device)  # of this rank's tokens in the whole text
    attend = partial(tritoncp.flex_attention, block_mask=plan, mesh=mesh)
    losses = []
    for step in range(steps):
        text = batch_of(step)
        tokens = tritoncp.shard(text[:, :-1], plan, dim=1).to(device)
        labels = tritoncp.shard(text[:, 1:], plan, dim=1, pad=-100).to(device)  # shifted before they are cut
        loss = loss_sum(model(tokens, positions, attend), labels) / SIZE  # the count of all ranks' labels
        optimizer.zero_grad()
        loss.backward()
        gradients = [weight.grad for weight in model.parameters()]
        add_up([loss := loss.detach(), *gradients], mesh)
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients


def launch(train: Callable[[dist.ProcessGroup, str], Result]) -> None:
    """Train as one of torchrun's ranks, on its GPU or on the CPU, and print the losses."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # before the group is made
    dist.init_process_group()
    losses, _ = train(dist.group.WORLD, device)
    print(f"rank {dist.get_rank()}: losses {losses}\n", end="")  # one write: lines of ranks stay whole
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    launch(train)

"""Resume training on another number of ranks. A checkpoint holds weights and optimizer, and no plan: a plan
follows from the mask and the number of ranks, so that every start makes its own.

    torchrun --nproc-per-node 2 examples/resume_on_more_ranks.py
    torchrun --nproc-per-node 4 examples/resume_on_more_ranks.py

The argument is the checkpoint's path, "checkpoint.pt" by default.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor, nn
from train_loop import add_up, launch

import tritoncp

SIZE, HEADS, DIM, VOCABULARY = 256, 2, 16, 64


class Model(nn.Module):
    """One attention layer between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HEADS * DIM)
        self.head = nn.Linear(HEADS * DIM, VOCABULARY)

    def forward(self, tokens: Tensor, plan: tritoncp.Plan, mesh: dist.ProcessGroup) -> Tensor:
        x = rearrange(self.embed(tokens), "b s (h d) -> b h s d", h=HEADS)
        out = tritoncp.flex_attention(x, x, x, plan, mesh)
        return self.head(rearrange(out, "b h s d -> b s (h d)"))


def batch_of(step: int) -> Tensor:
    """Return the text of a step, one token longer than its inputs: the same for any number of ranks."""
    return torch.randint(VOCABULARY, (1, SIZE + 1), generator=torch.Generator().manual_seed(step))


def train(mesh: dist.ProcessGroup, checkpoint: Path, steps: int = 3, device: str = "cpu") -> list[float]:
    """Train from the checkpoint on, if there is one, and save the next. Returns the loss of each step."""
    torch.manual_seed(0)  # the same first weights on every rank
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    mask = tritoncp.create_block_mask(tritoncp.causal(), 1, 1, SIZE, SIZE, BLOCK_SIZE=16)
    plan = tritoncp.make_plan(mask, mesh)  # for this number of ranks
    losses = []
    for step in range(first, first + steps):
        text = batch_of(step)
        tokens = tritoncp.shard(text[:, :-1], plan, dim=1).to(device)
        labels = tritoncp.shard(text[:, 1:], plan, dim=1, pad=-100).to(device)
        scores = model(tokens, plan, mesh).flatten(0, 1)
        loss = nn.functional.cross_entropy(scores, labels.flatten(), reduction="sum") / SIZE
        optimizer.zero_grad()
        loss.backward()
        add_up([loss := loss.detach(), *(weight.grad for weight in model.parameters())], mesh)
        optimizer.step()
        losses.append(loss.item())
    if mesh.rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": first + steps}
        torch.save(state, checkpoint)
    dist.barrier(group=mesh)
    return losses


if __name__ == "__main__":
    path = Path(sys.argv[1] if sys.argv[1:] else "checkpoint.pt")
    launch(lambda mesh, device: (train(mesh, path, device=device), []))

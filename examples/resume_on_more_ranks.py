"""Resume training on another number of ranks. A checkpoint holds weights and optimizer, and no plan: a plan
follows from the mask and the number of ranks, so that every start makes its own.

    torchrun --nproc-per-node 4 examples/resume_on_more_ranks.py checkpoint.pt
    torchrun --nproc-per-node 8 examples/resume_on_more_ranks.py checkpoint.pt
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor, nn

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


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of a step: the same whatever the number of ranks."""
    text = torch.randint(VOCABULARY, (1, SIZE + 1), generator=torch.Generator().manual_seed(step))
    return text[:, :-1], text[:, 1:]


def train(mesh: dist.ProcessGroup, checkpoint: Path, steps: int) -> list[float]:
    """Train from the checkpoint on, if there is one, and save the next. Returns the loss of each step."""
    torch.manual_seed(0)  # the same first weights on every rank
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    mask = tritoncp.create_block_mask(tritoncp.causal(), 1, 1, SIZE, SIZE, BLOCK_SIZE=16)
    plan = tritoncp.make_plan(mask, mesh)  # for this number of ranks
    losses = []
    for step in range(first, first + steps):
        tokens, labels = (tritoncp.shard(x, plan, dim=1, pad=-100 * i) for i, x in enumerate(batch_of(step)))
        scores = model(tokens, plan, mesh).flatten(0, 1)
        loss = nn.functional.cross_entropy(scores, labels.flatten(), reduction="sum") / SIZE
        optimizer.zero_grad()
        loss.backward()
        for total in (*(weight.grad for weight in model.parameters()), loss := loss.detach()):
            dist.all_reduce(total, group=mesh)
        optimizer.step()
        losses.append(loss.item())
    if mesh.rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": first + steps}
        torch.save(state, checkpoint)
    dist.barrier(group=mesh)
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    losses = train(dist.group.WORLD, Path(sys.argv[1]), 3)
    # One write: lines of ranks stay whole.
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {losses}\n", end="")
    dist.destroy_process_group()

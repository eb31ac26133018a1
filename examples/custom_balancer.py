"""Deal blocks by an own function: here ranks of different speed, as GPUs of two generations.

    torchrun --nproc-per-node 2 examples/custom_balancer.py

A balancer gets the work of each block and returns a list of blocks for each rank. Any placement gives the
same losses and gradients; shards are padded to the longest.
"""

from functools import partial

import torch
import torch.distributed as dist
from train_loop import SIZE, Decoder, Result, add_up, batch_of, launch, loss_sum

import tritoncp
from tritoncp.planning.work import Work

SPEEDS = (2.0, 1.0)  # of the ranks, in turn


def by_speed(work: Work) -> list[list[int]]:
    """Deal blocks, the costliest first, each to the rank that would be done with it first."""
    speeds = [SPEEDS[rank % len(SPEEDS)] for rank in range(work.world_size)]
    seconds, blocks_of_rank = [0.0] * work.world_size, [[] for _ in speeds]
    for block in work.costs.argsort(descending=True).tolist():
        ends = [t + work.costs[block].item() / speed for t, speed in zip(seconds, speeds)]
        rank = ends.index(min(ends))
        seconds[rank] = ends[rank]
        blocks_of_rank[rank].append(block)
    return blocks_of_rank


def plan_by_speed(mesh: dist.ProcessGroup | None = None, **ranks: int) -> tritoncp.Plan:
    """Return the plan of a mesh, or of `world_size=` and `rank=`."""
    mask = tritoncp.create_block_mask(tritoncp.causal(), 1, 1, SIZE, SIZE, BLOCK_SIZE=32)
    return tritoncp.make_plan(mask, mesh, balancer=by_speed, **ranks)


def train(mesh: dist.ProcessGroup | None = None, device: str = "cpu", steps: int = 2) -> Result:
    """Return the loss of each step, and the gradients of the last step."""
    torch.manual_seed(0)
    model = Decoder().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = plan_by_speed(mesh)
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
        gradients = [weight.grad for weight in model.parameters()]
        add_up([loss := loss.detach(), *gradients], mesh)
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients


if __name__ == "__main__":
    launch(train)

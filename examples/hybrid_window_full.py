"""Train a model whose layers alternate between a sliding window and full causal attention.

    torchrun --nproc-per-node 2 examples/hybrid_window_full.py

Activations pass from layer to layer, so all layers need one placement. `make_plan` of a dict of masks weighs
the work of all of them, and returns one plan for each mask: the same blocks on the same ranks.
"""

from functools import partial

import torch
import torch.distributed as dist
from train_loop import SIZE, Decoder, Result, add_up, batch_of, launch, loss_sum

import tritoncp

MASKS = {"window": tritoncp.sliding_window(63), "full": tritoncp.causal()}  # 63 keys before the query, and it
LAYERS = ("window", "full")  # in turn


def train(mesh: dist.ProcessGroup | None = None, device: str = "cpu", steps: int = 2) -> Result:
    """Return the loss of each step, and the gradients of the last step."""
    torch.manual_seed(0)
    model = Decoder().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masks = {name: tritoncp.create_block_mask(mod, 1, 1, SIZE, SIZE) for name, mod in MASKS.items()}
    plans = tritoncp.make_plan(masks, mesh)
    placement = plans["full"]  # any of them: they place tokens alike
    positions = tritoncp.positions(placement).to(device)
    attend = [partial(tritoncp.flex_attention, block_mask=plans[name], mesh=mesh) for name in LAYERS]
    losses = []
    for step in range(steps):
        text = batch_of(step)
        tokens = tritoncp.shard(text[:, :-1], placement, dim=1).to(device)
        labels = tritoncp.shard(text[:, 1:], placement, dim=1, pad=-100).to(device)
        loss = loss_sum(model(tokens, positions, *attend), labels) / SIZE
        optimizer.zero_grad()
        loss.backward()
        gradients = [weight.grad for weight in model.parameters()]
        add_up([loss := loss.detach(), *gradients], mesh)
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients


if __name__ == "__main__":
    launch(train)

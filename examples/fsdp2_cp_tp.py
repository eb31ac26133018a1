"""Train with FSDP2, context parallelism and tensor parallelism together: 8 ranks are 2 x 2 x 2.

    torchrun --nproc-per-node 8 examples/fsdp2_cp_tp.py

Two ranks share the heads of a text (tp), two share its tokens (cp), and two groups of four have other texts
(dp). FSDP shards parameters over cp and replicates them over dp. Its gradients are *means* over dp x cp
ranks, hence the factor of the loss. The model is that of train_loop.py, unchanged.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from train_loop import SIZE, Decoder, Result, add_up, batch_of, launch, loss_sum

import tritoncp

ROWS = 2  # texts of a step, of all ranks


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the weights of each layer over tp, by whole heads; then shard all weights over cp."""
    columns, rows = ColwiseParallel(), RowwiseParallel()
    styles = {"qkv": columns, "out": rows, "up": columns, "down": rows}
    parallelize_module(model, mesh["tp"], {f"layers.*.{name}": style for name, style in styles.items()})
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["dp", "cp"])


def train(group: dist.ProcessGroup | None = None, device: str = "cpu", steps: int = 2) -> Result:
    """Return the loss of each step, and the whole gradients of the last step."""
    torch.manual_seed(0)
    model, cp, replicas, replica = Decoder().to(device), None, 1, 0
    if group is not None:
        mesh = init_device_mesh(device, (group.size() // 4, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
        parallelize(model, mesh)
        cp, replicas, replica = mesh["cp"], mesh["dp"].size(), mesh["dp"].get_local_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = tritoncp.make_plan(tritoncp.create_block_mask(tritoncp.causal(), 1, 1, SIZE, SIZE), cp)
    positions = tritoncp.positions(plan).to(device)
    attend = partial(tritoncp.flex_attention, block_mask=plan, mesh=cp)
    averaged = replicas * plan.world_size  # ranks over which FSDP averages: dp x cp, not tp
    losses = []
    for step in range(steps):
        text = batch_of(step, ROWS).chunk(replicas)[replica]
        tokens = tritoncp.shard(text[:, :-1], plan, dim=1).to(device)
        labels = tritoncp.shard(text[:, 1:], plan, dim=1, pad=-100).to(device)
        loss = loss_sum(model(tokens, positions, attend), labels) / (ROWS * SIZE)  # labels of all ranks
        optimizer.zero_grad()
        (loss * averaged).backward()
        optimizer.step()
        add_up([loss := loss.detach()], group)
        losses.append(loss.item() if group is None else loss.item() / mesh["tp"].size())
    gradients = [weight.grad for weight in model.parameters()]
    return losses, [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in gradients]


if __name__ == "__main__":
    launch(train)

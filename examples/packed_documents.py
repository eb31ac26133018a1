"""Train on packed documents, whose lengths differ in every step: plans made by data loader workers.

    torchrun --nproc-per-node 2 examples/packed_documents.py

A worker of the data loader makes the mask and the plan of the next steps and cuts their tensors, while the
rank trains. Every rank's loader yields the same documents; the ranks compare plans at their first use.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from train_loop import SIZE, VOCABULARY, Decoder, Result, add_up, launch, loss_sum

import tritoncp

LENGTHS = ([300, 150, 62], [40, 400, 72], [512])  # documents of each step


class Steps(Dataset):
    """The plan, tokens, labels and positions of one rank in each step, and the count of all ranks' labels."""

    def __init__(self, world_size: int, rank: int, steps: int) -> None:
        self.world_size, self.rank, self.steps = world_size, rank, steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> tuple[tritoncp.Plan, Tensor, Tensor, Tensor, int]:
        lengths = LENGTHS[step % len(LENGTHS)]
        text = torch.randint(VOCABULARY, (1, SIZE), generator=torch.Generator().manual_seed(step))
        labels = text.roll(-1, 1)
        labels[0, torch.tensor(lengths).cumsum(0) - 1] = -100  # the last token of a document has no next one
        documents = tritoncp.document(lengths=lengths)
        packed = tritoncp.and_masks(tritoncp.causal(), documents)
        mask = tritoncp.create_block_mask(packed, 1, 1, SIZE, SIZE)
        plan = tritoncp.make_plan(mask, world_size=self.world_size, rank=self.rank)
        positions = tritoncp.positions(plan, documents)  # each document begins at 0
        count = (labels != -100).sum().item()  # before the labels are cut
        tokens, labels = tritoncp.shard(text, plan, dim=1), tritoncp.shard(labels, plan, dim=1, pad=-100)
        return plan, tokens, labels, positions, count


def train(mesh: dist.ProcessGroup | None = None, device: str = "cpu", steps: int = 2) -> Result:
    """Return the loss of each step, and the gradients of the last step."""
    torch.manual_seed(0)
    model = Decoder().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps_of_rank = Steps(1 if mesh is None else mesh.size(), 0 if mesh is None else mesh.rank(), steps)
    losses = []
    for plan, *tensors, count in DataLoader(steps_of_rank, batch_size=None, num_workers=1):
        tokens, labels, positions = (x.to(device) for x in tensors)
        attend = partial(tritoncp.flex_attention, block_mask=plan, mesh=mesh)
        loss = loss_sum(model(tokens, positions, attend), labels) / count
        optimizer.zero_grad()
        loss.backward()
        gradients = [weight.grad for weight in model.parameters()]
        add_up([loss := loss.detach(), *gradients], mesh)
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients


if __name__ == "__main__":
    launch(train)

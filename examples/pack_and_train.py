"""Train two replicas of two ranks on sequences of many lengths, packed so that no replica waits for another.

    torchrun --nproc-per-node 4 examples/pack_and_train.py

Every rank packs the same lengths, so that all know the micro-batches of an epoch without a message. A worker
of the data loader makes the plans and cuts the tensors of the next steps. A run that finds a checkpoint (the
argument is its path, "packed.pt" by default) goes on with the step after it.
"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from train_loop import VOCABULARY, WIDTH, Decoder, add_up, launch, loss_sum

import tritoncp

REPLICAS, TOKENS = 2, 512  # TOKENS: of a micro-batch, over the ranks of a replica
LENGTHS = [70, 410, 33, 180, 95, 260, 48, 500, 120, 64, 333, 27, 210, 85, 150, 40, 300, 55, 240, 130]
Part = tuple[tritoncp.Plan, Tensor, Tensor, Tensor]  # plan, tokens, labels and positions of a micro-batch


def text_of(sequence: int) -> Tensor:
    """Return the tokens of a sequence: the same on every rank."""
    return torch.randint(VOCABULARY, (LENGTHS[sequence],), generator=torch.Generator().manual_seed(sequence))


class Epoch(Dataset):
    """This rank's part of each step: of its replica's micro-batch, or of all in one process."""

    def __init__(self, replicas: range, world_size: int, rank: int) -> None:
        self.replicas, self.world_size, self.rank = replicas, world_size, rank
        self.batches = tritoncp.pack_batches(
            LENGTHS, TOKENS // world_size, ranks=world_size, data_parallel=REPLICAS, token_cost=6 * WIDTH
        )

    def __len__(self) -> int:
        return len(self.batches) // REPLICAS

    def __getitem__(self, step: int) -> tuple[list[Part], int]:
        batches = self.batches[step * REPLICAS : (step + 1) * REPLICAS]
        labels = sum(batch.tokens - len(batch.sequences) for batch in batches)  # of all replicas
        return [self.cut(batches[replica].sequences) for replica in self.replicas], labels

    def cut(self, sequences: list[int]) -> Part:
        """Pack sequences into one row, and return this rank's part."""
        texts = [text_of(i) for i in sequences]
        nothing = torch.tensor([-100])  # the last token of a sequence has no next one
        tokens = torch.cat(texts)[None]
        labels = torch.cat([part for text in texts for part in (text[1:], nothing)])[None]
        documents = tritoncp.document(lengths=list(map(len, texts)))
        mask = tritoncp.create_block_mask(tritoncp.causal() & documents, 1, 1, tokens.numel(), tokens.numel())
        plan = tritoncp.make_plan(mask, world_size=self.world_size, rank=self.rank)
        positions = tritoncp.positions(plan, documents)
        return (
            plan,
            tritoncp.shard(tokens, plan, dim=1),
            tritoncp.shard(labels, plan, dim=1, pad=-100),
            positions,
        )


def train(
    group: dist.ProcessGroup | None, checkpoint: Path, steps: int = 2, device: str = "cpu"
) -> list[float]:
    """Train from the checkpoint on, if there is one, and save the next. Returns the loss of each step."""
    torch.manual_seed(0)  # the same first weights on every rank
    model = Decoder().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    mesh, epoch = None, Epoch(range(REPLICAS), 1, 0)
    if group is not None:
        shape, names = (REPLICAS, group.size() // REPLICAS), ("replica", "context")
        mesh = dist.init_device_mesh(device, shape, mesh_dim_names=names)
        replica, rank = mesh.get_local_rank("replica"), mesh.get_local_rank("context")
        mesh, epoch = mesh["context"], Epoch(range(replica, replica + 1), shape[1], rank)
    losses = []
    done = min(first + steps, len(epoch))
    for parts, labels in DataLoader(epoch, batch_size=None, sampler=range(first, done), num_workers=1):
        optimizer.zero_grad()
        loss = torch.zeros((), device=device)
        for plan, *tensors in parts:
            tokens, targets, positions = (x.to(device) for x in tensors)
            attend = partial(tritoncp.flex_attention, block_mask=plan, mesh=mesh)
            part = loss_sum(model(tokens, positions, attend), targets) / labels
            part.backward()
            loss += part.detach()
        add_up([loss, *(weight.grad for weight in model.parameters())], group)  # over replicas and ranks
        optimizer.step()
        losses.append(loss.item())
    if group is None or group.rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
        torch.save(state, checkpoint)
    if group is not None:
        dist.barrier(group=group)
    return losses


if __name__ == "__main__":
    path = Path(sys.argv[1] if sys.argv[1:] else "packed.pt")
    launch(lambda group, device: (train(group, path, device=device), []))

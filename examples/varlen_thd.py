"""Train on packed documents without a batch dimension: tensors [t, heads, head dim] (THD) and cu_seqlens.

    torchrun --nproc-per-node 2 examples/varlen_thd.py

The arguments are those of FlashAttention's varlen function, of the whole buffer on every rank. A plan of
`varlen_mask` deals the work evenly; without one, rank r holds the r-th piece of the buffer.
"""

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor, nn
from train_loop import Result, add_up, launch, loss_sum

import tritoncp

WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 64, 4, 2, 16, 256
CU_SEQLENS = torch.tensor([0, 200, 201, 512], dtype=torch.int32)  # where documents start, and the end


class PackedDecoder(nn.Module):
    """One attention layer between an embedding and a head. Two query heads share keys."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(HEADS * HEAD_DIM, VOCABULARY)
        self.places = nn.Embedding(512, WIDTH)  # of positions in a document
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM)

    def forward(
        self, tokens: Tensor, places: Tensor, plan: tritoncp.Plan, mesh: dist.ProcessGroup | None
    ) -> Tensor:
        """tokens and places, the positions in documents: [t_local] -> logits [t_local, vocabulary]"""
        x = self.embed(tokens) + self.places(places)
        heads = rearrange(self.qkv(x), "t (h d) -> t h d", d=HEAD_DIM)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
        return self.head(tritoncp.varlen_attention(q, k, v, plan, mesh=mesh).flatten(1))


def train(mesh: dist.ProcessGroup | None = None, device: str = "cpu", steps: int = 2) -> Result:
    """Return the loss of each step, and the gradients of the last step."""
    torch.manual_seed(0)
    model = PackedDecoder().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = tritoncp.make_plan(tritoncp.varlen_mask(CU_SEQLENS, causal=True), mesh)
    starts, lengths = CU_SEQLENS[:-1].long(), CU_SEQLENS.diff()
    places = torch.arange(CU_SEQLENS[-1]) - starts.repeat_interleave(lengths)
    losses = []
    for step in range(steps):
        text = torch.randint(VOCABULARY, (len(places),), generator=torch.Generator().manual_seed(step))
        labels = text.roll(-1)
        labels[CU_SEQLENS[1:].long() - 1] = -100  # the last token of a document has no next one
        inputs = [tritoncp.shard(x, plan, dim=0, batch_dim=None).to(device) for x in (text, places)]
        labels_of_rank = tritoncp.shard(labels, plan, dim=0, batch_dim=None, pad=-100).to(device)
        loss = loss_sum(model(*inputs, plan, mesh), labels_of_rank) / (labels != -100).sum()
        optimizer.zero_grad()
        loss.backward()
        gradients = [weight.grad for weight in model.parameters()]
        add_up([loss := loss.detach(), *gradients], mesh)
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients


if __name__ == "__main__":
    launch(train)

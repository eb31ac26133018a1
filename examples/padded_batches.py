"""Train on padded batches: texts of several lengths, one in each batch row, padded on the right.

    torchrun --nproc-per-node 2 examples/padded_batches.py

The mask hides the padding as keys, labels of -100 hide it from the loss. Rows differ, so does their work: the
plan deals the blocks of each row apart, and `shard` cuts every tensor accordingly.
"""

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor, nn
from train_loop import add_up, launch

import tritoncp

SIZE, HEADS, DIM, VOCABULARY = 256, 2, 16, 64
IGNORED = -100  # the label that cross_entropy leaves out
LENGTHS = [256, 100, 31]  # tokens of each text


def padded_batch(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Tokens and labels [B, SIZE]; the label of a token is the next one of its text."""
    texts = [
        torch.randint(VOCABULARY, (n,), generator=torch.Generator().manual_seed(i))
        for i, n in enumerate(lengths)
    ]
    tokens, labels = torch.zeros(len(texts), SIZE).long(), torch.full((len(texts), SIZE), IGNORED)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
        labels[row, : len(text) - 1] = text[1:]
    return tokens, labels


def mask_of(lengths: list[int]) -> tritoncp.Mask:
    """Causal, without the padding as keys. Padding rows see the text, so that no row is without a key."""
    ends = torch.tensor(lengths)

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (kv < ends[b])

    return tritoncp.create_block_mask(visible, len(lengths), None, SIZE, SIZE, BLOCK_SIZE=16)


def loss_of(model: nn.ModuleDict, lengths: list[int], mesh: dist.ProcessGroup | None, device: str) -> Tensor:
    """This rank's part of the mean loss of all labels; the parts of all ranks add up to it."""
    tokens, labels = padded_batch(lengths)
    count = (labels != IGNORED).sum()  # of the whole batch, not of a shard
    plan = tritoncp.make_plan(mask_of(lengths), mesh)  # lengths differ in every batch, and so do plans
    tokens = tritoncp.shard(tokens, plan, dim=1).to(device)
    labels = tritoncp.shard(labels, plan, dim=1, pad=IGNORED).to(device)
    x = rearrange(model["embed"](tokens), "b s (h d) -> b h s d", h=HEADS)
    out = tritoncp.flex_attention(x, x, x, plan, mesh)
    scores = model["head"](rearrange(out, "b h s d -> b s (h d)"))
    loss = nn.functional.cross_entropy(
        scores.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return loss / count


def train_step(
    mesh: dist.ProcessGroup | None = None, device: str = "cpu"
) -> tuple[list[float], list[Tensor]]:
    """Return the loss of the batch and the gradients of the weights, equal on all ranks."""
    torch.manual_seed(0)
    embed, head = nn.Embedding(VOCABULARY, HEADS * DIM), nn.Linear(HEADS * DIM, VOCABULARY)
    model = nn.ModuleDict({"embed": embed, "head": head}).to(device)
    loss = loss_of(model, LENGTHS, mesh, device)
    loss.backward()
    gradients = [weight.grad for weight in model.parameters()]
    add_up([loss := loss.detach(), *gradients], mesh)
    return [loss.item()], gradients


if __name__ == "__main__":
    launch(train_step)

"""Train a model of Hugging Face transformers on packed documents that are spread over the ranks.

    torchrun --nproc-per-node 2 examples/transformers_long_context.py

The model is a small Qwen3 with a window in one of its layers and random weights; one that you load with
`from_pretrained(..., attn_implementation="tritoncp")` trains by the same loop. Runs on GPUs, or on the CPU.
"""

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from tritoncp.integrations.transformers import register, shard_batch

SIZE, VOCABULARY, STEPS = 1024, 256, 2


def build_model() -> transformers.PreTrainedModel:
    """Return the same model on every rank."""
    register()
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=256,
        layer_types=["sliding_attention", "full_attention"],
        attn_implementation="tritoncp",
    )
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(config)


def packed_batch(step: int) -> dict[str, Tensor]:
    """Return documents, packed into one row [1, SIZE], whose position_ids restart at each: the same on every
    rank. A document repeats a few random tokens."""
    generator = torch.Generator().manual_seed(step)
    cuts = torch.randperm(SIZE - 1, generator=generator)[:3].sort().values + 1
    lengths = torch.diff(cuts, prepend=torch.tensor([0]), append=torch.tensor([SIZE])).tolist()
    documents = [torch.randint(VOCABULARY, (8,), generator=generator).repeat(n // 8 + 1)[:n] for n in lengths]
    labels = torch.cat([torch.cat([torch.tensor([-100]), document[1:]]) for document in documents])
    positions = torch.cat([torch.arange(n) for n in lengths])
    return {"input_ids": torch.cat(documents)[None], "labels": labels[None], "position_ids": positions[None]}


def train(mesh: dist.ProcessGroup | None = None, steps: int = STEPS, device: str = "cpu") -> list[float]:
    """Train on the ranks of a mesh, or on this process alone; return the loss of each step."""
    model = build_model().to(device).train()
    model.activation_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        batch = {name: x.to(device) for name, x in packed_batch(step).items()}
        loss = model(**shard_batch(batch, model.config, mesh)).loss  # this rank's part of the mean
        loss.backward()
        total = loss.detach().clone()
        if mesh is not None:  # gradients of the sum over ranks; DDP and FSDP would average them
            for x in (total, *(weight.grad for weight in model.parameters())):
                dist.all_reduce(x, group=mesh)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    if on_gpu := torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    losses = train(dist.group.WORLD, device="cuda" if on_gpu else "cpu")
    print(f"rank {dist.get_rank()}: losses {losses}\n", end="")  # one write: lines of ranks stay whole
    dist.barrier()
    dist.destroy_process_group()

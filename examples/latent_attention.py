"""Train multi-head latent attention, as in DeepSeek's models: ranks send the latent, not the keys.

    torchrun --nproc-per-node 2 examples/latent_attention.py

A token's keys and values of all heads are computed from a latent of few channels, and one head of rotary
channels, which are rotated before they are sent: only the token's own rank knows its position. With expand=,
`tritoncp.flex_attention` sends the latent, and each rank computes the keys of one step from what has arrived.

The same attention is possible without keys and values of heads (AbsorbedLayer): the query is mapped to the
latent's channels, and all heads share the latent as their one key and value, of 576 and 512 channels in
DeepSeek-V3. As many bytes travel, nothing is expanded, and a visible pair takes several times the operations.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from train_loop import HEADS, SIZE, WIDTH, Decoder, Layer, Result, add_up, batch_of, launch, loss_sum, rotate

import tritoncp

LATENT, ROTARY, PLAIN, VALUE = 24, 8, 16, 12  # channels of the latent, and of a head


def expand(latent: Tensor, gain: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Compute keys and values [B, HEADS, S, ...] from latents [B, 1, S, LATENT + ROTARY], row by row."""
    compressed, rotary = latent.split([LATENT, ROTARY], -1)
    heads = F.linear(F.rms_norm(compressed, (LATENT,), gain, eps=1e-6), weight)
    key, value = rearrange(heads, "b 1 s (h d) -> b h s d", h=HEADS).split([PLAIN, VALUE], -1)
    return torch.cat([key, rotary.expand(-1, HEADS, -1, -1)], -1), value


class LatentLayer(Layer):
    """Latent attention, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, HEADS * (PLAIN + ROTARY)), nn.Linear(HEADS * VALUE, WIDTH)
        self.down_projection = nn.Linear(WIDTH, LATENT + ROTARY)
        self.up_projection = nn.Linear(LATENT, HEADS * (PLAIN + VALUE), bias=False)
        self.gain = nn.Parameter(torch.ones(LATENT))

    def attention(self, x: Tensor, positions: Tensor, attend: partial) -> Tensor:
        x_ = self.attention_norm(x)
        plain, rotary = rearrange(self.qkv(x_), "b s (h d) -> b h s d", h=HEADS).split([PLAIN, ROTARY], -1)
        query = torch.cat([plain, rotate(rotary, positions)], -1)
        compressed, rotary = self.down_projection(x_)[:, None].split([LATENT, ROTARY], -1)
        latent = torch.cat([compressed, rotate(rotary, positions)], -1)
        out = attend(query, latent, None, expand=(expand, self.gain, self.up_projection.weight))
        return x + self.out(rearrange(out, "b h s d -> b s (h d)"))


def share(latent: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the key [B, 1, S, LATENT + ROTARY] and value [B, 1, S, LATENT] that all heads share."""
    compressed, rotary = latent.split([LATENT, ROTARY], -1)
    value = F.rms_norm(compressed, (LATENT,), gain, eps=1e-6)
    return torch.cat([value, rotary], -1), value


class AbsorbedLayer(LatentLayer):
    """The same function of the same parameters: queries and outputs absorb the weights of keys and values."""

    def attention(self, x: Tensor, positions: Tensor, attend: partial) -> Tensor:
        x_ = self.attention_norm(x)
        plain, rotary = rearrange(self.qkv(x_), "b s (h d) -> b h s d", h=HEADS).split([PLAIN, ROTARY], -1)
        key_weight, value_weight = rearrange(self.up_projection.weight, "(h d) c -> h d c", h=HEADS).split(
            [PLAIN, VALUE], 1
        )
        query = torch.cat([plain @ key_weight, rotate(rotary, positions)], -1)
        compressed, rotary = self.down_projection(x_)[:, None].split([LATENT, ROTARY], -1)
        latent = torch.cat([compressed, rotate(rotary, positions)], -1)
        scale = (PLAIN + ROTARY) ** -0.5  # of the heads' own channels
        out = attend(query, latent, None, expand=(share, self.gain), scale=scale, enable_gqa=True)
        return x + self.out(rearrange(out @ value_weight.mT, "b h s d -> b s (h d)"))


def layer_sizes(heads: int, plain: int, rotary: int, value: int, latent: int) -> dict[str, int]:
    """Return the sizes of a layer, for plans."""
    sizes = {"heads": heads, "kv_heads": heads, "head_dim": plain + rotary, "v_head_dim": value}
    return {**sizes, "latent": latent + rotary}


def train(
    mesh: dist.ProcessGroup | None = None, device: str = "cpu", steps: int = 2, layer: type = LatentLayer
) -> Result:
    """Return the loss of each step, and the gradients of the last step."""
    torch.manual_seed(0)
    model = Decoder()
    model.layers = nn.ModuleList(layer() for _ in model.layers)
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mask = tritoncp.create_block_mask(tritoncp.causal(), 1, 1, SIZE, SIZE)
    plan = tritoncp.make_plan(mask, mesh, layer=layer_sizes(HEADS, PLAIN, ROTARY, VALUE, LATENT))
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


def bytes_sent(length: int, world_size: int, **layer: int) -> tuple[int, int]:
    """Return the bytes that a rank sends in both passes of a layer, with its latent and with its keys."""
    mask = tritoncp.create_block_mask(tritoncp.causal(), 1, 1, length, length)
    plan = tritoncp.make_plan(mask, world_size=world_size, layer=layer)
    expanded = {name: size for name, size in layer.items() if name != "latent"}
    latent, keys = (plan.metrics(**sizes) for sizes in (layer, expanded))
    return tuple(int(x["forward_sent_bytes"] + x["backward_sent_bytes"]) for x in (latent, keys))


def operations(heads: int, plain: int, rotary: int, value: int, latent: int) -> dict[str, int]:
    """Return floating-point operations of a forward pass: of a visible pair expanded and absorbed, and of the
    expansion of one token on one rank.

    >>> operations(128, 128, 64, 128, 512)  # DeepSeek-V3
    {'expanded pair': 81920, 'absorbed pair': 278528, 'expansion': 33554432}
    """
    return {
        "expanded pair": 2 * heads * (plain + rotary + value),
        "absorbed pair": 2 * heads * (latent + rotary + latent),
        "expansion": 2 * heads * latent * (plain + value),
    }


if __name__ == "__main__":
    launch(train)
    sizes = layer_sizes(16, 128, 64, 128, 512)  # a layer of DeepSeek-V2-Lite
    latent, keys = bytes_sent(32768, 8, **sizes)
    print(
        f"DeepSeek-V2-Lite, 32768 tokens, 8 ranks: {latent >> 20} MiB a layer, expanded {keys >> 20} MiB\n",
        end="",
    )
    count = operations(16, 128, 64, 128, 512)
    queries = count["expansion"] / (count["absorbed pair"] - count["expanded pair"])
    print(f"Absorbed, a forward pass has fewer operations if under {queries:.0f} queries see a key\n", end="")

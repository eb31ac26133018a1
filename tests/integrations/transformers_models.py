"""Small models of transformers; their losses and gradients, in one process and on ranks."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from tritoncp.integrations.transformers import register, shard_batch

register()
transformers.utils.logging.set_verbosity_error()  # of generation without an attention_mask

SIZE, VOCABULARY = 128, 61
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
COMMON: dict[str, Any] = TABLE["common"]
MODELS: dict[str, dict[str, Any]] = TABLE["models"]
MORE_MODELS: dict[str, dict[str, Any]] = TABLE["more"]
CONFIGS = {"Gemma3": "Gemma3TextConfig"}


def build_model(name: str, attention: str = "tritoncp", **options: Any) -> Any:
    """Build a model with fixed weights."""
    config = getattr(transformers, CONFIGS.get(name, f"{name}Config"))(
        **COMMON | (MODELS | MORE_MODELS)[name] | options, attn_implementation=attention
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def text_batch(rows: int = 2) -> dict[str, Tensor]:
    """Return tokens and labels, [rows, SIZE]."""
    tokens = torch.randint(1, VOCABULARY, (rows, SIZE), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens.clone()}


def packed_batch() -> dict[str, Tensor]:
    """Return two rows of documents, which position_ids separate."""
    positions = [torch.cat([torch.arange(n) for n in lengths]) for lengths in ((50, 7, 71), (20, 108))]
    return {**text_batch(), "position_ids": torch.stack(positions)}


def padded_batch() -> dict[str, Tensor]:
    """Return one text that is padded on the left and one on the right."""
    batch = text_batch()
    mask = torch.ones(2, SIZE, dtype=torch.long)
    mask[0, :9], mask[1, 90:] = 0, 0
    labels = batch["labels"].masked_fill(mask == 0, -100)
    labels[0, 9] = -100  # the prediction of padding
    return {**batch, "labels": labels, "attention_mask": mask}


BATCHES: dict[str, Callable[[], dict[str, Tensor]]] = {
    "text": text_batch,
    "packed": packed_batch,
    "padded": padded_batch,
}


def loss_and_gradients(model: Any, batch: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of a model's call and the gradients of its weights."""
    model.zero_grad()
    loss = model(**{"use_cache": False, **batch}).loss
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters()}


def on_ranks(
    group: Any,
    name: str,
    batch: dict[str, Tensor],
    checkpointing: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[float, dict[str, Tensor]]:
    """Return the sum over the ranks of a group of the loss of a model, and of its gradients."""
    model = build_model(name).train()
    if checkpointing is not None:
        model.activation_checkpointing_enable(checkpointing)
    local = shard_batch(batch, model, group, **{"BLOCK_SIZE": 16, **options})
    return sum_over_ranks(*loss_and_gradients(model, local))


def sum_over_ranks(loss: float, gradients: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Return the sums over all ranks of losses and gradients."""
    total = torch.tensor(loss, dtype=torch.float64)
    for x in (total, *gradients.values()):
        dist.all_reduce(x)
    return total.item(), gradients


def assert_equal(result: Any, expected: Any) -> None:
    """Compare losses and gradients of float32 models."""
    assert abs(result[0] - expected[0]) < 1e-6
    torch.testing.assert_close(result[1], expected[1], rtol=0, atol=3e-6)

"""Small models of transformers; their losses and gradients, in one process and on ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from tritoncp.integrations.transformers import register, shard_batch

register()
transformers.utils.logging.set_verbosity_error()  # of generation without an attention_mask

SIZE, VOCABULARY, WINDOW = 128, 61, 20
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
# The name of a model's classes, and what its config has besides.
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": WINDOW},
    "Gemma2": {"sliding_window": WINDOW, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "GptOss": {
        "sliding_window": WINDOW,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "Qwen3": {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": ["full_attention", "sliding_attention"],
    },
}
MORE_MODELS: dict[str, dict[str, Any]] = {
    "OPT": {"ffn_dim": 48, "dropout": 0.0, "word_embed_proj_dim": 32},
    "Gemma3": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "Olmo2": {},
    "Qwen3Next": {  # three layers of linear attention and one of attention
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "Phi3": {"sliding_window": WINDOW},
    "Qwen2": {},
}


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
    loss, gradients = loss_and_gradients(model, local)
    total = torch.tensor(loss, dtype=torch.float64)
    for x in (total, *gradients.values()):
        dist.all_reduce(x)
    return total.item(), gradients


def assert_equal(result: Any, expected: Any) -> None:
    """Compare losses and gradients of float32 models."""
    assert abs(result[0] - expected[0]) < 1e-6
    torch.testing.assert_close(result[1], expected[1], rtol=0, atol=3e-6)

"""Models in wrappers, subclasses, and classes without source are treated like the inner model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    LlamaForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from tests.integrations import transformers_models as models
from tests.multiprocess import ranks
from tritoncp.integrations.transformers import attention, model_classes, shard_batch
from tritoncp.integrations.transformers.model_classes import has_custom_loss, is_recurrent

pytestmark = pytest.mark.usefixtures("cpu_engine")


class CallsSuper(LlamaForCausalLM):
    def forward(self, *args: Any, **options: Any) -> Any:
        return super().forward(*args, **options)


class HasLoss(LlamaForCausalLM):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **options: Any) -> Any:
        out = super().forward(input_ids, **options)
        return nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten())


def without_source(cls: type) -> Any:
    """Return a subclass made by exec, with another forward method."""
    names: dict[str, Any] = {"Base": cls}
    lines = (
        "class Made(Base):",
        "  def forward(self, *args, **options):",
        "    return super().forward(*args, **options)",
    )
    exec("\n".join(lines), names)
    return names["Made"]


@pytest.mark.long
def test_wrapped_models_and_subclasses_take_labels_on_ranks() -> None:
    def work(group: Any) -> None:
        model = models.build_model("Llama", num_hidden_layers=1)
        of_classes = [cls(model.config) for cls in (CallsSuper, without_source(LlamaForCausalLM))]
        for one in (torch.compile(model, backend="eager"), *of_classes, model.model):
            assert "shift_labels" in shard_batch(models.text_batch(), one, group)
        with pytest.raises(ValueError, match="computes its own loss"):
            shard_batch(models.text_batch(), HasLoss(model.config), group)

    ranks.run(2, work)


def test_a_custom_loss_of_an_inner_model_is_found() -> None:
    model = models.build_model("Llama", num_hidden_layers=1)
    outer = model.model  # its forward takes no labels
    outer.layers.append(HasLoss(model.config))
    assert has_custom_loss(model.config, outer)
    assert not has_custom_loss(model.config, model)


def test_classes_without_source_are_recurrent_if_their_bases_are() -> None:
    model = models.build_model("Qwen3Next")
    kinds = [is_recurrent(part) for part in model.modules()]
    assert any(kinds)
    for part in list(model.modules()):
        part.__class__ = without_source(type(part))
    assert [is_recurrent(part) for part in model.modules()] == kinds
    assert not model_classes._computes_attention(without_source(Qwen3NextGatedDeltaNet))


@pytest.mark.long
def test_attention_that_gets_no_arguments_has_the_plan_of_its_call() -> None:
    sizes = {key: x for key, x in models.COMMON.items() if key != "head_dim"}

    def build(implementation: str) -> Any:
        torch.manual_seed(0)
        return StableLmForCausalLM(StableLmConfig(**sizes, attn_implementation=implementation)).train()

    def work(group: Any) -> Any:
        model = build("tritoncp")
        with pytest.raises(ValueError, match=r"call shard_batch\(batch, model, mesh\)"):
            model(**shard_batch(models.packed_batch(), model.config, group, BLOCK_SIZE=16))
        model.activation_checkpointing_enable()
        local = shard_batch(models.packed_batch(), model, group, BLOCK_SIZE=16)
        return models.sum_over_ranks(*models.loss_and_gradients(model, local))

    expected = models.loss_and_gradients(build("eager"), models.packed_batch())
    models.assert_equal(ranks.run(2, work)[0], expected)
    assert not model_classes.attention_without_arguments(models.build_model("Llama"))


def test_every_table_of_attention_classes_is_extended() -> None:
    folder = Path(transformers.__file__).parent / "models"
    sources = {path: path.read_text() for path in folder.glob("*/modeling_*.py")}
    tables = {f"{p.parent.name}.{p.stem}" for p, text in sources.items() if "_ATTENTION_CLASSES[" in text}
    assert tables and tables <= set(attention.TABLES)  # which has the arguments of earlier releases, too


def test_a_model_with_a_table_of_attention_classes_runs_as_eager() -> None:
    def logits(implementation: str) -> Tensor:
        torch.manual_seed(0)
        sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = FalconConfig(**sizes, attn_implementation=implementation)
        return FalconForCausalLM(config).eval()(models.text_batch()["input_ids"]).logits

    with torch.no_grad():
        assert torch.equal(logits("tritoncp"), logits("eager"))


def test_a_mesh_of_one_rank_is_one_process() -> None:
    config = BartConfig(
        vocab_size=61, d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16,
        is_decoder=True, is_encoder_decoder=False, attn_implementation="tritoncp", dropout=0.0,
    )  # fmt: skip

    def work(group: Any) -> tuple[float, float]:
        model, batch = BartForCausalLM(config).eval(), models.text_batch()
        with torch.no_grad():
            return tuple(model(**shard_batch(batch, model, mesh)).loss.item() for mesh in (group, None))

    first, second = ranks.run(1, work)[0]
    assert first == second

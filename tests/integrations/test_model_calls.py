"""Calls of models on ranks that would silently compute something else: each is refused, and similar correct
calls are not."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    LlamaForSequenceClassification,
    RwkvConfig,
    RwkvForCausalLM,
)

from tests.integrations import transformers_models as models
from tests.multiprocess import ranks
from tritoncp.integrations.transformers import shard_batch

pytestmark = pytest.mark.usefixtures("cpu_engine")
TOKENS = models.text_batch()["input_ids"]
NO_PLAN, NO_LABELS = (
    "is a shard: this looks like a shard without its plan",
    "labels are passed beside the plan",
)
# Calls of a model with the shard of a batch without labels, and the reason of the error.
WRONG_CALLS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "tokens": (lambda model, shard: model(shard["input_ids"]), NO_PLAN),
    "tokens by name": (lambda model, shard: model(input_ids=shard["input_ids"]), NO_PLAN),
    "a row": (lambda model, shard: model(shard["input_ids"][1:]), NO_PLAN),
    "no plan": (lambda model, shard: model(**{**shard, "context_parallel": None}), NO_PLAN),
    "an inner model": (lambda model, shard: model.base_model(shard["input_ids"]), NO_PLAN),
    "generation": (lambda model, shard: model.generate(shard["input_ids"], max_new_tokens=2), NO_PLAN),
    "beams": (
        lambda model, shard: model.generate(shard["input_ids"], max_new_tokens=2, num_beams=2),
        NO_PLAN,
    ),
    "generation of all": (lambda model, shard: model.generate(**shard), "not used by the model|NotImpl"),
    "labels": (lambda model, shard: model(**shard, labels=shard["input_ids"]), NO_LABELS),
    "router": (lambda model, shard: model(**shard, output_router_logits=True), "output_router_logits=True"),
    "last logits": (lambda model, shard: model(**shard, logits_to_keep=1), "logits_to_keep would keep"),
    "chosen logits": (
        lambda model, shard: model(**shard, logits_to_keep=torch.arange(3)),
        "logits_to_keep would keep",
    ),
}


def error_of(call: Callable[[], Any]) -> str:
    """Return the error of a call, or "" if there is none."""
    result = ranks.attempt(call)
    return result if isinstance(result, str) else ""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "compiled"),
    [("Llama", False), ("OPT", False), pytest.param("Llama", True, marks=pytest.mark.integrations)],
)
def test_a_wrong_call_with_a_shard_is_refused_before_and_after_a_right_one(name: str, compiled: bool) -> None:
    def work(group: Any) -> list[dict[str, str]]:
        model = models.build_model(name, num_hidden_layers=1).eval()
        call = torch.compile(model, backend="eager") if compiled else model
        shard = shard_batch({"input_ids": TOKENS}, model.config, group, BLOCK_SIZE=16)
        before = {key: error_of(lambda wrong=wrong: wrong(call, shard)) for key, (wrong, _) in cases.items()}
        call(**shard)
        return [before, {key: error_of(lambda w=wrong: w(call, shard)) for key, (wrong, _) in cases.items()}]

    cases = {key: WRONG_CALLS[key] for key in ("tokens", "labels")} if compiled else WRONG_CALLS
    for errors in chain.from_iterable(ranks.run(2, work)):
        for key, (_, reason) in cases.items():
            assert any(part in errors[key] for part in reason.split("|")), (key, errors[key])


@pytest.mark.long
def test_texts_of_the_length_of_a_shard_are_no_shards() -> None:
    """This holds also while a shard waits for its call, for example if the batch was made ahead."""

    def work(group: Any) -> None:
        for cls, config in ((BertModel, BertConfig), *((None, name) for name in ("Llama", "OPT"))):
            if cls is None:
                model = models.build_model(config, num_hidden_layers=1).eval()
            else:
                model = cls(config(**models.COMMON, attn_implementation="tritoncp")).eval()
            shard = shard_batch({"input_ids": TOKENS}, model.config, group, BLOCK_SIZE=16)
            assert NO_PLAN in error_of(lambda model=model, shard=shard: model(shard["input_ids"]))
            model(TOKENS[:, 1 : shard["input_ids"].shape[1] + 1])
            model(**shard)
            model(TOKENS)
            if cls is None:
                model.generate(TOKENS[:, :16], max_new_tokens=2, use_cache=True)

    ranks.run(2, work)


def test_models_with_custom_losses_take_no_labels_beside_a_plan() -> None:
    def work(group: Any) -> None:
        model = BertForMaskedLM(BertConfig(**models.COMMON, attn_implementation="tritoncp")).eval()
        shard = shard_batch({"input_ids": TOKENS}, model.config, group)
        labels = {"labels": shard["input_ids"], "shift_labels": shard["input_ids"]}
        for given in ({"labels": shard["input_ids"]}, labels):
            with pytest.raises(ValueError, match="labels are passed beside the plan"):
                model(**shard, **given)
        model(**shard)

    ranks.run(2, work)


def test_heads_of_whole_sequences_are_refused_on_ranks() -> None:
    def work(group: Any) -> None:
        config = models.build_model("Llama", num_hidden_layers=1).config
        model = LlamaForSequenceClassification(config).eval()
        shard = shard_batch({"input_ids": TOKENS}, model, group, BLOCK_SIZE=16)
        with pytest.raises(ValueError, match="reads one token of a shard for the whole sequence"):
            model(**shard)
        model.base_model(**shard)

    ranks.run(2, work)


def test_a_plan_that_no_layer_gets_raises() -> None:
    def work(group: Any) -> None:
        model = models.build_model("Llama", num_hidden_layers=1).eval()
        reference = models.build_model("Llama", "sdpa", num_hidden_layers=1).eval()
        shard = shard_batch({"input_ids": TOKENS}, model.config, group, BLOCK_SIZE=16)
        model(**shard)
        with pytest.raises(ValueError, match="no layer of the model has got its argument context_parallel"):
            reference(**shard)

    ranks.run(2, work)


@pytest.mark.long
def test_plans_are_arguments_of_layers_of_fsdp_in_mixed_precision() -> None:
    def work(group: Any) -> float:
        model = models.build_model("Gemma2")
        for part in (*model.model.layers, model):
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            fully_shard(part, mesh=dist.init_device_mesh("cpu", (2,)), mp_policy=policy)
        loss = model(**shard_batch(models.packed_batch(), model.config, group, BLOCK_SIZE=16)).loss
        dist.all_reduce(loss := loss.detach())
        return loss.item()

    expected = models.build_model("Gemma2", "eager")(**models.packed_batch(), use_cache=False).loss.item()
    assert ranks.run(2, work)[0] == pytest.approx(expected, rel=0.01)


def test_a_batch_without_a_mesh_in_a_world_of_ranks_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    config = models.build_model("Llama", num_hidden_layers=1).config

    def work(group: Any) -> None:
        with pytest.warns(UserWarning, match="without a mesh in a world of 2 ranks"):
            shard_batch({"input_ids": TOKENS}, config)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            shard_batch({"input_ids": TOKENS}, config, group)

    ranks.run(2, work)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shard_batch({"input_ids": TOKENS}, config)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")  # torchrun, before init_process_group
    with pytest.warns(UserWarning, match="without a mesh in a world of 2 ranks"):
        shard_batch({"input_ids": TOKENS}, config)


RESTARTING = torch.cat([torch.arange(50), torch.arange(78)])[None]
WRONG_BATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "position_id": ({"position_id": RESTARTING}, "name it 'position_ids'"),
    "cu_seqlens_q": ({"cu_seqlens_q": torch.tensor([0, 50, 128])}, "name it 'cu_seq_lens_q'"),
    "cu_seqlens": ({"cu_seqlens": torch.tensor([0, 50, 128])}, "name it 'cu_seq_lens_q'"),
    "attn_mask": ({"attn_mask": torch.ones(2, models.SIZE)}, "name it 'attention_mask'"),
    "label": ({"label": TOKENS}, "name it 'labels'"),
    "seq_idx": ({"seq_idx": RESTARTING}, "pass position_ids that restart at each document, too"),
    "3 axes": ({"position_ids": RESTARTING.expand(3, 2, -1)}, r"[B or 1, S] is needed"),
}


@pytest.mark.parametrize("name", WRONG_BATCHES)
def test_names_that_would_be_dropped_are_refused(name: str) -> None:
    config, (values, reason) = models.build_model("Llama", num_hidden_layers=1).config, WRONG_BATCHES[name]
    with pytest.raises(ValueError, match=re.escape(reason)):
        shard_batch({"input_ids": TOKENS, **values}, config)


def test_names_without_a_meaning_are_passed_through() -> None:
    config = models.build_model("Llama", num_hidden_layers=1).config
    rest = {"targets": TOKENS, "loss_mask": TOKENS, "token_type_ids": TOKENS, "temperature": 1.0}
    rest |= {"output_router_logits": False, "logits_to_keep": 0}
    assert rest.keys() <= shard_batch({"input_ids": TOKENS, **rest, "label": None}, config).keys()


@pytest.mark.parametrize("value", [{"output_router_logits": True}, {"logits_to_keep": 1}])
def test_a_batch_with_values_of_the_whole_sequence_is_refused_on_ranks(value: dict[str, Any]) -> None:
    model = models.build_model("Llama", num_hidden_layers=1)

    def work(group: Any) -> None:
        with pytest.raises(ValueError, match=next(iter(value))):
            shard_batch({"input_ids": TOKENS, **value}, model.config, group)

    ranks.run(2, work)


def test_copies_of_a_sharded_batch_have_the_logits_of_the_batch() -> None:
    model = models.build_model("Gemma2").eval()
    shard = shard_batch(models.packed_batch(), model.config)
    expected = model(**shard).logits
    for copied in (copy.deepcopy(shard), copy.copy(shard), pickle.loads(pickle.dumps(shard))):
        assert torch.equal(model(**copied).logits, expected)


@pytest.mark.long
def test_copies_of_a_batch_keep_the_group_and_pickles_are_refused() -> None:
    model = models.build_model("Gemma2").eval()

    def work(group: Any) -> Tensor:
        shard = shard_batch(models.packed_batch(), model.config, group, BLOCK_SIZE=16)
        with pytest.raises(TypeError, match="pickle the batch before shard_batch"):
            pickle.dumps(shard)
        mesh = dist.init_device_mesh("cpu", (2,))
        pickle.dumps(shard_batch(models.packed_batch(), model.config, mesh, BLOCK_SIZE=16))
        copied = copy.deepcopy(shard)
        assert torch.equal(model(**copied).logits, model(**shard).logits)

    ranks.run(2, work)


def test_a_config_without_a_padding_token_has_positions() -> None:
    config = RwkvConfig(
        vocab_size=models.VOCABULARY, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16
    )
    config._attn_implementation = "tritoncp"
    model = RwkvForCausalLM(config).train()
    assert not hasattr(config, "pad_token_id")
    logits = model(**shard_batch({"input_ids": TOKENS}, model)).logits
    torch.testing.assert_close(logits, model(TOKENS).logits)

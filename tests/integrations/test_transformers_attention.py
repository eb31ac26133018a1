"""Models on one process: answers of transformers' eager attention, and the masks that are made."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, masking_utils

import tritoncp
from tests.integrations import transformers_models as models
from tritoncp.integrations.transformers import register, shard_batch

pytestmark = pytest.mark.usefixtures("cpu_engine")
SMALL = {"num_hidden_layers": 1}
SLOW = [pytest.param(name, marks=pytest.mark.integrations) for name in ("Mistral", "GptOss", "Qwen3")]
FEW = ["Llama", "Gemma2", *SLOW]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.parametrize("kind", models.BATCHES)
def test_a_model_has_the_loss_and_gradients_of_eager_attention(name: str, kind: str) -> None:
    batch, model = models.BATCHES[kind](), models.build_model(name)
    expected = models.loss_and_gradients(models.build_model(name, "eager"), batch)
    models.assert_equal(models.loss_and_gradients(model, batch), expected)
    if name != "GptOss" or kind != "packed":  # transformers' gpt-oss does not read packed documents
        models.assert_equal(models.loss_and_gradients(model, shard_batch(batch, model.config)), expected)


def test_packed_documents_of_gpt_oss_do_not_see_each_other() -> None:
    model = models.build_model("GptOss")
    batch = {name: x[:1] for name, x in models.packed_batch().items() if name != "labels"}
    together = model(**shard_batch(batch, model.config)).logits
    alone = model(batch["input_ids"][:, 57:], use_cache=False).logits
    torch.testing.assert_close(together[:, 57:], alone)


def test_chunks_follow_the_padding_of_each_row() -> None:
    positions = torch.cat([torch.arange(50), torch.arange(40)])[None].expand(2, -1)
    mask = torch.ones(2, 90, dtype=torch.long)
    mask[0, :5] = 0
    for arguments in ({"position_ids": positions}, {"attention_mask": mask}, {}):
        dense, closed = (chunked_mask(attention, **arguments) for attention in ("sdpa", "tritoncp"))
        visible = tritoncp.create_block_mask(closed.mask_mod, 2, None, 90, 90).to_dense(2, 1)
        tokens = arguments.get("attention_mask", torch.ones(2, 90)).bool()[:, None, :, None]
        assert torch.equal(visible & tokens, dense & tokens)


def chunked_mask(attention: str, **arguments: Any) -> Any:
    """Return transformers' mask of chunks of 16 tokens, for two rows."""
    config = models.build_model("Llama", attention, **SMALL).config
    config.attention_chunk_size = 16
    arguments = {"attention_mask": None, "past_key_values": None, "position_ids": None, **arguments}
    return masking_utils.create_chunked_causal_mask(
        config, torch.empty(2, 90, 0), **arguments, allow_is_causal_skip=False
    )


def test_documents_of_flash_attention_keywords_and_of_position_ids_agree() -> None:
    model = models.build_model("Mistral")
    tokens = models.text_batch(1)["input_ids"]
    cu = torch.tensor([0, 50, 51, 128])
    positions = torch.cat([torch.arange(50), torch.arange(1), torch.arange(77)])[None]
    expected = models.build_model("Mistral", "eager")(tokens, position_ids=positions, use_cache=False).logits
    keywords = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 77, "max_length_k": 77}
    sharded = model(**shard_batch({"input_ids": tokens, **keywords}, model.config)).logits
    torch.testing.assert_close(sharded, expected, rtol=0, atol=1e-5)
    for position_ids in (positions, None):  # rotary embeddings are relative
        out = model(tokens, position_ids=position_ids, use_cache=False, **keywords).logits
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


def test_masks_of_pairs_and_of_functions_are_attended() -> None:
    tokens = models.text_batch()["input_ids"]
    q, kv = torch.arange(models.SIZE)[:, None], torch.arange(models.SIZE)
    dense = ((kv <= q) & ((q - kv) % 3 < 2))[None, None]
    expected = models.build_model("Llama", "eager")(tokens, torch.where(dense, 0.0, -torch.inf)).logits
    model = models.build_model("Llama")
    skip_thirds = tritoncp.causal() & (lambda b, h, q, kv: (q - kv) % 3 < 2)
    block = tritoncp.create_block_mask(skip_thirds, None, None, models.SIZE, models.SIZE)
    for mask in (dense, torch.where(dense, 0.0, -torch.inf), block, block.to_block_mask()):
        torch.testing.assert_close(model(tokens, mask).logits, expected, rtol=0, atol=1e-5)


def test_dropout_is_refused_in_training() -> None:
    model = models.build_model("Llama", attention_dropout=0.1)
    tokens = models.text_batch()["input_ids"]
    assert model.eval()(tokens).logits.shape == (2, models.SIZE, models.VOCABULARY)
    with pytest.raises(ValueError, match="dropout=0\\.1"):
        model.train()(tokens)


def test_biases_of_positions_and_selected_keys_are_added_to_the_scores() -> None:
    attend = AttentionInterface()["tritoncp"]
    q, k, v = torch.randn(3, 2, 2, 40, 8)
    bias = torch.randn(1, 2, 40, 40, requires_grad=True)
    keys = torch.stack([torch.randperm(40)[:7] for _ in range(80)]).view(2, 40, 7)
    selected = torch.full((2, 1, 40, 40), -torch.inf).scatter(-1, keys[:, None], 0.0)
    out, _ = attend(torch.nn.Module(), q, k, v, None, position_bias=bias, indices=keys, is_causal=False)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias + selected).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    weight = torch.randn_like(out)
    gradients = (torch.autograd.grad((x * weight).sum(), bias)[0] for x in (out, expected))
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-5)


def test_a_module_without_a_mask_has_the_window_of_its_call() -> None:
    attend = AttentionInterface()["tritoncp"]
    q, k, v = torch.randn(3, 1, 2, 40, 8)
    distance = torch.arange(40)[:, None] - torch.arange(40)
    module = torch.nn.Module()
    for is_causal, window, visible in (
        (True, None, distance >= 0),
        (True, 8, (distance >= 0) & (distance < 8)),
        (False, 8, distance.abs() < 8),
        (False, None, distance > -40),
    ):
        out, weights = attend(module, q, k, v, None, is_causal=is_causal, sliding_window=window)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, visible)
        torch.testing.assert_close(out.transpose(1, 2), expected, rtol=0, atol=1e-5)
        assert weights is None


def test_positions_of_several_axes_are_refused_and_those_of_texts_are_not() -> None:
    batch = models.packed_batch()
    plan = shard_batch(batch, models.build_model("Llama", **SMALL).config)["context_parallel"]
    axes = plan.position_ids.expand(3, -1, -1).clone()
    plan.check_positions(axes)  # of texts
    axes[1] += 1
    with pytest.raises(
        ValueError, match=r"position_ids is \[3, 2, 128\]: the model makes positions of several axes"
    ):
        plan.check_positions(axes)


def test_a_second_name_is_registered_like_the_first() -> None:
    register("tritoncp_again")
    model = models.build_model("Llama", "tritoncp_again", **SMALL)
    batch = models.text_batch()
    models.assert_equal(
        models.loss_and_gradients(model, batch),
        models.loss_and_gradients(models.build_model("Llama", "eager", **SMALL), batch),
    )


@contextmanager
def counted_calls(*functions: Any) -> Iterator[list[str]]:
    """Collect the names of these functions, found by their code, when they are called."""
    calls: list[str] = []
    codes = {function.__code__ for function in functions}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in codes:
            calls.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_makes_one_plan_a_kind_of_layer_and_none_for_a_token(name: str, cache: str | None) -> None:
    prompt = models.text_batch()["input_ids"][:, :30]
    padding = torch.ones_like(prompt)
    padding[1, :6] = 0
    options = {"do_sample": False, "cache_implementation": cache, "max_new_tokens": 24}
    model, eager = (models.build_model(name, attention).eval() for attention in ("tritoncp", "eager"))
    kinds = 2 if name in ("Gemma2", "GptOss", "Qwen3") else 1
    for options["attention_mask"] in (None, padding):
        tritoncp.plan_cache_clear()
        with counted_calls(masking_utils.causal_mask_function) as calls:
            tokens = model.generate(prompt, **options)
        assert tritoncp.plan_cache_info().misses == kinds  # of the prompt
        # transformers evaluates the row of one token for each kind; all keys visible: not even that.
        assert len(calls) <= 23 * kinds
        assert not calls or cache == "static" or options["attention_mask"] is not None or name != "Llama"
        assert torch.equal(tokens, eager.generate(prompt, **options))


def test_a_custom_mask_function_is_traced_once_for_all_layers() -> None:
    def every_third(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q + kv) % 3 == 0

    def mask_of(attention: str) -> Any:
        return masking_utils.create_causal_mask(
            models.build_model("Llama", attention).config,
            torch.empty(2, models.SIZE, 0),
            None,
            None,
            or_mask_function=every_third,
        )

    tokens = models.text_batch()["input_ids"]
    model, sdpa = (
        models.build_model("Llama", attention, num_hidden_layers=3) for attention in ("tritoncp", "sdpa")
    )
    expected, numbers = sdpa(tokens, mask_of("sdpa")).logits, []
    tritoncp.plan_cache_clear()
    for _ in range(2):
        with counted_calls(every_third) as calls:
            out = model(tokens, mask_of("tritoncp"), use_cache=False).logits
        numbers.append(len(calls))
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    assert numbers[0] > 0 and numbers[1] == 0  # the second call of the model reuses the plan
    assert tritoncp.plan_cache_info().misses == 1


def test_queries_behind_a_cache_see_the_keys_before_them() -> None:
    tokens = models.text_batch()["input_ids"]
    for name in models.MODELS:
        model, eager = (models.build_model(name, attention).eval() for attention in ("tritoncp", "eager"))
        expected = eager(tokens, use_cache=False).logits[:, 50:]
        cache = model(tokens[:, :50], use_cache=True).past_key_values
        torch.testing.assert_close(
            model(tokens[:, 50:], past_key_values=cache).logits, expected, rtol=0, atol=1e-5
        )

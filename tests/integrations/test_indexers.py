"""Models whose layers select keys: equal on ranks and in one process, with the keys that their own indexers
select, without a tensor of all pairs."""

from __future__ import annotations

import copy
import sys
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.integrations import families
from tests.multiprocess import ranks
from tritoncp.integrations.transformers import attention, shard_batch
from tritoncp.integrations.transformers.indexers.layers import SELECTOR, KeySelector
from tritoncp.integrations.transformers.indexers.pools import DocumentBlocks
from tritoncp.integrations.transformers.indexers.scores import read_scores

pytestmark = pytest.mark.usefixtures("cpu_engine")
HEADS = families.list_families()
# Single keys, blocks of each head, means; keys of an earlier layer, pools with learned weights; others alike.
KINDS = ("deepseek_v32", "minimax_m3_vl_text", "qwen4_exp_text")
MORE = [pytest.param(name, marks=pytest.mark.long) for name in ("glm_moe_dsa", "glm5_next")]
KIN = ("axk2", "dots3_note_text", "hy_v4", "mistral_large4")
OTHERS = [pytest.param(name, marks=[pytest.mark.nightly, pytest.mark.integrations]) for name in KIN]
RECURRENT = ("qwen4_exp_text", "glm5_next")  # their other layers compute in float32
OPTIONS = {"glm_moe_dsa": {"indexer_types": ["full", "shared"]}}


@cache
def variant_of(family: str) -> dict[str, Any]:
    variant, error = families.find_variant(family, HEADS[family])
    assert not error
    return variant


def build(family: str, implementation: str, **options: Any) -> Any:
    options = variant_of(family) | OPTIONS.get(family, {}) | options
    model = families.build(family, HEADS[family], implementation, options).double()
    model.set_experts_implementation("eager")  # torch's grouped products have no float64
    return model


@pytest.fixture(params=[*KINDS, *MORE, *OTHERS])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def sum_on_ranks(group: Any, model: Any) -> list[dict[str, Tensor]]:
    """Return loss and gradients of a text and of packed documents, summed over the ranks."""
    results = []
    for packed in (False, True):
        batch = shard_batch(families.make_batch(packed, ""), model, group, BLOCK_SIZE=16)
        result = families.train(model, batch)
        for name, weight in model.named_parameters():
            dist.all_reduce(result.setdefault(name, torch.zeros_like(weight)))
        dist.all_reduce(result["loss"])
        results.append(result)
    return results


def check_equal(result: dict[str, Tensor], expected: dict[str, Tensor], limit: float) -> None:
    """Compare loss, a float32 number of transformers, and gradients, relative to the largest one."""
    largest = max(x.abs().max() for name, x in expected.items() if name != "loss")
    for name, x in expected.items():
        scale = x if name == "loss" else largest
        torch.testing.assert_close(
            result[name], x, rtol=0, atol=limit * scale.item(), msg=f"{name}: {{}}".format
        )


@pytest.mark.long
def test_ranks_train_like_one_process(family: str) -> None:
    model = build(family, "tritoncp")
    expected = [
        families.train(model, shard_batch(families.make_batch(packed, ""), model, BLOCK_SIZE=16))
        for packed in (False, True)
    ]
    for results in ranks.run(3, sum_on_ranks, model):
        for result, one in zip(results, expected, strict=True):
            check_equal(result, one, 1e-5 if family in RECURRENT else 1e-6)


def seen_by_transformers(
    model: Any, batch: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> list[Tensor]:
    """Return which pairs each layer shows, bool [B, H, S, S], with eager attention."""
    seen: list[Tensor] = []
    modeling = sys.modules[type(model).__module__]
    own = modeling.eager_attention_forward

    def record(module: Any, query: Any, key: Any, value: Any, mask: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(mask == 0)
        return own(module, query, key, value, mask, *args, **kwargs)

    monkeypatch.setattr(modeling, "eager_attention_forward", record)
    with families.LowerPositionsFirst():
        model(**batch)
    return seen


def seen_here(model: Any, batch: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return the same with this package's attention."""
    seen: list[Tensor] = []
    own = attention.flex_attention

    def record(query: Tensor, key: Any, value: Any, score: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        selected, length = kwargs["selected"], query.shape[2]
        shown = mask.to_dense()[..., :length, :length]
        seen.append(shown if selected is None else shown & selected.to_dense(length))
        return own(query, key, value, score, mask, *args, **kwargs)

    monkeypatch.setattr(attention, "flex_attention", record)
    model(**batch)
    return seen


@pytest.mark.sample(2)
def test_the_keys_are_those_of_the_own_indexer(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {"input_ids": families.make_batch(False, "")["input_ids"]}
    models = build(family, "eager"), build(family, "tritoncp")
    expected = seen_by_transformers(models[0], batch, monkeypatch)
    actual = seen_here(models[1], batch, monkeypatch)
    assert len(actual) == len(expected) > 0
    causal = torch.ones(families.LENGTH, families.LENGTH, dtype=torch.bool).tril()
    assert any(not torch.equal(x & causal, causal.expand_as(x)) for x in expected)  # some keys are left out
    for one, other in zip(actual, expected, strict=True):
        heads = max(one.shape[1], other.shape[1])
        one, other = (x.repeat_interleave(heads // x.shape[1], 1) for x in (one, other))
        assert torch.equal(one.expand_as(other), other)


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that an operation makes."""

    size = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, Tensor) and not x._is_view():
                self.size = max(self.size, x.numel())
        return out


@pytest.mark.long
def test_no_tensor_has_all_pairs(family: str) -> None:
    long = {"max_position_embeddings": 3072}
    for implementation, length in (("eager", 128), ("tritoncp", 3072)):
        model = build(family, implementation, **long)
        tokens = torch.randint(3, families.VOCABULARY, (1, length))
        with Largest() as largest:
            model(input_ids=tokens, labels=tokens).loss.backward()
        assert (largest.size < length**2) == (implementation == "tritoncp")


@pytest.mark.sample(1)
def test_a_step_of_generation_is_that_of_eager_attention(family: str) -> None:
    tokens = families.make_batch(False, "")["input_ids"][:, :40]
    results = []
    for implementation in ("eager", "tritoncp"):
        model = build(family, implementation).eval()
        with torch.no_grad(), families.LowerPositionsFirst():
            first = model(input_ids=tokens[:, :-1], use_cache=True)
            cache = first.past_key_values
            second = model(input_ids=tokens[:, -1:], past_key_values=cache, use_cache=True)
        results.append((first.logits, second.logits))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_selects_the_same_keys_again(reentrant: bool) -> None:
    """A layer that reuses the keys of another gets them as an argument."""
    batch, results = families.make_batch(True, ""), []
    for checkpoints in (False, True):
        model = build("glm_moe_dsa", "tritoncp")
        if checkpoints:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        results.append(families.train(model, shard_batch(batch, model, BLOCK_SIZE=16)))
    check_equal(results[1], results[0], 1e-12)


def test_a_copy_of_a_model_selects_for_itself() -> None:
    model = build("minimax_m3_vl_text", "tritoncp")
    batch = families.make_batch(False, "")
    expected = families.train(model, batch)
    other = copy.deepcopy(model)
    selectors = [x for part in other.modules() if isinstance(x := vars(part).get(SELECTOR), KeySelector)]
    assert selectors and all(selector.attention in set(other.modules()) for selector in selectors)
    assert all(selector.attend == selector.attention.forward for selector in selectors)
    check_equal(families.train(other, batch), expected, 1e-12)


@pytest.mark.parametrize("name", ["deepseek_v32", "qwen4_exp_text"])
def test_padding_is_not_selected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {"input_ids": families.make_batch(False, "")["input_ids"]}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][1, :9] = 0
    # Rows of padding have no number in float64: transformers' eager attention takes softmax in float32.
    models = build(name, "eager").float(), build(name, "tritoncp").float()
    expected = seen_by_transformers(models[0], batch, monkeypatch)
    for one, other in zip(seen_here(models[1], batch, monkeypatch), expected, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1, :, 9:], other[1, :, 9:])


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=3), st.integers(1, 4)
)
def test_blocks_begin_with_documents(lengths: list[list[int]], size: int) -> None:
    rows = [[n for i, count in enumerate(row) for n in [i - 1] * count] for row in lengths]
    width = max(1, max(map(len, rows)))
    segments = torch.tensor([row + [-1] * (width - len(row)) for row in rows])
    blocks = DocumentBlocks.of(segments, size)
    for row, tokens, places in zip(segments.tolist(), blocks.tokens.tolist(), blocks.places.tolist()):
        expected = [[t for t in range(width) if row[t] == document] for document in sorted(set(row) - {-1})]
        parts = [part[i : i + size] for part in expected for i in range(0, len(part), size)]
        laid = [t for part in parts for t in part + [-1] * (size - len(part))]
        assert tokens == laid + [-1] * (len(tokens) - len(laid))
        assert all((place < 0) == (row[t] < 0) for t, place in enumerate(places))
        assert all(tokens[place] == t for t, place in enumerate(places) if place >= 0)


def test_an_indexer_of_another_form_is_refused() -> None:
    query, key = torch.randn(1, 4, 2, 8), torch.randn(1, 1, 8, 4)
    with pytest.raises(ValueError, match="calls sigmoid of its scores"):
        read_scores(lambda: torch.sigmoid(torch.matmul(query, key) * 2), summed=True)
    with pytest.raises(ValueError, match="no product of queries and keys"):
        read_scores(lambda: query.sum(), summed=True)


@pytest.mark.integrations
def test_compressed_keys_are_refused_on_ranks() -> None:
    model = build("deepseek_v4", "tritoncp")
    with pytest.raises(ValueError, match="keys that each are made of several tokens"):
        shard_batch(families.make_batch(False, ""), model)

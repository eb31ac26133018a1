"""Layers of models that are compiled one by one: whole graphs, which new batches and masks do not compile
again."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.integrations import transformers_models as models
from tests.multiprocess import ranks
from tritoncp.core.handles import object_of
from tritoncp.integrations.transformers import shard_batch
from tritoncp.integrations.transformers.plans import ContextParallelPlan

pytestmark = pytest.mark.usefixtures("cpu_engine", "fresh_dynamo")


def compile_layers(model: Any, dynamic: bool | None, backend: str) -> CompileCounterWithBackend:
    counter = CompileCounterWithBackend(backend)
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=dynamic, backend=counter)
    return counter


def shorter(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch of other lengths."""
    return {name: x[:, : models.SIZE - 24] for name, x in batch.items()}


def compare(name: str, dynamic: bool | None, backend: str, group: Any = None) -> list[Any]:
    """Return (loss and gradients of compiled layers, of plain ones) of batches of each kind and two lengths,
    and how many graphs the shorter ones added."""
    plain, compiled = models.build_model(name), models.build_model(name)
    counter = compile_layers(compiled, dynamic, backend)
    results: list[Any] = []
    for shorten in (dict, shorter):
        before = counter.frame_count
        for make in models.BATCHES.values():
            batch = shorten(make())
            local = [batch, batch]
            if group is not None:
                local = [shard_batch(batch, model, group, BLOCK_SIZE=16) for model in (compiled, plain)]
            pair = zip((compiled, plain), local, strict=True)
            results.append([models.loss_and_gradients(model, batch) for model, batch in pair])
    return [*results, counter.frame_count - before]


def others(*rows: Any) -> list[Any]:
    return [pytest.param(*row, marks=pytest.mark.integrations) for row in rows]


@pytest.mark.parametrize(
    ("name", "dynamic", "backend"),
    [
        pytest.param("Qwen3", True, "eager", marks=pytest.mark.long),  # below, on ranks
        *others(*[(name, True, "aot_eager") for name in ("Qwen3", "Gemma2", "GptOss")]),
        *others(("GptOss", None, "aot_eager")),
    ],
)
def test_compiled_layers_have_the_losses_and_gradients_of_plain_ones(
    name: str, dynamic: bool | None, backend: str
) -> None:
    *pairs, added = compare(name, dynamic, backend)
    for pair in pairs:
        models.assert_equal(*pair)
    assert not (dynamic and added)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "backend"),
    [("Gemma2", "eager"), *others(*[(name, "aot_eager") for name in ("Gemma2", "Qwen3", "GptOss")])],
)
def test_compiled_layers_on_ranks_have_the_losses_and_gradients_of_plain_ones(
    name: str, backend: str
) -> None:
    for *pairs, added in ranks.run(2, lambda group: compare(name, True, backend, group)):
        for pair in pairs:
            models.assert_equal(*pair)
        assert not added


@pytest.mark.long
def test_a_compiled_layer_refuses_what_a_plain_one_refuses() -> None:
    def call(group: Any) -> list[str]:
        model = models.build_model("Qwen3")
        compile_layers(model, True, "eager")
        local = shard_batch(models.text_batch(), model, group, BLOCK_SIZE=16)
        model(**local)
        moved = {**local, "position_ids": local["position_ids"] + 1}
        padded = {**local, "attention_mask": torch.zeros_like(local["input_ids"])}
        return [ranks.attempt(lambda batch=batch: model(**batch)) for batch in (moved, padded)]

    for moved, padded in ranks.run(1, call):
        assert "position_ids differ from the plan's" in moved
        assert "attention_mask is passed beside the batch of shard_batch" in padded


@pytest.mark.long
def test_a_plan_of_a_batch_is_freed_with_its_batch_and_pickled_with_its_handle() -> None:
    batch = shard_batch(models.text_batch(), models.build_model("Qwen3").config)
    plan = batch["context_parallel"]
    other = pickle.loads(pickle.dumps(plan))
    assert isinstance(other, ContextParallelPlan) and object_of(other.handle) is other
    handle = plan.handle.clone()
    assert object_of(handle) is plan
    del batch, plan
    gc.collect()
    with pytest.raises(RuntimeError, match="was freed"):
        object_of(handle)

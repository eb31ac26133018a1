"""Models on ranks: losses and gradients equal one process with transformers' attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import masking_utils

import tritoncp
from tests.integrations import transformers_models as models
from tests.multiprocess import ranks
from tritoncp.integrations.transformers import shard_batch

pytestmark = pytest.mark.usefixtures("cpu_engine")
EVERY = list(models.MODELS | models.MORE_MODELS)


def expected_of(name: str, batch: dict[str, Any]) -> Any:
    """Return loss and gradients of one process, by transformers' eager attention, or by tritoncp's for packed
    documents that transformers does not separate."""
    model = models.build_model(name, "eager")
    if name in ("GptOss", "OPT", "Qwen3Next") and "position_ids" in batch:
        model = models.build_model(name)
        batch = shard_batch(batch, model)
    return models.loss_and_gradients(model, batch)


def check_models(world_size: int, cases: list[tuple[str, str]]) -> None:
    """Compare models and kinds of batches on ranks with one process."""

    def run(group: Any) -> list[Any]:
        return [models.on_ranks(group, name, models.BATCHES[kind]()) for name, kind in cases]

    for result, (name, kind) in zip(ranks.run(world_size, run)[-1], cases, strict=True):
        models.assert_equal(result, expected_of(name, models.BATCHES[kind]()))


@pytest.mark.long
def test_two_ranks_have_the_losses_and_gradients_of_one() -> None:
    check_models(2, [*((name, "text") for name in models.MODELS), ("Gemma2", "packed"), ("Qwen3", "padded")])


@pytest.mark.integrations
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", EVERY)
def test_every_model_has_the_losses_and_gradients_of_one_rank(world_size: int, name: str) -> None:
    check_models(world_size, [(name, kind) for kind in models.BATCHES])


def policy() -> Any:
    return create_selective_checkpoint_contexts(tritoncp.checkpoint_policy())


@pytest.mark.long
@pytest.mark.parametrize(
    "checkpointing",
    [{}, pytest.param({"use_reentrant": False, "context_fn": policy}, marks=pytest.mark.integrations)],
)
@pytest.mark.parametrize("name", ["Gemma2", "Qwen3Next"])
def test_plans_survive_the_recomputation_of_checkpoints(name: str, checkpointing: dict[str, Any]) -> None:
    batch = models.padded_batch()
    for result in ranks.run(2, models.on_ranks, name, batch, checkpointing):
        models.assert_equal(result, expected_of(name, batch))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.integrations)])
def test_logits_of_shards_are_put_together(compiled: bool) -> None:
    batch = models.text_batch()

    def logits(group: Any) -> torch.Tensor:
        model = models.build_model("Mistral").eval()
        local = shard_batch(batch, model.config, group, BLOCK_SIZE=16)
        call = torch.compile(model, backend="eager") if compiled else model
        return tritoncp.unshard(call(**local).logits.detach(), local["context_parallel"].plan, group, dim=1)

    expected = models.build_model("Mistral", "eager")(batch["input_ids"]).logits
    torch.testing.assert_close(ranks.run(2, logits)[1], expected, rtol=0, atol=1e-5)


@pytest.mark.integrations
@pytest.mark.parametrize("options", [{"balancer": None}, {"schedule": "ring"}, {"schedule": "ulysses"}])
def test_orders_and_schedules_have_the_losses_and_gradients_of_one_rank(options: dict[str, Any]) -> None:
    batch = models.packed_batch()

    def train(group: Any) -> Any:
        mesh = group
        if options.get("schedule") == "ulysses":
            mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "heads"))
        return models.on_ranks(mesh, "Qwen3", batch, **options)

    models.assert_equal(ranks.run(2, train)[1], expected_of("Qwen3", batch))


@pytest.mark.integrations
def test_fsdp_over_all_ranks_has_the_gradients_of_one() -> None:
    batch = models.padded_batch()

    def train(group: Any) -> Any:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        model = models.build_model("Llama")
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        row = {name: x[mesh["dp"].get_local_rank(), None] for name, x in batch.items()}
        row["num_items_in_batch"] = (batch["labels"][:, 1:] != -100).sum()  # of both rows
        local = shard_batch(row, model.config, mesh["cp"], BLOCK_SIZE=16)
        loss = model(**local).loss
        (loss * dist.get_world_size()).backward()  # FSDP averages
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item(), {name: w.grad.full_tensor() for name, w in model.named_parameters()}

    models.assert_equal(ranks.run(4, train)[3], expected_of("Llama", batch))


@pytest.mark.long
def test_a_shard_without_its_plan_and_positions_of_another_batch_raise() -> None:
    batch = models.text_batch()

    def errors(group: Any, name: str) -> list[str]:
        model = models.build_model(name, num_hidden_layers=1)
        local = shard_batch(batch, model.config, group, BLOCK_SIZE=16)
        natural = shard_batch(batch, model.config, group, balancer=None)
        packed = shard_batch(models.packed_batch(), model.config, group, BLOCK_SIZE=16)
        wrongs = (
            {**local, "context_parallel": None},
            {**natural, "context_parallel": None},
            {**local, "position_ids": packed["position_ids"]},
            {**local, "attention_mask": (torch.arange(local["input_ids"].shape[1]) > 0).expand(2, -1)},
        )
        messages = [ranks.attempt(lambda wrong=wrong: model(**wrong) and "") for wrong in wrongs]
        copied = {**local, "position_ids": local["position_ids"].clone()}
        assert torch.equal(model(**copied).logits, model(**local).logits)
        evaluated = model(
            models.packed_batch()["input_ids"], position_ids=models.packed_batch()["position_ids"]
        )
        assert evaluated.logits.shape == (2, models.SIZE, models.VOCABULARY)  # of the rank
        return messages

    for name in ("Llama", "GptOss"):
        first, second = ranks.run(2, errors, name)
        for message in (*first[:2], *second[:2]):
            assert "this looks like a shard without its plan" in message
        for messages in (first, second):
            assert "position_ids differ from the plan" in messages[2]
            assert "attention_mask is passed beside the batch" in messages[3]


def test_a_model_whose_masks_know_no_positions_separates_documents_and_knows_its_shards() -> None:
    batch = models.packed_batch()

    def train(group: Any) -> Any:
        with pytest.warns(UserWarning, match="Compare losses with shard_batch"):
            result = models.on_ranks(group, "OPT", batch)
        model = models.build_model("OPT")
        local = shard_batch(batch, model.config, group, BLOCK_SIZE=16)
        with pytest.raises(ValueError, match="looks like a shard without its plan"):
            model(**{**local, "context_parallel": None})
        return result

    model = models.build_model("OPT")
    expected = models.loss_and_gradients(model, shard_batch(batch, model.config))
    models.assert_equal(ranks.run(2, train)[0], expected)


def test_ranks_with_different_batches_raise() -> None:
    def error(group: Any) -> str:
        model, batch = models.build_model("Llama", num_hidden_layers=1), models.text_batch()
        batch["input_ids"][1, 7] += group.rank()
        with pytest.raises(
            RuntimeError, match=r"give every rank the same batch.*use_distributed_sampler=False"
        ):
            shard_batch(batch, model.config, group)
        batch["position_ids"] = torch.arange(models.SIZE - group.rank())[None]
        with pytest.raises((RuntimeError, ValueError)) as wrong:
            shard_batch(batch, model.config, group)
        return str(wrong.value)

    for message in ranks.run(2, error):
        assert "position_ids is [1, 127]; [B or 1, S] is needed, here [2, 128]" in message


def test_kinds_of_layers_have_one_order_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = masking_utils.create_masks_for_generate

    def keys(group: Any) -> list[str]:
        def in_another_order(**arguments: Any) -> Any:
            return dict(sorted(listed(**arguments).items(), reverse=group.rank() == 1))

        monkeypatch.setattr(masking_utils, "create_masks_for_generate", in_another_order)
        config = models.build_model("Gemma2", num_hidden_layers=2).config
        return list(shard_batch(models.text_batch(), config, group)["context_parallel"].plans)

    assert ranks.run(2, keys) == [["window(-1, 0)", "window(19, 0)"]] * 2

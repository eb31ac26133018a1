"""The Trainer on ranks: weights and losses of transformers' Trainer on one process, and its refusals."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments

from tests.integrations import transformers_models as models
from tests.multiprocess import ranks
from tritoncp.integrations.transformers import ContextParallelTrainer

pytestmark = pytest.mark.usefixtures("cpu_engine")
STEPS, LENGTHS = 3, [128, 90, 40, 128, 77, 128, 15, 101]


def documents() -> list[dict[str, torch.Tensor]]:
    """Return texts of several lengths, padded on the right."""
    texts = []
    for i, length in enumerate(LENGTHS):
        tokens = torch.randint(
            1, models.VOCABULARY, (models.SIZE,), generator=torch.Generator().manual_seed(i)
        )
        mask = (torch.arange(models.SIZE) < length).long()
        labels = tokens.masked_fill(mask == 0, -100)
        texts.append({"input_ids": tokens * mask, "attention_mask": mask, "labels": labels})
    return texts


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    """Return the arguments of a short run on the CPU."""
    fixed: dict[str, Any] = {
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.05,
        "logging_steps": 1,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return TrainingArguments(str(folder), **fixed | options)


class Stream(IterableDataset):
    """Documents without a length, which accelerate would have rank 0 read for all."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(documents())


def train(
    cls: type[Trainer], attention: str, folder: Path, args: dict[str, Any], count: int, **options: Any
) -> Any:
    """Train a model and evaluate it on ``count`` documents. Return losses and gradient norms of the steps,
    the loss of the evaluation, and the weights."""
    model = models.build_model("Gemma2", attention)
    trainer = cls(
        model,
        arguments(folder, **args),
        **{"train_dataset": documents(), "eval_dataset": documents()[:count], **options},
    )
    trainer.train()
    evaluation = trainer.evaluate()["eval_loss"]
    steps = [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "loss" in line]
    return steps, evaluation, {name: weight.detach() for name, weight in model.named_parameters()}


def train_on_ranks(
    world_size: int, cp: int, folder: Path, args: dict[str, Any], count: int, **options: Any
) -> Any:
    """Train on ranks, with groups of ``cp`` ranks that share documents; return the results of the last
    rank."""

    def run(group: Any) -> Any:
        environment = {"RANK": group.rank(), "LOCAL_RANK": group.rank(), "WORLD_SIZE": world_size}
        environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 0, "LOCAL_WORLD_SIZE": world_size}
        os.environ |= {name: str(value) for name, value in environment.items()}
        for state in (PartialState, AcceleratorState, GradientState):
            state._reset_state()
        mesh = None
        if cp < world_size:
            mesh = dist.init_device_mesh("cpu", (world_size // cp, cp), mesh_dim_names=("dp", "cp"))["cp"]
        sharding = {"BLOCK_SIZE": 16}
        return train(
            ContextParallelTrainer, "tritoncp", folder, args, count, mesh=mesh, sharding=sharding, **options
        )

    return ranks.run(world_size, run, timeout=120)[-1]


def assert_equal(result: Any, expected: Any) -> None:
    """Compare two runs."""
    torch.testing.assert_close(result[0], expected[0], rtol=1e-5, atol=1e-5)
    assert result[1] == pytest.approx(expected[1], rel=1e-5)
    torch.testing.assert_close(result[2], expected[2], rtol=0, atol=3e-6)


@pytest.mark.long
def test_one_process_trains_as_transformers_does(tmp_path: Path) -> None:
    args = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    expected = train(Trainer, "eager", tmp_path, args, 3)
    assert_equal(train(ContextParallelTrainer, "tritoncp", tmp_path, args, 3), expected)


@pytest.mark.integrations
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize(("world_size", "cp"), [(2, 2), (4, 2)])
def test_ranks_train_as_one_process_does(world_size: int, cp: int, average: bool, tmp_path: Path) -> None:
    """Documents of a step are the same, and as many in a batch, for any number of replicas."""
    replicas = world_size // cp
    args = {"gradient_accumulation_steps": 2, "average_tokens_across_devices": average}
    sizes = ("per_device_train_batch_size", "per_device_eval_batch_size")
    documents = 3 if replicas == 1 else 4  # three: the last batch is smaller
    one = train(Trainer, "eager", tmp_path, args | dict.fromkeys(sizes, 2), documents)
    many = train_on_ranks(world_size, cp, tmp_path, args | dict.fromkeys(sizes, 2 // replicas), documents)
    if average or replicas == 1:
        assert_equal(many, one)
    assert len({loss for loss, _ in many[0]}) == STEPS


@pytest.mark.integrations
def test_ranks_share_the_documents_of_a_stream(tmp_path: Path) -> None:
    args: dict[str, Any] = {"per_device_train_batch_size": 2}
    expected = train(Trainer, "eager", tmp_path, args, 4, train_dataset=Stream())
    with pytest.raises(ValueError, match="dispatch_batches=True sends"):
        train_on_ranks(2, 2, tmp_path, args, 4, train_dataset=Stream())
    args |= {"accelerator_config": {"dispatch_batches": False}}
    assert_equal(train_on_ranks(2, 2, tmp_path, args, 4, train_dataset=Stream()), expected)

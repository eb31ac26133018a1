"""TRL's trainers on ranks: losses, log-probabilities, metrics and weights of TRL on one process."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState

from tests.integrations import transformers_models as models
from tests.multiprocess import ranks

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("cpu_engine")]
STEPS, PROMPTS, GENERATIONS = 3, 8, 4
FIXED: dict[str, Any] = {
    "max_steps": STEPS, "learning_rate": 1e-1, "optim": "sgd", "lr_scheduler_type": "constant",
    "bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
    "gradient_checkpointing": False, "logging_steps": 1, "shuffle_dataset": False,
}  # fmt: skip
SHARDING = {"BLOCK_SIZE": 16}
WORDS = 50


def tokenizer() -> Any:
    """Return a tokenizer of words w0, w1, ..."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as tokenizer_models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": 3 + i for i in range(WORDS)}
    inner = Tokenizer(tokenizer_models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def text(seed: int, length: int) -> str:
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(WORDS)}" for _ in range(length))


def prompts() -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"prompt": text(i, 20 + 3 * i)} for i in range(PROMPTS)])


def reward(completions: list[str], **rest: Any) -> list[float]:
    return [float(sum(map(ord, one)) % 17) for one in completions]


def with_drawn_completions(cls: type) -> Any:
    """Return a trainer whose completions are drawn by a seed, alike on one process and on ranks, some with a
    common beginning; log-probabilities of completions are kept in ``seen``."""

    class Drawn(cls):  # type: ignore[misc,valid-type]
        def _generate(self, texts: list[str]) -> Any:
            self.row = 0
            return super()._generate(texts)

        def _generate_single_turn(self, prompt_ids: list[list[int]], *rest: Any, **options: Any) -> Any:
            made = []
            for row, ids in enumerate(prompt_ids):
                draw = random.Random(f"{ids} {row % GENERATIONS} {self.state.global_step}")
                common = [3 + ids[-1] % WORDS] * (row % 2 * 3)
                made.append(common + [draw.randrange(3, 3 + WORDS) for _ in range(draw.randrange(1, 30))])
            return made if "RLOO" in cls.__name__ or "Distillation" in cls.__name__ else (made, None)

        def _get_per_token_logps_and_entropies(self, *args: Any, **options: Any) -> Any:
            result = super()._get_per_token_logps_and_entropies(*args, **options)
            self.__dict__.setdefault("seen", []).append(result[0].detach())
            return result

    return Drawn


def run(world_size: int, cp: int, make: Any) -> Any:
    """Run ``make(mesh)`` on ranks, ``cp`` of which share documents; return the results of all."""

    def work(group: Any) -> Any:
        environment = {"RANK": group.rank(), "LOCAL_RANK": group.rank(), "WORLD_SIZE": world_size}
        environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 0, "LOCAL_WORLD_SIZE": world_size}
        os.environ |= {name: str(value) for name, value in environment.items()}
        for state in (PartialState, AcceleratorState, GradientState):
            state._reset_state()
        mesh = dist.init_device_mesh("cpu", (world_size // cp, cp), mesh_dim_names=("dp", "cp"))["cp"]
        return make({"mesh": mesh if cp < world_size else None, "sharding": SHARDING})

    return ranks.run(world_size, work, timeout=200)


def results_of(trainer: Any, names: tuple[str, ...]) -> Any:
    """Train; return the logged values of the steps, and the weights."""
    trainer.train()
    logs = [
        {name: line[name] for name in names if name in line} for line in trainer.state.log_history[:STEPS]
    ]
    assert all(len(line) == len(names) for line in logs), (names, trainer.state.log_history[0].keys())
    seen = [x.clone() for x in vars(trainer).get("seen", ())]
    return logs, {name: weight.detach() for name, weight in trainer.model.named_parameters()}, seen


def assert_equal(result: Any, expected: Any, same_rows: bool) -> None:
    """Compare two runs. same_rows: whether the log-probabilities are of the same rows, in any order"""
    torch.testing.assert_close(result[0], expected[0], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(result[1], expected[1], rtol=0, atol=1e-5)
    assert len(result[2]) == len(expected[2])
    for one, other in zip(result[2], expected[2], strict=True):
        if same_rows:
            torch.testing.assert_close(one.flatten().msort(), other.flatten().msort(), rtol=0, atol=2e-5)


def make_trainer(kind: str, cls: Any, attention: str, size: int, folder: Path, **options: Any) -> Any:
    """Return a trainer on drawn completions of the small model in ``folder``."""
    import trl

    fixed = {**FIXED, "max_completion_length": 32, "temperature": 0.7, "per_device_train_batch_size": size}
    fixed |= {"model_init_kwargs": {"attn_implementation": attention, "dtype": "float32"}}
    fixed |= ARGUMENTS[kind]
    if kind == "Distillation":
        init = fixed["model_init_kwargs"]
        fixed["teacher_model_init_kwargs"] = init
        options |= {"teacher_model": str(folder / "teacher")}
    else:
        options |= {"reward_funcs": reward}
    args = getattr(trl, f"{kind}Config")(str(folder), **fixed | options.pop("args"))
    return with_drawn_completions(cls)(
        str(folder / "model"), args=args,
        train_dataset=prompts(), processing_class=tokenizer(), **options,
    )  # fmt: skip


ARGUMENTS: dict[str, dict[str, Any]] = {
    "GRPO": {"num_generations": GENERATIONS, "beta": 0.1},
    "RLOO": {"num_generations": GENERATIONS, "beta": 0.1},
    "Distillation": {},
}
METRICS = {
    "GRPO": ("loss", "grad_norm", "entropy", "kl", "num_tokens", "reward_std", "frac_reward_zero_std"),
    "RLOO": ("loss", "grad_norm", "entropy", "kl", "num_tokens", "reward_std", "frac_reward_zero_std"),
    "Distillation": ("loss", "grad_norm", "entropy", "num_tokens"),
}


def compare_with_one_process(
    kind: str, name: str, folder: Path, world_size: int = 2, cp: int = 2, args: Any = None, **options: Any
) -> list[Any]:
    """Train on one process by TRL, and on ranks; return the logs of the ranks."""
    import trl

    from tritoncp.integrations import trl as ours

    models.build_model(name).save_pretrained(folder / "model")
    models.build_model(name, num_hidden_layers=1).save_pretrained(folder / "teacher")
    args, replicas, names = args or {}, world_size // cp, METRICS[kind]
    stock = make_trainer(kind, getattr(trl, f"{kind}Trainer"), "eager", 8, folder, args=args)
    expected = results_of(stock, names)
    cls = getattr(ours, f"ContextParallel{kind}Trainer")

    def train(mesh: dict[str, Any]) -> Any:
        trainer = make_trainer(kind, cls, "tritoncp", 8 // replicas, folder, args=args, **mesh, **options)
        return (*results_of(trainer, names), trainer.state.log_history)

    results = run(world_size, cp, train)
    for result in results:
        assert_equal(result, expected, same_rows=replicas == 1)
    return [result[3] for result in results]


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
@pytest.mark.parametrize(("name", "tree"), [("Llama", None), ("Mistral", None), ("Llama", False)])
def test_grpo_on_two_ranks_equals_grpo_on_one_process(
    name: str, tree: bool | None, loss_type: str, tmp_path: Path
) -> None:
    for log in compare_with_one_process("GRPO", name, tmp_path, args={"loss_type": loss_type}, tree=tree):
        parts = [line["tree/tokens_computed"] for line in log[:STEPS] if "tree/tokens_computed" in line]
        assert len(parts) == (0 if tree is False else STEPS)
        assert all(
            part < 0.7 for part in parts
        )  # prompts of 20 tokens and more, four completions of up to 30


def test_grpo_on_layers_that_see_no_tree_equals_grpo_on_one_process(tmp_path: Path) -> None:
    compare_with_one_process("GRPO", "Qwen3Next", tmp_path, args={"router_aux_loss_coef": 0.0})


def test_replicas_of_two_ranks_train_like_processes(tmp_path: Path) -> None:
    """They also share statistics that TRL computes over all completions: a quantile of entropies, and a
    deviation of rewards."""
    args = {"scale_rewards": "batch", "top_entropy_quantile": 0.5}
    compare_with_one_process("GRPO", "Llama", tmp_path, 4, 2, args=args)


@pytest.mark.parametrize("kind", ["RLOO", "Distillation"])
def test_other_trainers_on_completions_equal_one_process(kind: str, tmp_path: Path) -> None:
    compare_with_one_process(kind, "Llama", tmp_path)


def sft(cls: Any, attention: str, size: int, folder: Path, packing: bool, **options: Any) -> Any:
    """Return an SFTTrainer on texts of several lengths."""
    from datasets import Dataset
    from trl import SFTConfig

    fixed = {name: x for name, x in FIXED.items() if name != "shuffle_dataset"}
    args = SFTConfig(
        str(folder), **fixed, per_device_train_batch_size=size, packing=packing, max_length=128,
        gradient_accumulation_steps=2, per_device_eval_batch_size=size,
    )  # fmt: skip
    texts = Dataset.from_list([{"text": text(i, 10 + 7 * i % 60)} for i in range(60)])
    return cls(
        models.build_model("Mistral", attention), args=args, train_dataset=texts, eval_dataset=texts.take(4),
        processing_class=tokenizer(), **options,
    )  # fmt: skip


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(("world_size", "cp"), [(2, 2), (4, 2)])
def test_sft_on_ranks_equals_sft_on_one_process(
    world_size: int, cp: int, packing: bool, tmp_path: Path
) -> None:
    """Its metrics are equal too: each token is counted once, and padding is not."""
    from trl import SFTTrainer

    from tritoncp.integrations.trl import ContextParallelSFTTrainer

    names = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")
    replicas = world_size // cp
    size = 1 if packing else 2  # packed: a batch is one row of up to `size` times the length
    one = sft(SFTTrainer, "eager", size * replicas, tmp_path, packing)
    expected, loss = results_of(one, names), one.evaluate()["eval_loss"]

    def train(options: dict[str, Any]) -> Any:
        trainer = sft(ContextParallelSFTTrainer, "tritoncp", size, tmp_path, packing, **options)
        return (*results_of(trainer, names), trainer.evaluate()["eval_loss"])

    for result in run(world_size, cp, train):
        assert_equal(result[:3], expected, same_rows=False)
        assert result[3] == pytest.approx(loss, rel=1e-5)


def test_ranks_of_a_mesh_train_on_completions_that_they_generated_in_parts(tmp_path: Path) -> None:
    """One generation has two micro-batches, which TRL shuffles."""
    from trl import GRPOConfig

    from tritoncp.integrations.trl import ContextParallelGRPOTrainer

    models.build_model("Llama").save_pretrained(tmp_path / "model")

    texts: list[list[str]] = []

    def note(completions: list[str], **rest: Any) -> list[float]:
        texts.append(completions)
        return reward(completions)

    def train(options: dict[str, Any]) -> Any:
        init = {"attn_implementation": "tritoncp", "dtype": "float32"}
        args = GRPOConfig(
            str(tmp_path), **FIXED, num_generations=GENERATIONS, max_completion_length=8,
            model_init_kwargs=init, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            log_completions=True,
        )  # fmt: skip
        trainer = ContextParallelGRPOTrainer(
            str(tmp_path / "model"), reward_funcs=note, args=args, train_dataset=prompts(),
            processing_class=tokenizer(), **options,
        )  # fmt: skip
        return (*results_of(trainer, ("loss", "grad_norm")), texts)

    first, second = run(2, 2, train)
    assert first[3] == second[3] and len(first[3]) == STEPS
    assert all(len(set(texts)) == len(texts) == 8 for texts in first[3])
    assert first[0] == second[0]
    torch.testing.assert_close(first[1], second[1], rtol=0, atol=0)


def test_batches_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    from tritoncp.integrations.trl import ContextParallelGRPOTrainer

    models.build_model("Llama").save_pretrained(tmp_path / "model")
    models.build_model("Qwen3Next").save_pretrained(tmp_path / "recurrent" / "model")

    def trainer(size: int = 8, folder: Path = tmp_path, **options: Any) -> Any:
        return make_trainer("GRPO", ContextParallelGRPOTrainer, "tritoncp", size, folder, args={}, **options)

    def work(options: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="makes batches of 2 generations on meshes of 2 ranks"):
            trainer(2, **options)
        with pytest.raises(ValueError, match="auxiliary loss of the experts"):
            trainer(folder=tmp_path / "recurrent", **options).train()
        ids, mask = torch.ones(2, 9, dtype=torch.long), torch.ones(2, 9)
        one = trainer(**options)
        with pytest.raises(ValueError, match="the sequences have pixel_values"):
            one._get_per_token_logps_and_entropies(one.model, ids, mask, 4, pixel_values=ids)
        one = trainer(folder=tmp_path / "recurrent", tree=True, **options)
        with pytest.raises(ValueError, match="tree=True: models of Qwen3NextConfig have layers that read"):
            one._get_per_token_logps_and_entropies(one.model, ids, mask, 4)

    run(2, 2, work)

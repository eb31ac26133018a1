"""Tests of the programs in examples/, on forked ranks with gloo."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch._dynamo  # AdamW imports it: once here, not in each forked rank
from einops import rearrange

from tests.multiprocess import ranks
from tritoncp.core.process_environment import use_loopback_interface

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture(autouse=True)
def cpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the programs, which are processes of their own, on the CPU engine."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")


def load(name: str) -> ModuleType:
    """Import a program of examples/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_training_resumes_on_more_ranks_with_the_losses_of_one_run(tmp_path: Path) -> None:
    train = load("resume_on_more_ranks").train
    load("padded_batches").train_step()  # imports what the forked ranks would import each
    (through, *rest) = ranks.run(4, train, tmp_path / "through.pt", 4)
    assert all(losses == through for losses in rest)
    before = ranks.run(4, train, tmp_path / "resumed.pt", 2)[0]
    saved = torch.load(tmp_path / "resumed.pt", weights_only=True)
    assert saved.keys() == {"model", "optimizer", "step"}
    after = ranks.run(8, train, tmp_path / "resumed.pt", 2)[7]
    torch.testing.assert_close(before + after, through, rtol=1e-5, atol=1e-5)
    assert len(set(through)) == 4


def test_a_padded_batch_has_the_loss_and_gradients_of_its_texts() -> None:
    example = load("padded_batches")
    loss, grads = example.train_step()  # one process
    for rank_loss, rank_grads in ranks.run(3, example.train_step):
        assert rank_loss == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(rank_grads, grads, rtol=1e-4, atol=1e-5)

    torch.manual_seed(0)  # the weights of train_step; every text alone, without padding or a mask
    embed = torch.nn.Embedding(example.VOCABULARY, example.HEADS * example.DIM)
    head = torch.nn.Linear(example.HEADS * example.DIM, example.VOCABULARY)
    tokens, _ = example.padded_batch(example.LENGTHS)
    total, count = torch.zeros(()), 0
    for row, length in zip(tokens, example.LENGTHS):
        x = rearrange(embed(row[None, :length]), "b s (h d) -> b h s d", h=example.HEADS)
        out = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        scores = head(rearrange(out, "b h s d -> b s (h d)"))[0, :-1]
        total = total + torch.nn.functional.cross_entropy(scores, row[1:length], reduction="sum")
        count += length - 1
    assert loss == pytest.approx(float(total.detach() / count), rel=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_as_its_docstring_says(example: Path, tmp_path: Path) -> None:
    use_loopback_interface()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(example),
    ]
    command = [*launch, str(tmp_path / "checkpoint.pt")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("rank ")]
    assert sorted(line.split()[1].rstrip(":") for line in lines) == ["0", "1"], done.stdout


def test_examples_are_short() -> None:
    assert EXAMPLES and all(len(example.read_text().splitlines()) < 80 for example in EXAMPLES)

"""Tests of the demo: its text, model and processes, and its verdict on wrong results."""

import itertools
import multiprocessing
import os
import signal
from dataclasses import replace
from functools import partial

import pytest
import torch
from PIL import Image

from tests.command_process import invoke, tritoncp
from tritoncp.demo import run as demo_run
from tritoncp.demo.corpus import IGNORE, documents, windows
from tritoncp.demo.model import ModelShape
from tritoncp.demo.train import RankFailed, TrainingConfig, TrainingStep, train, train_on_ranks
from tritoncp.report.text import NEARLY_EVEN

SMALL = TrainingConfig(seq_len=256, steps=2, shape=ModelShape(layers=1))


# text


def test_windows_hold_the_documents_in_order():
    texts, pieces = windows(512, 4), documents(256)
    for text in texts:
        whole = b"".join(itertools.islice(pieces, len(text.lengths)))
        assert whole.startswith(bytes(text.tokens[0].tolist())), "the last document is cut off"


def test_a_label_is_the_next_byte_of_the_same_document():
    for tokens, labels, lengths in windows(300, 5):
        assert sum(lengths) == 300
        assert int((labels == IGNORE).sum()) == len(lengths)
        for piece, target in zip(tokens[0].split(lengths), labels[0].split(lengths)):
            assert torch.equal(piece[1:], target[:-1])
            assert target[-1] == IGNORE


def test_the_cpu_engine_trains_if_requested(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    engines = []

    def run(*arguments):
        engines.append(os.environ["TRITON_INTERPRET"])
        raise SystemExit(0)

    monkeypatch.setattr(demo_run, "run", run)
    for words in (["--engine=kernels"], ["--engine=cpu"], []):
        assert invoke("demo", *words).exit_code == 0
    assert engines == ["1", "0", "0"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_the_work_of_the_ranks_is_even(world_size):
    first, *plans = demo_run.make_plans(TrainingConfig(), world_size)
    assert "Is it even: yes" in str(first), "the first thing that a user sees"
    assert all(plan.imbalance <= NEARLY_EVEN for plan in plans)


# training, on one rank and on several


def test_the_loss_falls(cpu_engine):
    losses = [
        step.loss
        for step in train(TrainingConfig(seq_len=128, steps=12, shape=ModelShape(layers=1)), None, CPU)
    ]
    assert min(losses[-3:]) < losses[0] - 1


CPU = torch.device("cpu")


@pytest.mark.long
def test_ranks_and_one_rank_agree(tmp_path):
    done = tritoncp("demo", "--steps=2", "--seq-len=320", "--world-size=2", f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert Image.open(tmp_path / "plan.png").size[0] > 600
    lines = done.stdout.splitlines()
    for name in ("2 ranks", "1 rank"):
        assert any(line.startswith(f"{name}: step 2/2 loss") for line in lines)
    summary = {line.split()[0]: line for line in lines[-5:]}
    assert [*summary] == ["ran", "losses", "sent", "picture", "next"]
    assert summary["losses"].split()[1] == "agree:"
    if " on cpu by " in summary["ran"]:
        assert "the CPU engine" in summary["ran"]
    assert summary["next"].endswith("tritoncp check")


def test_torchrun_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = invoke("demo", f"--out={tmp_path}")
    assert done.exit_code == 2 and "without torchrun" in done.output


def test_an_error_of_a_rank_is_reported_once_with_its_number(monkeypatch):
    if not torch.cuda.is_available():  # forked ranks need not import torch; the demo above spawns its own
        fork = partial(torch.multiprocessing.start_processes, start_method="fork")
        monkeypatch.setattr(torch.multiprocessing, "start_processes", fork)
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # ranks read it, as the command sets it
    impossible = TrainingConfig(seq_len=256, steps=1, shape=ModelShape(heads=3, kv_heads=2, layers=1))
    with pytest.raises(RankFailed) as failed:
        list(train_on_ranks(impossible, 2))
    said = str(failed.value)
    assert said.startswith(("rank 0 of 2 failed:", "rank 1 of 2 failed:"))
    assert said.count("Traceback (most recent call last)") == 1
    assert not multiprocessing.active_children()


@pytest.mark.long
def test_a_rank_that_is_killed_is_noticed(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    steps = train_on_ranks(replace(SMALL, steps=1000), 2)
    next(steps)
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    with pytest.raises(RankFailed, match=r"rank [01] of 2 failed: .*SIGKILL"):
        list(steps)


# verdict and display


@pytest.mark.long
@pytest.mark.parametrize("second", [[2.0, 1.5], [2.0, float("nan")]])
def test_a_disagreement_is_shown_and_fails(second, monkeypatch, tmp_path):
    def steps(losses):
        return lambda *arguments: [TrainingStep(i, x, 0.1) for i, x in enumerate(losses, 1)]

    monkeypatch.setenv("TRITON_INTERPRET", "0")  # the command sets it
    monkeypatch.setattr(demo_run.train, "train_on_ranks", steps([2.0, 1.0]))
    monkeypatch.setattr(demo_run.train, "train", steps(second))
    done = invoke("demo", "--steps=2", "--seq-len=256", f"--out={tmp_path}")
    assert done.exit_code == 1
    assert done.output.count("DISAGREE") == 1

"""Tests of the demo: its text, model and processes, and its verdict on wrong results."""

import io
import itertools
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from rich.console import Console

from tritoncp.cli import main
from tritoncp.demo import run as demo_run
from tritoncp.demo.corpus import IGNORE, documents, window, windows
from tritoncp.demo.model import ModelShape
from tritoncp.demo.ranks import RankFailed, train_on_ranks
from tritoncp.demo.report import OUTPUT_TOLERANCE, difference, show_progress
from tritoncp.demo.train import TrainingConfig, TrainingStep, train

ROOT = Path(__file__).parents[1]
SMALL = TrainingConfig(seq_len=256, steps=2, shape=ModelShape(layers=1))


# text


def test_windows_hold_the_documents_in_order():
    token_bytes = b"".join(bytes(text.tolist()) for text, _ in windows(512, 4))
    pieces = list(itertools.islice(documents(256), 200))
    rest = memoryview(token_bytes)
    for number in windows(512, 4)[:, 1].flatten().unique_consecutive().tolist()[:2]:
        assert bytes(rest[: len(pieces[number])]) == pieces[number]
        rest = rest[len(pieces[number]) :]


def test_a_label_is_the_next_byte_of_the_same_document():
    for text in windows(300, 5):
        tokens, labels, lengths = window(text)
        assert sum(lengths) == 300
        assert int((labels == IGNORE).sum()) == len(lengths)
        for piece, target in zip(tokens[0].split(lengths), labels[0].split(lengths)):
            assert torch.equal(piece[1:], target[:-1])
            assert target[-1] == IGNORE


def test_the_cpu_engine_trains_where_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    engines = []

    def run(*arguments):
        engines.append(os.environ["TRITON_INTERPRET"])
        raise SystemExit(0)

    monkeypatch.setattr(demo_run, "run", run)
    for words in (["--engine=kernels"], ["--engine=cpu"], []):
        assert CliRunner().invoke(main, ["demo", *words]).exit_code == 0
    assert engines == ["1", "0", "0"]


# training, on one rank and on several


def test_the_loss_falls():
    losses = [
        step.loss
        for step in train(TrainingConfig(seq_len=128, steps=12, shape=ModelShape(layers=1)), None, CPU)
    ]
    assert min(losses[-3:]) < losses[0] - 1


CPU = torch.device("cpu")


def tritoncp_demo(*words, **environment) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tritoncp.demo", *words]
    env = {**os.environ, **environment}
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False
    )


def test_ranks_and_one_rank_agree(tmp_path):
    words = "--steps=2", "--seq-len=320", "--world-size=2", "--json", f"--out={tmp_path}"
    done = tritoncp_demo(*words)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "losses.json").read_text())
    assert report["agree"]
    assert len(report["losses"]) == len(report["losses_on_one_rank"]) == 2
    assert report["largest_difference"] == difference(report["losses"], report["losses_on_one_rank"])
    assert report["largest_difference"] < report["tolerance"]
    if report["device"] == "cpu":
        assert report["engine"] == "cpu"
        assert 0 < report["output_difference"] < OUTPUT_TOLERANCE, "two engines round differently"
    assert Image.open(report["picture"]).size[0] > 600
    lines = done.stderr.splitlines()
    assert any(line.startswith("2 ranks: step 2/2 loss") for line in lines), "no terminal: a line a step"
    summary = ["ran", "losses", "kernels", "sent", "picture", "next"]
    assert [line.split()[0] for line in lines[-6:]] == summary
    assert lines[-1].endswith("tritoncp check")


def test_torchrun_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = CliRunner().invoke(main, ["demo", f"--out={tmp_path}"])
    assert done.exit_code == 2 and "without torchrun" in done.output


def test_an_error_of_a_rank_is_reported_once_with_its_number():
    impossible = TrainingConfig(seq_len=256, steps=1, shape=ModelShape(heads=3, kv_heads=2, layers=1))
    with pytest.raises(RankFailed) as failed:
        list(train_on_ranks(impossible, 2))
    said = str(failed.value)
    assert said.startswith(("rank 0 of 2 failed:", "rank 1 of 2 failed:"))
    assert said.count("Traceback (most recent call last)") == 1
    assert not multiprocessing.active_children()


def test_a_rank_that_is_killed_is_noticed():
    steps = train_on_ranks(replace(SMALL, steps=1000), 2)
    next(steps)
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    with pytest.raises(RankFailed, match=r"rank [01] of 2 failed: .*SIGKILL"):
        list(steps)


# verdict and display


@pytest.mark.parametrize(
    ("second", "gap"),
    [([2.0, 1.5], 0.0), ([2.0, float("nan")], 0.0), ([2.0], 0.0), ([2.0, 1.0], 0.1), ([2.0, 1.0], math.inf)],
)
def test_a_disagreement_is_shown_and_fails(second, gap, monkeypatch, tmp_path):
    def steps(losses):
        return lambda *arguments: [TrainingStep(i, x, 0.1) for i, x in enumerate(losses, 1)]

    monkeypatch.setenv("TRITON_INTERPRET", "0")  # the command sets it
    monkeypatch.setattr(demo_run, "uses_triton", lambda device: False)
    monkeypatch.setattr(demo_run.ranks, "train_on_ranks", steps([2.0, 1.0]))
    monkeypatch.setattr(demo_run, "train", steps(second))
    monkeypatch.setattr(demo_run, "compare_engines", lambda config, world_size: gap)
    done = CliRunner().invoke(main, ["demo", "--steps=2", "--seq-len=256", f"--out={tmp_path}"])
    assert done.exit_code == 1
    assert done.output.count("DISAGREE") == 1


def test_difference_is_infinite_for_incomparable_results():
    assert difference([1.0, 2.0], [1.0, 2.25]) == 0.25
    assert difference([1.0], [1.0, 2.0]) == difference([float("nan")], [1.0]) == float("inf")


def test_a_terminal_gets_bars_and_a_log_gets_lines():
    log, terminal = (Console(file=io.StringIO(), width=100, force_terminal=kind) for kind in (False, True))
    for console in (log, terminal):
        with show_progress(console, 2, ("4 ranks", "1 rank")) as show_step:
            show_step("4 ranks", TrainingStep(1, 5.25, 0.5))
    assert log.file.getvalue() == "4 ranks: step 1/2 loss 5.2500 (0.5 s)\n"
    assert "━" in terminal.file.getvalue()
    assert "1/2" in terminal.file.getvalue()

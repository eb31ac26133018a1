"""The programs of pages in docs/, run as they are printed."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.multiprocess import ranks
from tritoncp.core.process_environment import use_loopback_interface

ROOT = Path(__file__).parents[2]
GENERATES = ("docs/recipes.md", "generate_beside_training.py")
SKIPS = ("docs/recipes.md", "skip_bad_batches.py")
TRAINS = ("docs/own_loop.md", "own_loop.py")
TRAINS_ON_HOSTS = ("docs/several_hosts.md", "train.py")


@pytest.fixture(autouse=True)
def cpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the programs on the CPU engine, as processes of their own would."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")


@pytest.fixture
def program(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The Python block of the page and with the command that the test names, as a file."""
    page, name = request.param
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    (text,) = [block for block in blocks if block.startswith(f"# torchrun --nproc-per-node 2 {name}\n")]
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("program", [GENERATES], indirect=True)
def test_rank_0_generates_beside_training(program: Path) -> None:
    output, silent = ranks.run_program(2, program, lambda variables, output: output)
    assert [line.split()[1] for line in output.splitlines()] == ["0", "1", "2", "3"]
    assert not silent


def training(variables: dict[str, Any], output: str) -> tuple[list[float], list[torch.Tensor], str]:
    """Return the losses, the gradients of the last step, and the output of a program that trains a model."""
    return variables["losses"], [weight.grad for weight in variables["model"].parameters()], output


@pytest.mark.parametrize("program", [TRAINS, TRAINS_ON_HOSTS], indirect=True)
def test_a_program_trains_on_two_ranks_as_on_one(program: Path) -> None:
    ((losses, gradients, _),) = ranks.run_program(1, program, training)
    assert len(set(losses)) == len(losses) > 1
    for rank, (losses_of_rank, gradients_of_rank, output) in enumerate(
        ranks.run_program(2, program, training)
    ):
        torch.testing.assert_close(losses_of_rank, losses, rtol=1e-6, atol=0)
        for actual, expected in zip(gradients_of_rank, gradients, strict=True):
            limit = 3e-6 * expected.abs().max().item()
            torch.testing.assert_close(actual, expected, rtol=0, atol=limit)
        assert len(output.splitlines()) == (len(losses) if rank == 0 else 0)


@pytest.mark.parametrize("program", [SKIPS], indirect=True)
def test_a_batch_that_one_rank_refuses_is_skipped_on_all(program: Path) -> None:
    """The losses are those of one rank that trains without that batch."""
    losses = ranks.run_program(2, program, lambda variables, output: variables["losses"])
    text = program.read_text()
    program.write_text(text.replace("for step in range(5):", "for step in (0, 1, 3, 4):"))
    (alone,) = ranks.run_program(1, program, lambda variables, output: variables["losses"])
    assert len(set(alone)) == 4
    for of_rank in losses:
        torch.testing.assert_close(of_rank, alone, rtol=1e-5, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("program", [TRAINS_ON_HOSTS], indirect=True)
def test_two_agents_of_torchrun_meet_as_on_two_hosts(program: Path) -> None:
    """The last commands of the page, as printed but for the port, which another process may use."""
    commands = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/several_hosts.md").read_text(), re.DOTALL)[-1]
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    use_loopback_interface()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-e", "-c", commands.replace("29500", str(port)) + "wait $!\n"],
        cwd=program.parent, env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("step")]
    assert steps == ["0", "1"], "rank 0 alone prints"

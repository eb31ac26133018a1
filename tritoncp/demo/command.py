"""The command `tritoncp demo`. torch is imported when it runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from tritoncp.command_base import Tokens


@click.command()
@click.option("--steps", type=click.IntRange(1, 1000), default=12, show_default=True, help="Training steps.")
@click.option(
    "--seq-len",
    type=Tokens(16, 16384),
    default=1024,
    show_default=True,
    help="Bytes in a step, as 1024 or 1K.",
)
@click.option(
    "--world-size",
    type=click.IntRange(1, 64),
    help="Local ranks. [default: one for each GPU, 4 for fewer than 2]",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo-out"),
    show_default=True,
    help="Where plan.png goes.",
)
@click.option(
    "--engine",
    type=click.Choice(["cpu", "kernels"]),
    default="cpu",
    show_default=True,
    help="Without a GPU: train by the CPU engine, or by interpreted kernels, which take minutes.",
)
def demo(steps: int, seq_len: int, world_size: int | None, out: Path, engine: str) -> None:
    """Train a small transformer on several ranks and on one, and compare the losses.

    Starts local processes. Without a GPU the CPU engine trains. Exits with 1 if losses differ by more than
    rounding explains, or a rank fails.

    \b
    Examples:
      tritoncp demo
      tritoncp demo --world-size 2 --steps 4 --engine kernels
    """
    # Before Triton is imported, also by the ranks. On a GPU neither engine is interpreted.
    if engine == "cpu":
        os.environ["TRITON_INTERPRET"] = "0"
    from rich.console import Console

    from tritoncp.demo.run import run
    from tritoncp.demo.train import TrainingConfig

    sys.exit(0 if run(TrainingConfig(seq_len, steps), world_size, out, Console()) else 1)

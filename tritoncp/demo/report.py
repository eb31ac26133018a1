"""Output of the demo: progress, the plan as a picture, the tables and the verdict."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tritoncp.demo.corpus import window, windows
from tritoncp.demo.train import TrainingConfig, TrainingStep, plan_documents

# Both runs do the same float32 arithmetic in another order. Losses of 2 to 6 lie on a grid of 2.4e-7 or
# 4.8e-7, and AdamW carries differences in the last bits on: over 20 steps they stayed below 1e-6. The mildest
# bug tried, ALiBi that sees keys in gathered instead of global order, gives 8e-4 at once and 3e-3 by step 3.
TOLERANCE = 1e-4
OUTPUT_TOLERANCE = 1e-5  # of one attention call by two engines in float32; they differ by about 1e-6


@dataclass(frozen=True)
class DemoReport:
    """The results of the demo; `--json` prints them unchanged."""

    world_size: int
    device: str
    engine: str  # of the training: "kernels" or "cpu"
    backend: str
    seq_len: int
    work: list[float]  # of each rank in blocks, all steps
    imbalance: float  # max / mean of work
    bytes_sent: int  # by one rank, all layers, forward and backward, one step
    losses: list[float]
    losses_on_one_rank: list[float]
    largest_difference: float
    tolerance: float
    output_difference: float | None  # of interpreted kernels and the CPU engine; None where kernels trained
    agree: bool
    seconds: float
    picture: str


def plans_of(config: TrainingConfig, world_size: int) -> list[Any]:
    """Every step's plan as rank 0 has it, made without a process group."""
    texts = windows(config.seq_len, config.steps)
    return [plan_documents(window(text).lengths, world_size=world_size, rank=0) for text in texts.unbind()]


def difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest difference; infinite if a loss is missing or not a number.

    >>> difference([2.0, 1.0], [2.0, 1.5]), difference([1.0], []), difference([float("nan")], [1.0])
    (0.5, inf, inf)
    """
    if len(losses) != len(reference):
        return float("inf")
    gaps = [abs(a - b) for a, b in zip(losses, reference)]
    return max((gap if gap == gap else float("inf") for gap in gaps), default=float("inf"))


@contextlib.contextmanager
def show_progress(
    console: Console, steps: int, names: Sequence[str]
) -> Iterator[Callable[[str, TrainingStep], None]]:
    """Show a progress bar for each run on a terminal, a line a step where there is none. Yields a function
    that takes the name of a run and its last step."""
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bars = Progress(
        *columns, TextColumn("{task.fields[loss]}"), console=console, disable=not console.is_terminal
    )
    tasks = {name: bars.add_task(name, total=steps, loss="") for name in names}

    def show_step(name: str, step: TrainingStep) -> None:
        bars.update(tasks[name], completed=step.number, loss=f"loss {step.loss:.4f}")
        if not console.is_terminal:
            line = f"{name}: step {step.number}/{steps} loss {step.loss:.4f} ({step.seconds:.1f} s)"
            console.print(line, highlight=False)

    with bars:
        yield show_step


def show(console: Console, report: DemoReport) -> None:
    table = Table("step", f"{report.world_size} ranks", "1 rank", "difference", title="loss")
    for number, (a, b) in enumerate(zip(report.losses, report.losses_on_one_rank), 1):
        table.add_row(str(number), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}")
    for column in table.columns:
        column.justify = "right"
    console.print(table)
    work = ", ".join(f"{blocks:g}" for blocks in report.work)
    console.print(f"work     {work} blocks per rank over all steps, max/mean {report.imbalance:.3f}\n")
    for line in format_summary(report):
        console.print(line, highlight=False, soft_wrap=True)


def format_summary(report: DemoReport) -> list[str]:
    """Format the last six lines, in rich's markup."""
    kernels = "Triton kernels, interpreted" if report.device == "cpu" else "Triton kernels"
    engine = kernels if report.engine == "kernels" else "the CPU engine (plain torch)"
    if report.output_difference is None:
        compared = "computed all attention of both runs"
    else:
        gap = format_gap(report.output_difference, OUTPUT_TOLERANCE)
        compared = f"{gap}, of one attention call interpreted and by the CPU engine"
    command = shutil.which("tritoncp") or os.path.relpath(Path(sys.executable).with_name("tritoncp"))
    return [
        f"ran      {report.world_size} ranks and one on {report.device} by {engine}, {report.backend}, "
        f"{report.seconds:.0f} s",
        f"losses   {format_gap(report.largest_difference, report.tolerance)}",
        f"kernels  {compared}",
        f"sent     {report.bytes_sent:,} bytes per rank and step (K, V and their gradients, all layers)",
        f"picture  {report.picture}",
        f"next     {command} check",
    ]


def format_gap(gap: float, tolerance: float) -> str:
    verdict = "[green]agree[/green]" if gap <= tolerance else "[red]DISAGREE[/red]"
    return f"{verdict}: largest difference {gap:.1e}, allowed {tolerance:.0e}"

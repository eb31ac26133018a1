"""A run of the demo: the plan as a picture, training on several ranks and on one, tables and the verdict."""

import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tritoncp.call.engine_factory import uses_triton
from tritoncp.command_base import make_output_folder
from tritoncp.core.processes import interpret_without_gpu, torchrun_world_size
from tritoncp.demo import train
from tritoncp.demo.corpus import windows
from tritoncp.demo.train import TrainingConfig, plan_documents
from tritoncp.report.drawing import require_matplotlib

# Both runs do the same float32 arithmetic in another order. Losses of 2 to 6 lie on a grid of 2.4e-7 or
# 4.8e-7, and AdamW accumulates differences in the last bits: over 20 steps they stayed below 1e-6. The bug
# with the min effect that was tried, ALiBi with keys in gathered instead of global order, gives 8e-4 at once
# and 3e-3 by step 3.
TOLERANCE = 1e-4


def run(config: TrainingConfig, world_size: int | None, out: Path, console: Console) -> bool:
    """Train on many ranks and on one, show both, and return whether their losses agree.

    Raises train.RankFailed with a rank's error, and ValueError under torchrun.
    """
    interpret_without_gpu()
    torch.set_num_threads(1)
    began = time.perf_counter()
    if torchrun_world_size():
        raise ValueError("the demo starts its ranks itself: run it without torchrun")
    require_matplotlib()
    make_output_folder(out)
    world_size = world_size or default_world_size()
    plans = make_plans(config, world_size)
    introduce(config, plans[0], out, console)
    runs = {
        f"{world_size} ranks": train.train_on_ranks(config, world_size),
        "1 rank": train.train(config, None, train.device_of(0)),
    }
    losses: dict[str, list[float]] = {name: [] for name in runs}
    for name, steps in runs.items():
        for step in steps:
            losses[name].append(step.loss)
            line = f"{name}: step {step.number}/{config.steps} loss {step.loss:.4f} ({step.seconds:.1f} s)"
            console.print(line, highlight=False)
    losses_gap = difference(*losses.values())
    show_losses(losses, console)
    show_work(plans, console)
    for line in format_summary(config, plans[0], losses_gap, time.perf_counter() - began, out):
        console.print(line, highlight=False, soft_wrap=True)
    return losses_gap <= TOLERANCE


def make_plans(config: TrainingConfig, world_size: int) -> list[Any]:
    """Return rank 0's plan of every step, made without a process group."""
    texts = windows(config.seq_len, config.steps)
    return [plan_documents(text.lengths, world_size=world_size, rank=0) for text in texts]


def default_world_size() -> int:
    """Return the number of GPUs; with fewer than two, 4 ranks that share the device."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return gpus if gpus > 1 else 4


def difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the max difference of losses; NaN if a loss is NaN.

    >>> difference([2.0, 1.0], [2.0, 1.5]), difference([float("nan")], [1.0])
    (0.5, nan)
    """
    return float((torch.tensor(losses) - torch.tensor(reference)).abs().max())


def introduce(config: TrainingConfig, plan: Any, out: Path, console: Console) -> None:
    """Print the plan of the first step, and draw it to plan.png."""
    console.print(f"step 1 of {config.steps}; every step has other documents", highlight=False)
    console.print(str(plan), highlight=False, markup=False, soft_wrap=True)
    console.print()
    shape = config.shape
    layer = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    plan.plot(out / "plan.png", **layer, v_head_dim=shape.head_dim, itemsize=4)


def show_losses(losses: dict[str, list[float]], console: Console) -> None:
    """Print the losses of both runs, step by step."""
    table = Table("step", *losses, "difference", title="loss")
    for number, (a, b) in enumerate(zip(*losses.values()), 1):
        table.add_row(str(number), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}")
    for column in table.columns:
        column.justify = "right"
    console.print(table)


def show_work(plans: Sequence[Any], console: Console) -> None:
    """Print the blocks of each rank over all steps."""
    work = [sum(blocks) for blocks in zip(*(plan.work for plan in plans))]
    imbalance = max(work) * len(work) / sum(work)
    blocks = ", ".join(f"{count:g}" for count in work)
    console.print(f"work     {blocks} blocks per rank over all steps, max/mean {imbalance:.3f}\n")


def format_summary(
    config: TrainingConfig, plan: Any, losses_gap: float, seconds: float, out: Path
) -> list[str]:
    """Format the five lines of the verdict, in rich's markup. plan: of the first step"""
    device, shape = train.device_of(0), config.shape
    kernels = "Triton kernels, interpreted" if device.type == "cpu" else "Triton kernels"
    engine = kernels if uses_triton(device) else "the CPU engine (plain torch)"
    verdict = "[green]agree[/green]" if losses_gap <= TOLERANCE else "[red]DISAGREE[/red]"
    sent = plan.bytes_sent(batch=1, kv_heads=shape.kv_heads, head_dim=shape.head_dim, itemsize=4)
    command = shutil.which("tritoncp") or os.path.relpath(Path(sys.executable).with_name("tritoncp"))
    return [
        f"ran      {plan.world_size} ranks and one on {device.type} by {engine}, "
        f"{train.backend(plan.world_size)}, {seconds:.0f} s",
        f"losses   {verdict}: largest difference {losses_gap:.1e}, allowed {TOLERANCE:.0e}",
        f"sent     {sent * shape.layers:,} bytes per rank and step (K, V and their gradients, all layers)",
        f"picture  {out / 'plan.png'}",
        f"next     {command} check",
    ]

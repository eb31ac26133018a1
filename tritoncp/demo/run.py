"""The demo from its options to its report."""

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from tritoncp.api.shards import shard
from tritoncp.api.simulate import simulate
from tritoncp.command_base import make_output_folder
from tritoncp.core.process_environment import interpret_without_gpu, torchrun_world_size
from tritoncp.demo import ranks
from tritoncp.demo.corpus import window, windows
from tritoncp.demo.report import (
    OUTPUT_TOLERANCE,
    TOLERANCE,
    DemoReport,
    difference,
    plans_of,
    show,
    show_progress,
)
from tritoncp.demo.train import TrainingConfig, bias_of, plan_documents, train
from tritoncp.ops.engine_factory import uses_triton
from tritoncp.planning.report.drawing import require_matplotlib

MAX_RANKS = 64  # local processes
MAX_BYTES = 1 << 24  # of text, in all steps together
INTERPRETED_TOKENS = 1024  # at most, of the attention call by interpreted kernels: a second or two


def run(config: TrainingConfig, world_size: int | None, out: Path, console: Console) -> DemoReport:
    """Train on many ranks and on one, show both, and compare.

    Raises ranks.RankFailed with a rank's error, and ValueError under torchrun, or for more ranks or text than
    the demo supports.
    """
    if config.seq_len * config.steps > MAX_BYTES:
        raise ValueError(
            f"--seq-len {config.seq_len} and --steps {config.steps}: the demo trains on {MAX_BYTES} bytes "
            "of text at most, in all steps together"
        )
    interpret_without_gpu()
    torch.set_num_threads(1)
    began = time.perf_counter()
    if torchrun_world_size():
        raise ValueError("the demo starts its ranks itself: run it without torchrun")
    if (world_size or 0) > MAX_RANKS:
        raise ValueError(f"--world-size {world_size}: the demo starts {MAX_RANKS} local ranks at most")
    require_matplotlib()
    make_output_folder(out)
    world_size = world_size or default_world_size()
    introduce(config, world_size, out, console)
    runs = {
        f"{world_size} ranks": ranks.train_on_ranks(config, world_size),
        "1 rank": train(config, None, ranks.device_of(0)),
    }
    losses: list[list[float]] = []
    with show_progress(console, config.steps, [*runs]) as show_step:
        for name, steps in runs.items():
            losses.append([])
            for step in steps:
                show_step(name, step)
                losses[-1].append(step.loss)
    gap = None if uses_triton(ranks.device_of(0)) else compare_engines(config, world_size)
    report = summary(config, world_size, out, losses, gap, time.perf_counter() - began)
    show(console, report)
    return report


def default_world_size() -> int:
    """A rank for each GPU; with fewer than two, four ranks that share the device."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return gpus if gpus > 1 else 4


def compare_engines(config: TrainingConfig, world_size: int) -> float:
    """Run one attention call by the CPU engine, and by interpreted kernels in another process, since Triton
    reads once whether it interprets. Returns the largest difference of their outputs."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        os.environ["TRITON_INTERPRET"] = "1"  # inherited by the process
        try:
            outputs = pool.submit(attend_once, config, world_size)
        finally:
            os.environ["TRITON_INTERPRET"] = "0"
        return difference(outputs.result(), attend_once(config, world_size))


def attend_once(config: TrainingConfig, world_size: int) -> list[float]:
    """Attend on simulated ranks, with a plan of the demo and unit-normal inputs in float32. Returns the
    elements of all outputs."""
    shape, size = config.shape, min(config.seq_len, INTERPRETED_TOKENS)
    plan = plan_documents(window(windows(size, 1)[0]).lengths, world_size=world_size, rank=0)
    generator = torch.Generator().manual_seed(0)

    def parts(heads: int, side: Literal["q", "kv"]) -> list[torch.Tensor]:
        x = torch.randn(1, heads, size, shape.head_dim, generator=generator)
        return [shard(x, plan.for_rank(rank), dim=2, side=side) for rank in range(world_size)]

    q, k, v = parts(shape.heads, "q"), parts(shape.kv_heads, "kv"), parts(shape.kv_heads, "kv")
    outputs = simulate(world_size).flex_attention(q, k, v, bias_of(shape.heads), plan, enable_gqa=True)
    return torch.cat(outputs, 2).flatten().tolist()


def introduce(config: TrainingConfig, world_size: int, out: Path, console: Console) -> None:
    """Print the plan of the first step, and draw it to plan.png."""
    plan = plans_of(config, world_size)[0]
    console.print(f"step 1 of {config.steps}; every step has other documents", highlight=False)
    console.print(str(plan), highlight=False, markup=False, soft_wrap=True)
    console.print()
    shape = config.shape
    layer = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    plan.plot(out / "plan.png", **layer, v_head_dim=shape.head_dim, itemsize=4)


def summary(
    config: TrainingConfig,
    world_size: int,
    out: Path,
    losses: list[list[float]],
    output_gap: float | None,
    seconds: float,
) -> DemoReport:
    plans, shape = plans_of(config, world_size), config.shape
    sent = plans[0].bytes_sent(batch=1, kv_heads=shape.kv_heads, head_dim=shape.head_dim, itemsize=4)
    work = [sum(blocks) for blocks in zip(*(plan.work for plan in plans))]
    together, alone = losses
    gap = difference(together, alone)
    device = ranks.device_of(0)
    return DemoReport(
        world_size=world_size,
        device=device.type,
        engine="kernels" if uses_triton(device) else "cpu",
        backend=ranks.backend(world_size),
        seq_len=config.seq_len,
        work=work,
        imbalance=max(work) * len(work) / sum(work),
        bytes_sent=sent * shape.layers,
        losses=together,
        losses_on_one_rank=alone,
        largest_difference=gap,
        tolerance=TOLERANCE,
        output_difference=output_gap,
        agree=gap <= TOLERANCE and (output_gap is None or output_gap <= OUTPUT_TOLERANCE),
        seconds=seconds,
        picture=str(out / "plan.png"),
    )

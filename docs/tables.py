"""`python docs/tables.py`: the tables of docs/schedules.md.

Evenness, traffic, planning time and memory of every balancer. No attention runs: work and traffic are read
from the plan, counted in blocks and rows.
"""

from __future__ import annotations

import bisect
import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import torch
from torch.nn.attention import flex_attention

from tritoncp.api.plans import make_plan
from tritoncp.masks.mask import Mask, create_block_mask
from tritoncp.perf.suite.everyday_masks import everyday_masks
from tritoncp.planning.balance import balancers
from tritoncp.planning.build import build
from tritoncp.planning.plan import Plan
from tritoncp.planning.problem import Problem
from tritoncp.planning.report.units import format_tokens

ROOT = Path(__file__).resolve().parents[1]
SIZES = (1 << 17, 1 << 20)  # tokens of the tables "balance"
WORLDS = (8, 64)
SCALES = ((1 << 20, 64), (8 << 20, 1024))  # tokens and ranks of the tables "scaling"
SCALED = "causal", "corpus", "window4k", "prefix", "corpus-window4k"
MIB = 1 << 20

# The name of each mask in the page: a key of planning.problem.MASKS, and a note.
STUDIED = {
    "causal": ("causal", "Every block sees all before it: any even placement moves most of the keys."),
    "window 1K": ("window", "Natural order is even already, and sends a window to each neighbour."),
    "window 4K": ("window4k", "In natural order the first rank has less to do: short windows at the start."),
    "documents": ("corpus", "As a corpus packs: many short documents, a few long ones."),
    "long documents": (
        "document",
        "Fifteen documents of fixed shares of the sequence, the longest a quarter of it.",
    ),
    "documents, window 1K": ("corpus-window", "The documents of the corpus, each in a sliding window."),
    "prefix-LM": ("prefix", "Causal, and all see the first quarter."),
    "shared question": (
        "shared-question",
        "A tree: all see the first quarter, and behind it only their own answer; causal.",
    ),
}
EVEN = 1.02
FITTED, FITTED_SCHEDULES = ("causal", "corpus", "window4k"), ("allgather", "ring", "fetch", "ulysses")
LENGTHS = range(1 << 17, 1 << 24, 1 << 17)  # tokens
FREE_BYTES = 80e9 - 16e9 - 10e9  # without the state of 8 billion parameters, MLP and fragmentation


class Quality(NamedTuple):
    """The quality of a placement.

    imbalance: largest work of a rank over the mean
    travels:   rows of keys that all ranks fetch, in per cent of the rows that a full all-gather moves
    seconds:   time of one core to build a rank's plan with the tables of its first step
    mib:       most memory that it held meanwhile, beyond what the process held before, in MiB; None except
               on Linux
    schedule:  that the plan has
    """

    imbalance: float
    travels: float
    seconds: float
    mib: float | None
    schedule: str


def measure_quality(mask: Mask, world_size: int, balancer: str, schedule: str = "fetch") -> Quality:
    """Build a plan, with the tables of the first step unless the schedule is "fetch", and return its
    quality."""
    initial_bytes = _reset_peak_bytes()
    begin = time.process_time()
    plan = build(mask, world_size, world_size // 2, balancer=balancer, schedule=schedule)
    if schedule != "fetch":
        buffers: dict[str, int | str] = {"ring": plan.rank, "fetch": "fetched"}
        plan.tables("cpu", 1, 1, buffers.get(plan.schedule, "gathered"))
    seconds = time.process_time() - begin
    mib = None if initial_bytes is None else max(0, _read_bytes("VmHWM") - initial_bytes) / MIB
    travels = 100 * fetched_rows(plan) / ((world_size - 1) * plan.kv.length)
    return Quality(plan.imbalance, travels, seconds, mib, plan.schedule)


def _reset_peak_bytes() -> int | None:
    """Start to measure the most resident memory of this process, and return its memory now, in bytes; None
    except on Linux.

    Python's tracemalloc does not count allocations of torch; the high-water mark of resident memory counts
    all, once the allocator has returned its free memory.
    """
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        return None
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    reset.write_text("5")  # resets the high-water mark
    return _read_bytes("VmRSS")


def _read_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) * 1024


def fetched_rows(plan: Plan) -> int:
    """Count the rows of keys and values that all ranks together fetch, for one batch row."""
    return int(plan.traffic.clone().fill_diagonal_(0).sum()) // max(plan.mask.B, plan.q.batch)


def format_balance(sizes: Sequence[int], worlds: Sequence[int]) -> str:
    """Measure every balancer over masks, lengths and ranks, and format a table for each mask."""
    parts = []
    for name, (mask_name, note) in STUDIED.items():
        rows = []
        for size in sizes:
            mask = Problem(mask_name, size).block_mask()
            for world_size in worlds:
                cells = [_format_cell(measure_quality(mask, world_size, balancer)) for balancer in balancers]
                rows.append([f"{size >> 10}K", str(world_size), *cells])
                click.echo(f"{name}, {size} tokens, {world_size} ranks", err=True)
        parts += [
            f"#### {name[:1].upper()}{name[1:]}",
            note,
            _format_table(["tokens", "ranks", *balancers], rows),
        ]
    return "\n\n".join(parts)


def format_scale(scales: Sequence[tuple[int, int]]) -> str:
    """Measure whole plans with `schedule="auto"`, and format a table for each length and number of ranks."""
    parts = []
    for tokens, world_size in scales:
        rows = []
        for name in SCALED:
            mask = Problem(name, tokens).block_mask()
            for balancer in balancers:
                result = measure_quality(mask, world_size, balancer, "auto")
                memory = "–" if result.mib is None else f"{result.mib:.0f} MiB"
                figures = [
                    f"{result.imbalance:.3f}",
                    f"{result.travels:.1f} %",
                    f"{result.seconds:.2f} s",
                    memory,
                ]
                rows.append([name, balancer, *figures, result.schedule])
                click.echo(f"{name}, {tokens} tokens, {world_size} ranks, {balancer}", err=True)
        heads = ["mask", "balancer", "max/mean", "keys that travel", "plan", "most memory", "auto"]
        title = f"#### {format_tokens(tokens)} tokens on {world_size} ranks"
        parts += [title, _format_table(heads, rows)]
    return "\n\n".join(parts)


def format_python_masks(tokens: int, torch_tokens: int) -> str:
    """Measure masks of Python functions and their plans, and format a table."""
    ours, torchs = everyday_masks(tokens), everyday_masks(torch_tokens)
    rows = []
    for name, item in ours.items():
        base = _reset_peak_bytes()
        start = time.process_time()
        mask = create_block_mask(item.mod, item.B, item.H, item.length, item.length)
        seconds = [time.process_time() - start]
        for _ in range(2):
            start = time.process_time()
            make_plan(mask, world_size=16, rank=1)
            seconds.append(time.process_time() - start)
        memory = "–" if base is None else f"{(_read_bytes('VmHWM') - base) / MIB:.0f} MiB"
        intervals = mask.row_intervals()
        most = "–" if intervals is None else str(intervals.shape[2] // 2)
        small = torchs[name]
        start = time.process_time()
        flex_attention.create_block_mask(
            small.mod, small.B, small.H, small.length, small.length, device="cpu"
        )
        torch_seconds = time.process_time() - start
        figures = [f"{x:.2f} s" for x in (seconds[0] + seconds[1], seconds[2])]
        rows.append([name, most, *figures, memory, f"{torch_seconds:.2f} s"])
        click.echo(f"{name}, {tokens} tokens", err=True)
    heads = ["mask", "intervals of a row", "mask and plan", "plan again", "most memory"]
    title = f"#### {format_tokens(tokens)} tokens, masks of Python functions"
    return f"{title}\n\n" + _format_table([*heads, f"torch's, {format_tokens(torch_tokens)} tokens"], rows)


def format_fit() -> str:
    """Find the longest sequence that fits on 8 ranks of 80 GB, and format a table of masks and schedules."""
    rows = []
    for name in FITTED:
        cells = []
        for schedule in FITTED_SCHEDULES:
            fits = bisect.bisect(
                LENGTHS, False, key=lambda size: needed_bytes(name, size, schedule) > FREE_BYTES
            )
            cells.append(format_tokens(LENGTHS[fits - 1]) if fits else "–")
            click.echo(f"{name}, {schedule}: {cells[-1]}", err=True)
        rows.append([name, *cells])
    return _format_table(["mask", *FITTED_SCHEDULES], rows)


def needed_bytes(name: str, tokens: int, schedule: str, world_size: int = 8) -> float:
    """Predict the bytes of attention and of the inputs of 32 layers of 4096 channels, on a rank."""
    plan = build(Problem(name, tokens).block_mask(), world_size, 0, balancer="locality", schedule=schedule)
    return plan.metrics()["backward_peak_bytes"] + 32 * tokens // world_size * 4096 * 2


def _format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows))


def _format_cell(result: Quality) -> str:
    """
    >>> _format_cell(Quality(2.5, 0.04, 0.512, None, "fetch"))
    '**2.500** · 0.0 % · 0.51 s'
    """
    uneven = "**" * (result.imbalance > EVEN)
    return f"{uneven}{result.imbalance:.3f}{uneven} · {result.travels:.1f} % · {result.seconds:.2f} s"


TABLES: dict[str, Callable[[], str]] = {
    "balance": lambda: format_balance(SIZES, WORLDS),
    "scaling": lambda: "\n\n".join([format_python_masks(1 << 20, 1 << 13), format_scale(SCALES)]),
    "fit": format_fit,
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name", type=click.Choice([*TABLES]))
@click.option(
    "--write", is_flag=True, help="Write the tables into docs/schedules.md instead of printing them."
)
def main(name: str, write: bool) -> None:
    """Measure balancers and plans on one CPU core, and make tables of docs/schedules.md."""
    torch.set_num_threads(1)
    path: Path = ROOT / "docs/schedules.md"
    tables = TABLES[name]()
    if write:
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        head, _, rest = path.read_text().partition(begin)
        path.write_text(f"{head}{begin}\n\n{tables}\n\n{end}{rest.partition(end)[2]}")
    else:
        click.echo(tables)


if __name__ == "__main__":
    main()

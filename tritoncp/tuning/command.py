"""The command `tritoncp autotune`. torch and Triton are imported when it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tritoncp.command_base import JOBS, Command, Seconds

if TYPE_CHECKING:
    from tritoncp.tuning.search_run import Request, TuningResult
    from tritoncp.tuning.targets import Target


@click.command(cls=Command)
@click.option(
    "--preset", "presets", multiple=True, metavar="NAME", help="llama3-8b, ... [default: llama3-8b]"
)
@click.option(
    "--shapes",
    "shapes",
    multiple=True,
    metavar="HxK,D[xE],S",
    help="32x8,128,16384: heads, dim, length; 128x128,192x128,8192: another dim of values.",
)
@click.option("--mask", "masks", multiple=True, metavar="NAME", help="causal, full, document, window. [all]")
@click.option(
    "--ops",
    default="fwd,bwd",
    show_default=True,
    help="Of fwd, bwd, few (a decoding step), fused (the backward pass in one kernel) and routes (other ways "
    "through the forward pass than fwd, against the best of that).",
)
@click.option(
    "--score-mod", "score", metavar="NAME", default="", help="softcap, softcap(30), alibi, module:function."
)
@click.option(
    "--worst",
    "history",
    type=click.Path(exists=True, path_type=Path),
    help="Instead of all that: the case that the newest run in a history of tritoncp perf run lost most.",
)
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True
)
@click.option("--budget", default="15m", show_default=True, help="Time for all of it: 90s, 15m, 1h.")
@click.option("--resume", is_flag=True, help="Take over what the last run found before it ended.")
@click.option("--dry-run", is_flag=True, help="Say what would be tried, and do nothing.")
@click.option("--target", "arch", metavar="ARCH", help="sm_90, ...: compile and bound only; needs no GPU.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of what is found. [default: $TRITONCP_CONFIG_DIR, else the user's]",
)
@click.option("--jobs", type=JOBS, help="Kernels compiled at a time. [default: one a core]")
@click.option(
    "--timeout", type=Seconds(), default=60.0, show_default=True, help="Seconds to compile one kernel."
)
@click.option("--json", "as_json", is_flag=True, help="A list of rows on stdout, the rest on stderr.")
def autotune(
    presets: tuple[str, ...],
    shapes: tuple[str, ...],
    masks: tuple[str, ...],
    ops: str,
    score: str,
    history: Path | None,
    dtype: str,
    budget: str,
    resume: bool,
    dry_run: bool,
    arch: str | None,
    out: Path | None,
    jobs: int | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Measure tile shapes on this machine's GPU, and write down the shapes that beat the rule by 2 %.

    Candidates are compiled first, and dropped if they spill, do not fit or are bound to be slow; the rest is
    checked against float32 and timed in turn, the better half for longer. Every choice is written at once,
    and used by tritoncp from then on. Ctrl-C keeps the choices so far; --resume goes on from there.

    \b
    Examples:
      tritoncp autotune --budget 15m
      tritoncp autotune --mask causal --target sm_90 --dry-run
    """
    from rich.console import Console

    from tritoncp.ops.tile_lookup import parse_seconds
    from tritoncp.tuning import search_run, targets

    named_shapes = [*shapes, *(shape for name in presets for shape in targets.preset(name))]
    device = search_run.device(arch)
    if history is not None:
        selection = select_worst_case(history, None if arch else device.name)
    else:
        named_shapes = named_shapes or [*targets.preset("llama3-8b")]
        selection = targets.targets(
            named_shapes, masks or tuple(targets.MEASURED_KINDS), ops.split(","), dtype, score
        )
    selection, faults = targets.without_faults(selection, device.arch)
    for line in faults:
        click.echo(line, err=True)
    folder, seconds = out or search_run.output_folder(), parse_seconds(budget)
    request = search_run.Request(
        tuple(selection), device, arch is not None, seconds, resume, folder, jobs, timeout
    )
    if dry_run:
        show_candidates(request, as_json)
    else:
        result = search_run.autotune(request, Console(stderr=True))
        show_result(request, result, as_json)
        sys.exit(130 if result.interrupted else 0 if result.rows else 1)


def select_worst_case(history: Path, device: str | None) -> Sequence[Target]:
    """Select the targets of the case that lost most in the newest run of a history, on a device or any."""
    from tritoncp.perf.records.history import read
    from tritoncp.tuning import targets

    if not (history.is_file() or history.is_dir()):
        raise click.UsageError(f"--worst {history} is neither a file nor a folder of *.jsonl files")
    why, selection = targets.select_worst_case(read(history).points, device)
    click.echo(why, err=True)
    return selection


def show_candidates(request: Request, as_json: bool) -> None:
    """Print the number of candidates of each target, and the paths of the run, for --dry-run."""
    from tritoncp.tuning.targets import candidates

    device = request.device
    rows = [
        {"kernel": target.name, "candidates": len(candidates(target, device.arch))}
        for target in request.targets
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    for row in rows:
        click.echo(f"{row['kernel']}: {row['candidates']} candidates")
    click.echo(f"on {device.name} ({device.arch}), journal {request.journal}")


def show_result(request: Request, result: TuningResult, as_json: bool) -> None:
    """Print the rows of a run, as a table or in JSON."""
    from rich.console import Console

    from tritoncp.tuning import search_run

    if as_json:
        click.echo(json.dumps(result.rows, indent=1))
    else:
        search_run.show(result, request.static, Console())
    if result.interrupted:
        click.echo("interrupted: what is shown is kept; --resume goes on from there", err=True)

"""The command `tritoncp autotune`. torch and Triton are imported when it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tritoncp.command_base import JOBS, Seconds, make_output_folder

if TYPE_CHECKING:
    from tritoncp.measured_tiles.tile_tables import Device
    from tritoncp.tuning.targets import Target


@click.command()
@click.option(
    "--preset",
    "presets",
    multiple=True,
    metavar="NAME",
    help="llama3-8b, llama3-70b, qwen2.5-7b, gpt-oss-20b, gemma2-9b, deepseek-v3. [default: llama3-8b]",
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
    help="Of fwd, bwd, few (a decoding step), fused (the backward pass in one kernel) and routes (other "
    "kernels of the forward pass, compared with the best of fwd).",
)
@click.option(
    "--score-mod", "score", metavar="NAME", default="", help="softcap, softcap(30), alibi, module:function."
)
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True
)
@click.option(
    "--budget", type=Seconds(), default="15m", show_default=True, help="Time for all of it: 90s, 15m, 1h."
)
@click.option("--resume", is_flag=True, help="Continue the last run from its journal.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the choices and the journal; nothing is written elsewhere. [default: "
    "$TRITONCP_CONFIG_DIR, else the user's]",
)
@click.option("--jobs", type=JOBS, help="Kernels compiled at a time. [default: one a core]")
@click.option("--json", "as_json", is_flag=True, help="A list of rows on stdout, the rest on stderr.")
def autotune(
    presets: tuple[str, ...],
    shapes: tuple[str, ...],
    masks: tuple[str, ...],
    ops: str,
    score: str,
    dtype: str,
    budget: float,
    resume: bool,
    out: Path | None,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Measure tile shapes on this machine's GPU, and store those at least 2 % faster than the defaults.

    Candidates are compiled first, and dropped if they spill or do not fit; the rest is
    checked against float32 and timed in turn, the better half for longer. Every choice is written at once,
    and used by tritoncp from then on. Ctrl-C keeps the choices so far; --resume continues the run.

    \b
    Examples:
      tritoncp autotune --budget 15m
      tritoncp autotune --preset llama3-70b --mask causal --ops fwd,bwd,few
    """
    from tritoncp.measured_tiles.tile_tables import output_folder
    from tritoncp.tuning import search, targets

    # Mistakes in the request are reported on machines without a GPU, too.
    named_shapes = [*shapes, *map(targets.preset, presets)] or [targets.preset("llama3-8b")]
    kinds = masks or (*targets.MEASURED_KINDS,)
    selection: Sequence[Target] = targets.targets(named_shapes, kinds, ops.split(","), dtype, score)
    device = find_device()
    selection, fault = targets.without_faults(selection, device.arch)
    if fault:
        click.echo(fault, err=True)
    folder = out or output_folder()
    make_output_folder(folder)
    result = search.autotune(selection, device, budget, resume, folder, jobs)
    search.show_result(result, as_json)
    sys.exit(130 if result.interrupted else 0 if result.rows else 1)


def find_device() -> Device:
    """Return this process's GPU. Raises click.UsageError without one."""
    import torch

    from tritoncp.measured_tiles.tile_tables import device_of

    if not torch.cuda.is_available():
        raise click.UsageError(
            "torch finds no GPU, which is needed to time kernels: run this on a machine with the GPU to tune "
            "for (tritoncp inspect compiles kernels for absent GPUs)"
        )
    return device_of(torch.device("cuda", torch.cuda.current_device()))

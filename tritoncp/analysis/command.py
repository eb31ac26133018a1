"""The command `tritoncp inspect`. torch and Triton are imported when it runs."""

from __future__ import annotations

import sys
from dataclasses import replace

import click

from tritoncp.command_base import JOBS, Seconds


@click.command()
@click.option(
    "--arch", "archs", multiple=True, metavar="NAME", help="sm_90, gfx942, ... [default: all shipped]"
)
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    metavar="NAME",
    help="forward, delta, dq, dkdv, fused, gluon, specialized.",
)  # fmt: skip
@click.option("--head-dim", "dims", multiple=True, type=int, help="64, 96, 128, ...")
@click.option("--dtype", "dtypes", multiple=True, metavar="NAME", help="bfloat16, float16, float32.")
@click.option(
    "--mask",
    "masks",
    multiple=True,
    metavar="NAME",
    help="full, causal, state, ...; --executed also takes expressions.",
)
@click.option("--jobs", type=JOBS, help="Kernels compiled at a time. [default: one a core]")
@click.option("--timeout", type=Seconds(), default=300.0, show_default=True, help="Seconds for one kernel.")
@click.option("--json", "as_json", is_flag=True, help="A list of rows on stdout, nothing else.")
@click.option("--check", is_flag=True, help="Fail where something got worse since the table was written.")
@click.option("--update", is_flag=True, help="Write the rows into that table.")
@click.option(
    "--executed", is_flag=True, help="Run a call's kernels on the CPU, and count what they execute."
)
@click.option(
    "--shape",
    default="4x1,128,512",
    show_default=True,
    metavar="SHAPE",
    help="Of --executed: HEADSxKV_HEADS,HEAD_DIM,LENGTH.",
)
@click.option("--score", default="", metavar="NAME", help="Of --executed: alibi, softcap, module:function.")
@click.option(
    "--selected",
    default="",
    metavar="SELECTION",
    help="Of --executed: keys that each query selects, COUNT[xBLOCK_SIZE][,HEADS].",
)
@click.option("--backward", is_flag=True, help="Of --executed: the backward pass.")
@click.option(
    "--route",
    "routes",
    multiple=True,
    type=click.Choice(("gluon", "specialized")),
    help="Of --executed: a route of the forward pass besides the default.",
)
@click.option(
    "--against",
    type=click.Choice(("torch", "autotuned")),
    help="Of --executed: torch's template at its default tile; at all that autotuning tries.",
)
def inspect(
    archs: tuple[str, ...],
    kernels: tuple[str, ...],
    dims: tuple[int, ...],
    dtypes: tuple[str, ...],
    masks: tuple[str, ...],
    jobs: int | None,
    timeout: float,
    as_json: bool,
    check: bool,
    update: bool,
    executed: bool,
    shape: str,
    score: str,
    selected: str,
    backward: bool,
    routes: tuple[str, ...],
    against: str | None,
) -> None:
    """Compile every shipped kernel for any GPU, present or not, and show the compiler's figures.

    Shows registers, spills, shared memory, matrix unit and TMA, for the default tiles and for the measured
    tiles that are shipped. Options that select kernels may be given several times. Exits with 1 if a kernel
    does not compile, or if --check finds a kernel worse than in the shipped table.

    --executed runs the kernels of a call on the CPU, instruction by instruction, compares the results with
    float64, and counts for each query row and head: instructions of warps, FLOPs of tensor cores, special
    functions, wavefronts of shared memory, sectors of global memory. Counts do not show what the schedule of
    ptxas, latencies and clocks make of them.

    \b
    Examples:
      tritoncp inspect --arch sm_90 --kernel forward --head-dim 128 --dtype bfloat16
      tritoncp inspect --check
      tritoncp inspect --executed --arch sm_80 --mask causal --against torch
      tritoncp inspect --executed --arch sm_90 --shape 8x2,64,512 --score my_package.mods:bias
      tritoncp inspect --executed --arch sm_90 --shape 16x1,64,512 --selected 64 --against torch
    """
    from tritoncp.analysis.jobs import TARGETS, parse_chosen, parse_shape

    for arch in archs:
        if arch not in TARGETS:
            raise ValueError(f"architecture {arch!r} is unknown; pass one of {', '.join(TARGETS)}")
    if executed:
        if kernels or dims or check or update:
            raise click.UsageError(
                "--executed takes --arch, --shape, --mask, --score, --dtype, --against only"
            )
        from tritoncp.analysis.executed import count_calls

        problem = replace(parse_shape(shape), score=score, dtype=dtypes[0] if dtypes else "bfloat16")
        problems = [replace(problem, mask=mask) for mask in masks or ("causal",)]
        which = "backward" if backward else "forward"
        if routes and (backward or selected):
            raise click.UsageError("--route is of the forward pass of a call without --selected")
        chosen = parse_chosen(selected) if selected else None
        count_calls(problems, archs or ("sm_80", "sm_90"), which, against or "", as_json, chosen, routes)
        return
    from tritoncp.analysis.resource_table import ARCHS, measured, pick, run, shipped

    listed = [*shipped(archs or ARCHS), *measured(archs or ARCHS)]
    rows = pick(listed, kernel=kernels, head_dim=dims, dtype=dtypes, variant=masks)
    faults = run(rows, jobs, timeout, as_json=as_json, check=check, update=update)
    for line in faults:
        click.echo(line, err=True)
    sys.exit(1 if faults else 0)

"""The command `tritoncp inspect`. torch and Triton are imported when it runs."""

from __future__ import annotations

import sys

import click

from tritoncp.command_base import JOBS, Command, Seconds


@click.command(cls=Command)
@click.option(
    "--arch", "archs", multiple=True, metavar="NAME", help="sm_90, gfx942, ... [default: all shipped]"
)
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    metavar="NAME",
    help="forward, delta, dq, dkdv, fused, masked, specialised, gluon.",
)
@click.option("--head-dim", "dims", multiple=True, type=int, help="64, 96, 128, ...")
@click.option("--dtype", "dtypes", multiple=True, metavar="NAME", help="bfloat16, float16, float32.")
@click.option("--mask", "masks", multiple=True, metavar="NAME", help="full, causal, state, ...")
@click.option("--jobs", type=JOBS, help="Kernels compiled at a time. [default: one a core]")
@click.option("--timeout", type=Seconds(), default=300.0, show_default=True, help="Seconds for one kernel.")
@click.option("--json", "as_json", is_flag=True, help="A list of rows on stdout, nothing else.")
@click.option("--check", is_flag=True, help="Fail where something got worse since the table was written.")
@click.option("--update", is_flag=True, help="Write stale rows of that table; with --check, all of them.")
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
) -> None:
    """Compile every shipped kernel for GPUs that need not be here, and show the figures of the compiler.

    With the tiles of the rule, and with the shipped tiles, which were measured.
    Registers, spills, shared memory, matrix instructions, the inner loop's instructions, and how busy that
    can keep the tensor cores at most. Each option that picks may be given several times. Exits with 1 if
    a kernel does not compile, or --check finds one worse than the table that is shipped.
    """
    from tritoncp.analysis.cross_compile import check_target
    from tritoncp.analysis.inspect_run import run
    from tritoncp.analysis.resource_table import ARCHS, measured, pick, shipped

    for arch in archs:
        check_target(arch)
    listed = [*shipped(archs or ARCHS), *measured(archs or ARCHS)]
    rows = pick(listed, kernel=kernels, head_dim=dims, dtype=dtypes, variant=masks)
    faults = run(rows, jobs, timeout, as_json=as_json, check=check, update=update)
    for line in faults:
        click.echo(line, err=True)
    sys.exit(1 if faults else 0)

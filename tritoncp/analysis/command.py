"""The command `tritoncp inspect`. torch and Triton are imported when it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

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
    help="forward, delta, dq, dkdv, fused, gluon.",
)
@click.option("--head-dim", "dims", multiple=True, type=int, help="64, 96, 128, ...")
@click.option("--dtype", "dtypes", multiple=True, metavar="NAME", help="bfloat16, float16, float32.")
@click.option("--mask", "masks", multiple=True, metavar="NAME", help="full, causal, state, ...")
@click.option("--jobs", type=JOBS, help="Kernels compiled at a time. [default: one a core]")
@click.option("--timeout", type=Seconds(), default=300.0, show_default=True, help="Seconds for one kernel.")
@click.option("--order", is_flag=True, help="Simulate the start order of programs; compile nothing.")
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
    order: bool,
    as_json: bool,
    check: bool,
    update: bool,
) -> None:
    """Compile every shipped kernel for GPUs that need not be here, and show the figures of the compiler.

    With the tiles of the rule, and with the shipped tiles, which were measured.
    Registers, spills, shared memory, matrix instructions, the inner loop's instructions, and how busy that
    can keep the tensor cores at most. Each option that picks may be given several times. Exits with 1 if
    a kernel does not compile, or --check finds one worse than the table that is shipped.

    --order simulates how long launches take in the order in which their programs start, relative to the best
    order, for every case of the benchmark on one GPU.

    \b
    Examples:
      tritoncp inspect --arch sm_90 --kernel forward --head-dim 128 --dtype bfloat16
      tritoncp inspect --check
      tritoncp inspect --order --arch sm_90
    """
    from tritoncp.analysis.cross_compile import check_target
    from tritoncp.analysis.inspect_run import run
    from tritoncp.analysis.resource_table import ARCHS, measured, pick, shipped

    for arch in archs:
        check_target(arch)
    if order:
        if kernels or dims or dtypes or masks or check or update:
            raise click.UsageError("--order takes --arch and --json only: it compiles nothing")
        return show_orders(archs or ("sm_90",), as_json)
    listed = [*shipped(archs or ARCHS), *measured(archs or ARCHS)]
    rows = pick(listed, kernel=kernels, head_dim=dims, dtype=dtypes, variant=masks)
    faults = run(rows, jobs, timeout, as_json=as_json, check=check, update=update)
    for line in faults:
        click.echo(line, err=True)
    sys.exit(1 if faults else 0)


def show_orders(archs: Sequence[str], as_json: bool) -> None:
    """Print the simulated program orders of architectures. Raises click.UsageError for one whose number of
    multiprocessors is not listed."""
    from rich.console import Console

    from tritoncp.analysis.program_order import MULTIPROCESSORS, estimates, format_table

    if unknown := [arch for arch in archs if arch not in MULTIPROCESSORS]:
        raise click.UsageError(
            f"--order has no multiprocessors of {unknown[0]}; known: {', '.join(MULTIPROCESSORS)}"
        )
    rows = {arch: list(estimates(arch)) for arch in archs}
    if as_json:
        click.echo(
            json.dumps([{"arch": arch, **asdict(row)} for arch in archs for row in rows[arch]], indent=1)
        )
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    for arch in archs:
        console.print(format_table(rows[arch], arch))

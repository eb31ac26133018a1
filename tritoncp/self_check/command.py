"""The command `tritoncp check`. torch is imported only when it runs, so that --help is quick."""

from __future__ import annotations

import math
import sys

import click


@click.command()
@click.option(
    "--only", default="*", metavar="PATTERN", help="Cases by name: 'ring-*', '*-documents-*-backward'."
)
@click.option(
    "--world-size",
    type=click.IntRange(1, 64),
    help="Ranks of a simulated world; under torchrun the number of its ranks.  [default: 4]",
)
@click.option(
    "--jobs", type=click.IntRange(1, 1024), help="Processes that share the device.  [default: one per core]"
)
@click.option(
    "--budget",
    "--seconds",
    type=click.FloatRange(0, 86400, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds for the whole check; a case that does not run in time counts as a failure.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, 3600, min_open=True),
    default=20.0,
    show_default=True,
    help="Seconds to wait for another rank, or for a kernel.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
def check(
    only: str, world_size: int | None, jobs: int | None, budget: float, timeout: float, as_json: bool
) -> None:
    """Compare every schedule, mask, dtype and pass with dense float64 attention, on this machine's devices.

    \b
    Examples:
      tritoncp check                                    # simulated worlds on one device
      tritoncp check --only 'ring-*' --world-size 2     # cases by name
      torchrun --nproc-per-node 8 -m tritoncp check     # real ranks: NCCL, or gloo without GPUs

    The allowed error is twice that of torch's eager attention in the same dtype, plus two units in the last
    place. Exits with 1 if a case is wrong, failed or did not run. Without a GPU the kernels run interpreted,
    on small shapes.
    """
    from tritoncp.core.process_environment import interpret_without_gpu, torchrun_world_size

    started = torchrun_world_size() or 1
    if started > 1 and world_size not in (None, started):
        raise click.UsageError(
            f"--world-size {world_size}, but torchrun started {started} ranks: leave it out"
        )
    if math.isnan(budget) or math.isnan(timeout):
        raise click.UsageError("--budget and --timeout are numbers of seconds; got nan")
    interpret_without_gpu()  # before Triton is imported
    require_engine()
    from tritoncp.self_check.attempts import Request
    from tritoncp.self_check.run import main

    sys.exit(main(Request(only, jobs, world_size or 4, budget, timeout), as_json))


def require_engine() -> None:
    """Check that kernels are interpreted only without a GPU, and can be. Raises RuntimeError, with the
    remedy, if the interpreter lacks a package, or if there is a GPU, which the check would not test."""
    from tritoncp.doctor import examine

    report = examine()
    needed = report["versions"]["triton"], report["versions"]["numpy"]
    if report["interpreted"] and (report["devices"] or None in needed):
        raise RuntimeError("; ".join(report["problems"]))

"""The command `tritoncp check`. torch is imported only when it runs, so that --help is quick."""

from __future__ import annotations

import sys
from typing import Any

import click

from tritoncp.command_base import Seconds


@click.command()
@click.option(
    "--only", default="*", metavar="PATTERN", help="Cases by name: 'ring-*', '*-documents-float32'."
)
@click.option(
    "--world-size",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Ranks of a simulated world.",
)
@click.option(
    "--jobs", type=click.IntRange(1, 1024), help="Processes that share the device.  [default: one per core]"
)
@click.option(
    "--budget",
    type=Seconds(),
    help="Seconds for the whole check, with --strict.  [default: 60, not strict]",
)
@click.option("--strict", is_flag=True, help="A case that does not run in time is a failure.")
@click.option(
    "--timeout",
    type=Seconds(),
    default=20.0,
    show_default=True,
    help="Seconds to wait for another rank, or for a kernel.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
def check(budget: float | None, strict: bool, as_json: bool, **options: Any) -> None:
    """Compare every schedule, mask and dtype with dense float64 attention, on this machine's devices.

    \b
    Examples:
      tritoncp check                                    # simulated worlds on one device
      tritoncp check --only 'ring-*' --world-size 2     # cases by name
      torchrun --nproc-per-node 8 -m tritoncp check     # real ranks: NCCL, or gloo without GPUs

    The allowed error is twice the error of torch's eager attention in the same dtype, plus two units in the
    last place. Exits with 1 if a case is wrong or failed, or if no case of a schedule ran within the budget;
    with --strict or --budget, if any case did not. Without a GPU the kernels run interpreted, on small
    shapes.
    """
    from tritoncp.core.processes import interpret_without_gpu

    interpret_without_gpu()  # before Triton is imported
    require_engine()
    from tritoncp.self_check.cases import CheckRequest
    from tritoncp.self_check.run import main

    strict = strict or budget is not None
    sys.exit(main(CheckRequest(**options, budget=budget or 60.0, strict=strict), as_json))


def require_engine() -> None:
    """Raise RuntimeError with the remedy if a package for interpreted kernels is missing, or if kernels are
    interpreted on a machine with a GPU, which the check would not test."""
    from tritoncp.doctor import examine

    report = examine()
    needed = report["versions"]["triton"], report["versions"]["numpy"]
    if report["interpreted"] and (report["devices"] or None in needed):
        raise RuntimeError("; ".join(report["problems"]))

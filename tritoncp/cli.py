"""The command line: `tritoncp demo`, `doctor`, `perf`. Torch is imported by the command that needs it."""

import json
import sys
from pathlib import Path

import click

from tritoncp import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tritoncp")
def main() -> None:
    """Context-parallel flex attention in Triton."""


@main.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
def doctor(as_json: bool) -> None:
    """Say what tritoncp finds on this machine and what will run where.

    Exits with 1 if something that is needed is missing or does not work.
    """
    from tritoncp.doctor import examine, show

    report = examine()
    click.echo(json.dumps(report, indent=2)) if as_json else show(report)
    sys.exit(1 if report["problems"] else 0)


@main.command()
@click.option("--steps", type=click.IntRange(1), default=12, show_default=True, help="Training steps.")
@click.option("--seq-len", type=click.IntRange(16), default=1024, show_default=True, help="Bytes in a step.")
@click.option(
    "--world-size",
    type=click.IntRange(1),
    help="Local ranks. [default: one for each GPU, 4 for fewer than 2]",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo-out"),
    show_default=True,
    help="Where plan.png and losses.json go.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, the rest on stderr.")
def demo(steps: int, seq_len: int, world_size: int | None, out: Path, as_json: bool) -> None:
    """Train a small transformer on several ranks and on one, and compare the losses.

    Starts local processes, or joins what torchrun started: torchrun --nproc-per-node 4 -m tritoncp.demo.
    Exits with 1 if the losses differ by more than rounding explains, or a rank fails.
    """
    from rich.console import Console

    from tritoncp.demo.run import run
    from tritoncp.demo.train import Config

    try:
        report = run(Config(seq_len, steps), world_size, out, Console(stderr=as_json))
    except (RuntimeError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if report is not None:
        text = json.dumps(report.as_json(), indent=2)
        (out / "losses.json").write_text(text + "\n")
        if as_json:
            click.echo(text)
        sys.exit(0 if report.agree else 1)


@main.group()
def perf() -> None:
    """Measure on this machine's GPU."""


@perf.command("run", add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def perf_run(words: tuple[str, ...]) -> None:
    """Time attention against PyTorch's own; --help says more."""
    from tritoncp.perf.run import main as run

    run(words, prog_name="tritoncp perf run")

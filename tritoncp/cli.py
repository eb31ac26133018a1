"""The command line: `tritoncp demo`, `tritoncp doctor`. Torch is imported by the command that needs it."""

import json
import sys

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

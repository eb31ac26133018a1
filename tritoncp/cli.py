"""The command line: the group of all commands. Commands import torch when they run.

Exit codes: 0: success; 1: failure, or a negative result of a check; 2: invalid options, also an output that
cannot be written, and a GPU that is not there; 130: Ctrl-C. An error is a line on stderr; with
TRITONCP_DEBUG=1, a traceback.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tritoncp._version import __version__
from tritoncp.analysis.command import inspect
from tritoncp.command_base import OutputFile, Tokens, errors_as_messages, make_console
from tritoncp.demo.command import demo
from tritoncp.doctor import doctor
from tritoncp.perf.cli import perf
from tritoncp.planning import SCHEDULES
from tritoncp.self_check.command import check
from tritoncp.tuning.command import autotune

if TYPE_CHECKING:
    from tritoncp.report.facts import PlanFacts


class Group(click.Group):
    """A group in which errors of all commands are messages."""

    def invoke(self, ctx: click.Context) -> Any:
        for stream in (sys.stdout, sys.stderr):  # show characters outside of the locale by number
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        with errors_as_messages():
            return super().invoke(ctx)


HEADS = click.IntRange(1, 1 << 16)
HEAD_DIM, V_HEAD_DIM = click.IntRange(1, 576), click.IntRange(1, 512)  # the maxima of kernels.tile_rules,
# whose import would import torch


@click.group("tritoncp", cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tritoncp")
def main() -> None:
    """Context-parallel flex attention in Triton.

    \b
    Examples:
      tritoncp plan --lengths 10K,6K,3K --world-size 4
      tritoncp doctor
      tritoncp check
    """


DTYPES = ("bfloat16", "float16", "float32")
BALANCERS = (
    "auto",
    "contiguous",
    "head_tail",
    "locality",
    "lpt",
    "natural",
    "per_document",
    "ptrr",
    "ptrr_unweighted",
    "spt",
)


@main.command()
@click.option(
    "--mask",
    metavar="EXPR",
    help="causal, full, document, window(left, right=0), prefix_lm(n), joined with & | ~ and parentheses, or "
    "module:function, any mask_mod.  [default: causal, with --lengths causal & document]",
)
@click.option(
    "--lengths", metavar="N,N,...|FILE", help="Tokens of each document: numbers, JSON, or a file of either."
)
@click.option(
    "--seq-len", type=Tokens(1), help="Tokens, as 128K or 1M.  [default: the lengths' sum, else 128K]"
)
@click.option("--world-size", type=click.IntRange(1), default=8, show_default=True, help="Ranks.")
@click.option("--heads", type=HEADS, default=32, show_default=True, help="Query heads.")
@click.option("--kv-heads", type=HEADS, default=8, show_default=True, help="Key and value heads.")
@click.option("--head-dim", type=HEAD_DIM, default=128, show_default=True, help="Of queries and keys.")
@click.option("--v-head-dim", type=V_HEAD_DIM, help="Of values.  [default: --head-dim]")
@click.option(
    "--batch", type=click.IntRange(1, 1 << 30), help="Batch rows.  [default: those of the lengths, else 1]"
)
@click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", show_default=True)
@click.option(
    "--balancer",
    type=click.Choice(BALANCERS),
    default="auto",
    show_default=True,
    help="How blocks are assigned to ranks.",
)
@click.option(
    "--schedule",
    type=click.Choice(("auto", *SCHEDULES)),
    default="auto",
    show_default=True,
    help="How keys and values reach the queries.",
)
@click.option(
    "--block-size", type=click.IntRange(1, 1 << 20), default=128, show_default=True, help="Tokens of a block."
)
@click.option("--png", type=OutputFile(".png"), help="File of the picture.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
def plan(png: Path | None, as_json: bool, **options: Any) -> None:
    """Show how the blocks of a mask would be assigned to ranks, and at which cost: no GPU is needed.

    \b
    Examples:
      tritoncp plan --lengths 4096,8192,53248 --world-size 4 --png plan.png
      tritoncp plan --mask "causal & window(4K)" --seq-len 1M --world-size 64
      tritoncp plan --balancer locality --schedule fetch --json

    Shows the owner of each block, the work of each rank, the bytes that each schedule sends and keeps, its
    predicted time, and the choice of "auto". In Python: print(plan), plan.plot().
    """
    from tritoncp.report.command import collect_facts
    from tritoncp.report.drawing import draw_figure, require_matplotlib

    if png is not None:
        require_matplotlib()
    with contextlib.redirect_stdout(sys.stderr):  # for output of the user's mask_mod
        facts = collect_facts(**options)
        if png is not None:
            draw_figure(facts, png)
        text = json.dumps(facts.as_json()) if as_json else ""
    click.echo(text) if as_json else _print_facts(facts)


def _print_facts(facts: PlanFacts) -> None:
    """Print the text of a plan. On a terminal a line about one rank has the colour of this rank in pictures;
    in a pipe or a file it is plain."""
    from rich.text import Text

    from tritoncp.report.colours import rank_colours
    from tritoncp.report.text import format_lines

    styles = ["rgb({},{},{})".format(*colour) for colour in rank_colours(facts.plan.world_size)]
    lines = [Text(text, "" if rank is None else styles[rank]) for text, rank in format_lines(facts)]
    make_console().print(Text("\n").join(lines), soft_wrap=True)


for command in (autotune, check, demo, doctor, inspect, perf):
    main.add_command(command)

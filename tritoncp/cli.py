"""The command line. Torch is imported by the command that needs it.

Exit codes: 0, done; 1, failed, or the result of a check is negative; 2, options that make no sense. An error
is a line on stderr; TRITONCP_DEBUG=1 shows the traceback instead.
"""

import contextlib
import errno
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from tritoncp._version import __version__
from tritoncp.perf.cli import perf
from tritoncp.self_check.command import check


@contextlib.contextmanager
def errors_as_messages() -> Iterator[None]:
    """Turn errors into messages of the command: a ValueError of the library is a usage error (exit code 2),
    errors of files and memory are failures (1); anything else is a bug in tritoncp."""
    try:
        yield
    except (click.ClickException, click.Abort, click.exceptions.Exit):
        raise
    except Exception as error:
        if os.environ.get("TRITONCP_DEBUG", "0") not in ("", "0"):
            raise
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            raise  # click ends quietly
        raise _message_of(error) from error


def _message_of(error: Exception) -> click.ClickException:
    said = str(error).strip() or type(error).__name__
    if isinstance(error, MemoryError) or "can't allocate memory" in said:
        return click.ClickException("this machine has not enough memory for that")
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError):
        return click.UsageError(said if len(said) <= 1000 else f"{said[:1000]}...")
    refused = isinstance(error, RuntimeError) and not isinstance(error, RecursionError | NotImplementedError)
    if refused or isinstance(error, OSError | ImportError):
        return click.ClickException(said)
    first = said.splitlines()[0][:300]
    return click.ClickException(
        f"a bug in tritoncp, {type(error).__name__}: {first}; TRITONCP_DEBUG=1 shows the traceback"
    )


class Command(click.Command):
    """A command whose errors are messages."""

    def invoke(self, ctx: click.Context) -> Any:
        for stream in (sys.stdout, sys.stderr):  # in a locale without a character, its number
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        with errors_as_messages():
            return super().invoke(ctx)


class Group(click.Group):
    """A group whose commands' errors are messages, wherever they were defined."""

    command_class = Command

    def invoke(self, ctx: click.Context) -> Any:
        with errors_as_messages():
            return super().invoke(ctx)


class Seconds(click.FloatRange):
    """A time to wait, up to a day."""

    name = "seconds"

    def __init__(self) -> None:
        super().__init__(min=0, max=86400, min_open=True)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        seconds = super().convert(value, param, ctx)
        if seconds != seconds:
            self.fail(f"{value} is no number of seconds", param, ctx)
        return seconds


JOBS = click.IntRange(1, 1024)
HEADS = click.IntRange(1, 1 << 16)
HEAD_DIM = click.IntRange(1, 256)  # as tritoncp.frontend.validate.MAX_HEAD_DIM, which would import torch here


@click.group("tritoncp", cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tritoncp")
def main() -> None:
    """Context-parallel flex attention in Triton."""


@main.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
def doctor(as_json: bool) -> None:
    """Report this machine's versions and devices, and the engine that runs on each.

    Exits with 1 if a requirement is missing or does not work.
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

    Starts local processes, or joins those of torchrun: torchrun --nproc-per-node 4 -m tritoncp.demo.
    Exits with 1 if the losses differ by more than rounding explains, or a rank fails.
    """
    from rich.console import Console

    from tritoncp.demo.run import run
    from tritoncp.demo.train import Config

    report = run(Config(seq_len, steps), world_size, out, Console(stderr=as_json))
    if report is not None:
        text = json.dumps(report.as_json(), indent=2)
        (out / "losses.json").write_text(text + "\n")
        if as_json:
            click.echo(text)
        sys.exit(0 if report.agree else 1)


class Tokens(click.ParamType):
    """A number of tokens, as 1000, 128K or 1M."""

    name = "tokens"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        from tritoncp.masks.expressions import count

        try:
            tokens = value if isinstance(value, int) else count(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if tokens < 1:
            self.fail(f"{value!r}: at least one token is needed", param, ctx)
        return tokens


DTYPES = ("bfloat16", "float16", "float32")
BALANCERS = ("contiguous", "head_tail", "locality", "natural", "per_document", "ptrr")
SCHEDULES = ("auto", "allgather", "ring", "fetch", "ulysses", "ulysses+ring")


@main.command()
@click.option(
    "--mask",
    metavar="EXPR",
    help="causal, full, document, window(left, right=0), prefix_lm(n), joined with & | ~ and parentheses, or "
    "module:function, a mask_mod of your own.  [default: causal, with --lengths causal & document]",
)
@click.option(
    "--lengths", metavar="N,N,...|FILE", help="Tokens of each document: numbers, JSON, or a file of either."
)
@click.option(
    "--seq-len", type=Tokens(), help="Tokens, as 128K or 1M.  [default: the lengths' sum, else 128K]"
)
@click.option("--world-size", type=click.IntRange(1), default=8, show_default=True, help="Ranks.")
@click.option("--heads", type=HEADS, default=32, show_default=True, help="Query heads.")
@click.option("--kv-heads", type=HEADS, default=8, show_default=True, help="Key and value heads.")
@click.option("--head-dim", type=HEAD_DIM, default=128, show_default=True, help="Of queries and keys.")
@click.option("--v-head-dim", type=HEAD_DIM, help="Of values.  [default: --head-dim]")
@click.option(
    "--batch", type=click.IntRange(1, 1 << 30), help="Batch rows.  [default: those of the lengths, else 1]"
)
@click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", show_default=True)
@click.option(
    "--balancer", type=click.Choice(BALANCERS), default="ptrr", show_default=True, help="Who gets what."
)
@click.option(
    "--schedule", type=click.Choice(SCHEDULES), default="auto", show_default=True, help="What travels."
)
@click.option(
    "--block-size", type=click.IntRange(1, 1 << 20), default=128, show_default=True, help="Tokens of a block."
)
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Where the picture goes.")
@click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), help="Where a page with all of it goes."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
def plan(png: Path | None, html: Path | None, as_json: bool, **options: Any) -> None:
    """Show how a mask would be dealt to ranks, and at which cost: no GPU is needed.

    \b
    tritoncp plan --mask "causal & window(4K)" --seq-len 1M --world-size 64
    tritoncp plan --lengths 4096,8192,53248 --world-size 4 --png plan.png

    Shows the owner of each block, the work of each rank, the bytes that each schedule sends and keeps, its
    predicted time, and the choice of "auto". In Python: print(plan), plan.plot().
    """
    from tritoncp.planning.command import planned, say, write

    for path, suffix in ((png, ".png"), (html, ".html")):
        if path is not None and path.suffix != suffix:
            raise click.UsageError(f"--{suffix[1:]} {str(path)!r}: the file has to be called *{suffix}")
    with contextlib.redirect_stdout(sys.stderr):  # of a mask_mod that prints
        facts = planned(**options)
        for path in (png, html):
            if path is not None:
                write(facts, path)
        text = json.dumps(facts.as_json()) if as_json else ""
    click.echo(text) if as_json else say(facts)


@main.command()
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
    from tritoncp.analysis.resource_table import ARCHS, measured, pick, run, shipped

    for arch in archs:
        check_target(arch)
    listed = [*shipped(archs or ARCHS), *measured(archs or ARCHS)]
    rows = pick(listed, kernel=kernels, head_dim=dims, dtype=dtypes, variant=masks)
    wrong = run(rows, jobs, timeout, as_json=as_json, check=check, update=update)
    for line in wrong:
        click.echo(line, err=True)
    sys.exit(1 if wrong else 0)


@main.command()
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
    """
    from rich.console import Console

    from tritoncp.perf.records.history import read
    from tritoncp.tuning import search_run, targets

    named_shapes = [*shapes, *(shape for name in presets for shape in targets.preset(name))]
    named_shapes = named_shapes or [*targets.preset("llama3-8b")]
    device = search_run.device(arch)
    if history is not None:
        if not (history.is_file() or history.is_dir()):
            raise click.UsageError(f"--worst {history} is neither a file nor a folder of *.jsonl files")
        why, selection = targets.select_worst_case(read(history).points, None if arch else device.name)
        click.echo(why, err=True)
    else:
        selection = targets.targets(named_shapes, masks or tuple(targets.MASKS), ops.split(","), dtype, score)
    selection, left_out = targets.without_faults(selection, device.arch)
    for line in left_out:
        click.echo(line, err=True)
    request = search_run.request(selection, device, arch is not None, budget, resume, out, jobs, timeout)
    if dry_run:
        rows = [
            {"kernel": target.name, "candidates": len(targets.candidates(target, request.device.arch))}
            for target in selection
        ]
        if as_json:
            click.echo(json.dumps(rows, indent=1))
        else:
            for row in rows:
                click.echo(f"{row['kernel']}: {row['candidates']} candidates")
            click.echo(f"on {request.device.name} ({request.device.arch}), journal {request.journal}")
        return
    outcome = search_run.autotune(request, Console(stderr=True))
    if as_json:
        click.echo(json.dumps(outcome.rows, indent=1))
    else:
        search_run.show(outcome, request.static, Console())
    if outcome.interrupted:
        click.echo("interrupted: what is shown is kept; --resume goes on from there", err=True)
    sys.exit(130 if outcome.interrupted else 0 if outcome.rows else 1)


main.add_command(check)
main.add_command(perf)

"""`tritoncp doctor`: versions, devices, and the engine that runs on each.

Functions import torch themselves, so that the command line shows its help without it.
"""

import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click

from tritoncp._version import __version__
from tritoncp.command_base import make_console
from tritoncp.core import environment
from tritoncp.core.environment import cpu_target
from tritoncp.core.versions import NEWEST_TESTED, OLDEST, installed_version, list_untested, minor_of
from tritoncp.kernels import toolchain
from tritoncp.kernels.toolchain import Ptxas

INTERPRETED = "the Triton kernels, interpreted (slow, exact, for tests)"
CPU_ENGINE = "the CPU engine, plain torch (TRITON_INTERPRET=1 runs the kernels interpreted instead)"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
def doctor(as_json: bool) -> None:
    """Report this machine's versions and devices, and the engine that runs on each.

    Exits with 1 if a requirement is missing or does not work.

    \b
    Examples:
      tritoncp doctor
      tritoncp doctor --json
    """
    report = examine()
    click.echo(json.dumps(report, indent=2)) if as_json else show(report, make_console())
    sys.exit(1 if report["problems"] else 0)


def examine() -> dict[str, Any]:
    """Return all facts as plain values. `problems` has a line with the remedy for each fault, `advice` has a
    line for each setting that could be better.

    >>> facts = examine()
    >>> sorted(facts)[:5]
    ['advice', 'cpu', 'devices', 'distributed', 'environment']
    """
    import torch

    packages = "triton", "einops", "numpy", "matplotlib"
    versions: dict[str, str | None] = {"tritoncp": __version__, "python": platform.python_version()}
    versions["torch"] = str(torch.__version__)  # with its build, such as +cu132, which metadata lacks
    versions |= {name: installed_version(name) for name in packages}
    interpreted = cpu_target() == "interpreter"
    gpus = devices()
    archs = list(dict.fromkeys(gpu["architecture"] for gpu in gpus))
    return {
        "versions": versions,
        "newest_tested": NEWEST_TESTED,
        "devices": gpus,
        "ptxas": assemblers(archs),
        "interpreted": interpreted,
        "cpu": INTERPRETED if interpreted and versions["triton"] and versions["numpy"] else CPU_ENGINE,
        "distributed": backends(),
        "nccl": ".".join(map(str, nccl_version() or ())) or None,
        "environment": environment.set_variables(),
        "problems": problems(versions, interpreted),
        "advice": [
            *environment.faults(),
            *list_untested(),
            *ptxas_advice(archs),
            *nccl_advice(len(gpus)),
        ],
    }


def devices() -> list[dict[str, Any]]:
    """Describe the GPUs of this process."""
    import torch

    from tritoncp.kernels.tile_rules import architecture

    gpus = []
    for index in range(torch.cuda.device_count()) if torch.cuda.is_available() else ():
        properties = torch.cuda.get_device_properties(index)
        arch, memory = architecture(torch.device("cuda", index)), round(properties.total_memory / 2**30, 1)
        gpus.append({"index": index, "name": properties.name, "architecture": arch, "memory_gib": memory})
    return gpus


def assemblers(archs: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the ptxas of each architecture, or the error; without a GPU for Hopper and Blackwell."""
    facts = {}
    for arch in archs or ("sm_90", "sm_100"):
        try:
            facts[arch] = toolchain.ptxas_for(arch)._asdict()
        except LookupError as error:
            facts[arch] = {"why": str(error)}
    return facts


def ptxas_advice(archs: Sequence[str]) -> Iterator[str]:
    """Yield advice to use a newer ptxas, if the current one is known to miscompile some kernels."""
    yield from toolchain.broken_ptxas_paths()
    for arch in archs:
        try:
            used = toolchain.ptxas_for(arch)
        except LookupError:
            continue  # the error is in the table
        if faults := "; ".join(toolchain.ptxas_faults(arch, used.version)):
            yield (
                f"ptxas {used.version} ({used.origin}) is known to assemble wrong for {arch}: {faults}. "
                "pip install 'nvidia-cuda-nvcc>=13.3' (CUDA 13: driver 580 or newer), and set "
                f"{used.variable} to its nvidia/cu13/bin/ptxas"
            )


def backends() -> list[str]:
    """Return the backends of torch.distributed in this torch."""
    import torch.distributed as dist

    if not dist.is_available():
        return []
    has = {"nccl": dist.is_nccl_available, "gloo": dist.is_gloo_available, "mpi": dist.is_mpi_available}
    return [name for name, available in has.items() if available()]


def nccl_version() -> tuple[int, ...] | None:
    """Return the version of NCCL in this torch; None without NCCL or a GPU."""
    import torch

    if not torch.cuda.is_available() or "nccl" not in backends():
        return None
    return tuple(torch.cuda.nccl.version())


def nccl_advice(gpus: int) -> Iterator[str]:
    """Yield advice on NCCL settings for a machine with several GPUs, for overlap of messages with kernels and
    safe use of several communicators (reasons: docs/decisions/0001-one-data-communicator.md)."""
    version = nccl_version()
    if gpus < 2 or version is None:
        return
    if os.environ.get("TORCH_NCCL_HIGH_PRIORITY", "0") != "1":
        yield (
            "a process group without a high-priority stream gets a second communicator that has one; to save "
            "the memory of its NCCL buffers, set TORCH_NCCL_HIGH_PRIORITY=1, or make the group with "
            "pg_options=ProcessGroupNCCL.Options(is_high_priority_stream=True)"
        )
    if os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT", "0") != "1":
        remedy = "set NCCL_LAUNCH_ORDER_IMPLICIT=1"
        if version < (2, 26):
            remedy = f"NCCL 2.26 is needed, this is {'.'.join(map(str, version))}: then {remedy}"
        yield f"communicators with concurrent messages, as FSDP's and this one, may deadlock: {remedy}"


def problems(versions: dict[str, str | None], interpreted: bool) -> list[str]:
    import torch

    lines = []
    for package, oldest in OLDEST.items():
        have = versions[package]
        if have is None and (package == "torch" or sys.platform == "linux"):
            lines.append(f"{package} is not installed: pip install {package}")
        elif have is not None and minor_of(have) < minor_of(oldest):
            lines.append(f"{package} {have} is too old: {oldest} or newer is needed")
    if interpreted and torch.cuda.is_available():
        lines.append("TRITON_INTERPRET=1 is set on a machine with a GPU: nothing will run on it; unset it")
    if interpreted and versions["numpy"] is None:
        lines.append("interpreted kernels need NumPy: pip install numpy")
    triton, numpy = (minor_of(versions[name] or "0") for name in ("triton", "numpy"))
    if interpreted and minor_of(OLDEST["triton"]) <= triton < (3, 7) and numpy >= (2, 4):
        lines.append(
            f"triton {versions['triton']} cannot be interpreted with numpy {versions['numpy']}: "
            "pip install 'numpy<2.4', or take triton 3.7"
        )
    return lines


def show(report: dict[str, Any], console: Any) -> None:
    """Print the facts as a table."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")  # wrap long paths
    for label, value in summary_rows(report):
        table.add_row(label, Text(value))
    console.print(table)
    for label, lines, style in (
        ("problem", report["problems"], "red"),
        ("advice", report["advice"], "yellow"),
    ):
        for line in lines:
            console.print(Text.assemble((f"{label}  ", style), line))


def summary_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the facts as pairs (label, text), with the facts that `tritoncp check` adds."""
    nccl = f"nccl {report['nccl'] or ''}".strip()
    rows = {
        "versions": [f"{name} {version or '-'}" for name, version in report["versions"].items()],
        "tested up to": [f"{name} {newest}" for name, newest in report["newest_tested"].items()],
        "GPUs": [
            f"{gpu['index']}: {gpu['name']}, {gpu['architecture']}, {gpu['memory_gib']} GiB"
            for gpu in report["devices"]
        ],
        "ptxas": [f"{arch}: {facts.get('why') or Ptxas(**facts)}" for arch, facts in report["ptxas"].items()],
        "CPU tensors run": [report["cpu"]],
        "collectives": [nccl if name == "nccl" else name for name in report["distributed"]],
        "environment": [f"{name}={value}" for name, value in report["environment"].items()],
    }
    joined = ("versions", "tested up to", "collectives")
    pairs = [(name, (", " if name in joined else "\n").join(texts) or "none") for name, texts in rows.items()]
    return [*pairs, *report.get("check", {}).items()]

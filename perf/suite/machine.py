"""Facts about the machine that affect figures: versions, driver, clocks, temperature."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import triton

from tritoncp._version import __version__
from tritoncp.kernels.toolchain import ptxas_for
from tritoncp.measured_tiles import tile_tables
from tritoncp.perf.records.history import Series

_STATE = ("clocks.sm", "power.draw", "temperature.gpu", "clocks_throttle_reasons.active")
_CLOCKS = ("clocks.applications.graphics", "clocks.default_applications.graphics")
INTERPRETED = "cpu, interpreted"


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions, driver, commit and digest of the code: attributes of a point."""
    package = tile_tables.PACKAGE.resolve()
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "tritoncp": __version__,
        "commit": commit(package.parent if (package.parent / ".git").exists() else Path.cwd()),
        "sources": sources(package),
    }
    if device.type == "cuda":
        facts["arch"] = tile_tables.device_of(device).arch
        facts["cuda"] = torch.version.cuda or torch.version.hip
        facts["cudnn"] = torch.backends.cudnn.version()
        facts["driver"] = _query_gpu(device, "driver_version").get("driver_version")
        with contextlib.suppress(LookupError):
            facts["ptxas"] = ptxas_for(facts["arch"]).version
    return {name: value for name, value in facts.items() if value is not None}


def series(device: torch.device, clocks: str | None = None) -> Series:
    """Describe the device, its power limit and its clocks policy: ``clocks`` if not None, else whether
    application clocks are set. Locked clocks cannot be read from a device: pass them as ``clocks``."""
    if device.type != "cuda":
        return Series(INTERPRETED)
    limit = _query_gpu(device, "power.limit").get("power.limit", "")
    return Series(torch.cuda.get_device_name(device), limit, clocks or _clocks_policy(device))


def processor() -> str:
    """Return the model of the CPU.

    >>> bool(processor())
    True
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine() or "CPU"


def commit(folder: Path) -> str | None:
    """Return the commit of a folder, with + if Python files have uncommitted changes; None without git."""
    head = _run_command("git", "-C", str(folder), "rev-parse", "HEAD")
    changed = head and _run_command("git", "-C", str(folder), "status", "--porcelain", "-uno", "--", "*.py")
    return f"{head}+" if changed else head


def state(device: torch.device) -> dict[str, str]:
    """Read clock, power and temperature of the GPU, and the bit mask of reasons that throttle its clock
    (0: none). Empty without nvidia-smi."""
    return _query_gpu(device, *_STATE)


def sources(package: Path) -> str:
    """Compute a digest of the package's Python files, which identifies the code without git."""
    kernels, perf = tile_tables.SHIPPED.parent, Path(__file__).parents[1]  # beside the package in a checkout
    bases = {package: package, kernels: kernels.parent, perf: perf.parent}
    files = {path.relative_to(base): path for folder, base in bases.items() for path in folder.rglob("*.py")}
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0".encode() + files[name].read_bytes())
    return digest.hexdigest()[:12]


def _clocks_policy(device: torch.device) -> str:
    clocks = _query_gpu(device, *_CLOCKS)
    chosen, default = (clocks.get(name, "") for name in _CLOCKS)
    return "default" if chosen == default else chosen


def _query_gpu(device: torch.device, *fields: str) -> dict[str, str]:
    query = "--query-gpu=" + ",".join(fields)
    uuid = torch.cuda.get_device_properties(device).uuid  # CUDA_VISIBLE_DEVICES does not change it
    answer = _run_command("nvidia-smi", f"--id=GPU-{uuid}", query, "--format=csv,noheader")
    return dict(zip(fields, (part.strip() for part in answer.split(",")))) if answer else {}


def _run_command(*command: str) -> str | None:
    """Run a command and return its output; None if the command is missing or fails."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip()

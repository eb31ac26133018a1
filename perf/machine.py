"""Facts about the machine that affect figures: versions, driver, clocks, temperature."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import triton

import tritoncp
from tritoncp.kernels.toolchain import ptxas_for
from tritoncp.ops import tile_tables
from tritoncp.perf.record import Series

_STATE = ("clocks.sm", "power.draw", "temperature.gpu", "clocks_throttle_reasons.active")
_CLOCKS = ("clocks.applications.graphics", "clocks.default_applications.graphics")
INTERPRETED = "cpu, interpreted"


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, driver, commit and digest of the code: attributes in which points of a series may differ."""
    package = Path(tritoncp.__file__).resolve().parent
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "tritoncp": tritoncp.__version__,
        "commit": commit(package.parent if (package.parent / ".git").exists() else Path.cwd()),
        "sources": sources(package),
    }
    if device.type == "cuda":
        facts["arch"] = tile_tables.device_of(device).arch
        facts["cuda"] = torch.version.cuda or torch.version.hip
        facts["cudnn"] = torch.backends.cudnn.version()
        facts["driver"] = _asked(device, "driver_version").get("driver_version")
        facts["ptxas"] = _ptxas(facts["arch"])
    return {name: value for name, value in facts.items() if value is not None}


def _ptxas(arch: str) -> str | None:
    """The version of the ptxas that Triton runs for an architecture; None where there is none."""
    try:
        return ptxas_for(arch).version
    except LookupError:
        return None


def series(device: torch.device, clocks: str | None = None) -> Series:
    """The device, its power limit and its clocks policy: ``clocks`` if not None, else whether application
    clocks are set. Locked clocks cannot be read from a device: pass them as ``clocks``."""
    if device.type != "cuda":
        return Series(INTERPRETED)
    limit = _asked(device, "power.limit").get("power.limit", "")
    return Series(torch.cuda.get_device_name(device), limit, clocks or _policy(device))


def processor() -> str:
    """The CPU's model.

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
    """The commit a folder is at, with a + if Python files differ from it; None where there is no git."""
    head = _said("git", "-C", str(folder), "rev-parse", "HEAD")
    changed = head and _said("git", "-C", str(folder), "status", "--porcelain", "-uno", "--", "*.py")
    return f"{head}+" if changed else head


def state(device: torch.device) -> dict[str, str]:
    """Clock, power and temperature of the GPU, and the bit mask of reasons that hold its clock back (0: no
    reason). Empty without nvidia-smi."""
    return _asked(device, *_STATE)


def sources(package: Path) -> str:
    """A digest of the package's Python files, which identifies the code without git."""
    folders = (package, package / "kernels", package / "perf")  # the last two are links in a checkout
    files = {path.relative_to(package): path for folder in folders for path in folder.rglob("*.py")}
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0".encode() + files[name].read_bytes())
    return digest.hexdigest()[:12]


class Brakes:
    """Whether heat or a power brake is slowing a GPU down, by NVIDIA's management library.

    A power cap alone is no brake: large GPUs run into theirs in every long product. Without the library
    (another vendor) nothing is ever seen.
    """

    _REASONS = 0x8 | 0x20 | 0x40 | 0x80  # hardware slowdown, software thermal, hardware thermal, power brake

    def __init__(self, device: torch.device) -> None:
        self._handle = ctypes.c_void_p()
        self._library = None
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        name = _identity(device).encode()
        if not (library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(self._handle))):
            self._library = library

    def on(self) -> bool:
        # (The driver may call it by its newer name alone one day.)
        ask = getattr(self._library, "nvmlDeviceGetCurrentClocksThrottleReasons", None)
        if ask is None:
            return False
        reasons = ctypes.c_ulonglong()
        failed = ask(self._handle, ctypes.byref(reasons))
        return not failed and bool(reasons.value & self._REASONS)


def _identity(device: torch.device) -> str:
    """As NVIDIA's tools name a GPU, whatever CUDA_VISIBLE_DEVICES shows of them."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _policy(device: torch.device) -> str:
    clocks = _asked(device, *_CLOCKS)
    chosen, default = (clocks.get(name, "") for name in _CLOCKS)
    return "default" if chosen == default else chosen


def _asked(device: torch.device, *fields: str) -> dict[str, str]:
    query = "--query-gpu=" + ",".join(fields)
    answer = _said("nvidia-smi", f"--id={_identity(device)}", query, "--format=csv,noheader")
    return dict(zip(fields, (part.strip() for part in answer.split(",")))) if answer else {}


def _said(*command: str) -> str | None:
    """Run a command and return its output; None where the command is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

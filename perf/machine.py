"""What a figure may depend on besides the code that is measured."""

from __future__ import annotations

import datetime
import hashlib
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import triton

import tritoncp

_ABOUT = ("driver_version", "power.limit", "clocks.max.sm")
_STATE = ("clocks.sm", "power.draw", "temperature.gpu", "clocks_throttle_reasons.active")


def environment(device: torch.device) -> dict[str, Any]:
    """Device, driver, versions, and which code this is."""
    package = Path(tritoncp.__file__).resolve().parent
    about: dict[str, Any] = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": "cpu, interpreted",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "tritoncp": tritoncp.__version__,
        "commit": _said("git", "-C", str(package), "rev-parse", "HEAD"),
        "sources": sources(package),
    }
    if device.type == "cuda":
        about |= {
            "device": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda or torch.version.hip,
        }
        about |= {"cudnn": torch.backends.cudnn.version(), **_asked(_ABOUT)}
    return about


def state() -> dict[str, str]:
    """Clock, power and temperature of the first GPU, and why its clock is held back, where there is a tool
    that says so; a bit mask of 0 is a clock that nothing holds back."""
    return _asked(_STATE)


def sources(package: Path) -> str:
    """A digest of the package's Python files: says which code ran where there is no git."""
    folders = (package, package / "kernels", package / "perf")  # the last two are links in a checkout
    files = {path.relative_to(package): path for folder in folders for path in folder.rglob("*.py")}
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0".encode() + files[name].read_bytes())
    return digest.hexdigest()[:12]


def _asked(fields: tuple[str, ...]) -> dict[str, str]:
    query = "--query-gpu=" + ",".join(fields)
    answer = _said("nvidia-smi", "--id=0", query, "--format=csv,noheader")
    return dict(zip(fields, (part.strip() for part in answer.split(",")))) if answer else {}


def _said(*command: str) -> str | None:
    """A command's output; None where there is no such command or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

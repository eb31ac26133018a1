"""Autotuning at the first call of a kind, if TRITONCP_AUTOTUNE is set.

`tritoncp autotune` runs in a subprocess, so that a crash or hang does not affect training. It writes the
user's files (:mod:`tritoncp.measured_tiles.tile_tables`) before the call looks up its tiles.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from typing import Any

import torch

from tritoncp.core.environment import AUTOTUNE, CONFIG_DIR
from tritoncp.distributed import failures, groups
from tritoncp.measured_tiles import tile_lookup, tile_tables
from tritoncp.measured_tiles.tile_lookup import MEASURED_KINDS, TileKey

COMMAND = (sys.executable, "-m", "tritoncp", "autotune")
MEASURED = {kind: mask for mask, kind in MEASURED_KINDS.items()}
# Min and max sequence length that is measured; the length of a call is clamped to this range.
LENGTHS = (1024, 16384)
_ATTEMPTS: set[TileKey] = set()  # calls that were tuned, or whose tuning failed


def tune_if_requested(device: torch.device, group: Any, call: TileKey, shape: tuple[int, int, int]) -> None:
    """Tune tile shapes once for a kind of call without measured ones, if TRITONCP_AUTOTUNE is set.

    shape: query heads, KV heads and rows of the call. Every process decides by itself: one process per
    machine measures at a time, and the next one uses its results. Ranks on other machines wait for messages
    meanwhile, for less than the group's timeout.
    """
    if call.mask == "mod":  # ranks without masked blocks have kind "interval"
        call = call._replace(mask="interval")
    if call.score == 2 or _is_tuned(device, call):
        return  # the score_mod that tuning uses for all others does not load a value for each score
    allowed = 0.0 if CONFIG_DIR.read() == "-" else float(AUTOTUNE.read())
    if not allowed or call in _ATTEMPTS or not _tunable(device):
        return
    if group is not None and not groups.is_dry_run(group):  # tuning may take twice the allowed time
        allowed = min(allowed, failures.timeout(group).total_seconds() / 4)
    _ATTEMPTS.add(call)
    try:
        _tune(device, call, shape, allowed)
    except Exception as error:  # the call continues with the default tiles
        outcome = "could not be tuned, so that built-in defaults are used"
        warnings.warn(f"tile shapes for this kind of call {outcome}: {error}", stacklevel=2)
    finally:  # also if warnings are errors
        tile_lookup.WARNED_DEVICES.add(tile_tables.device_of(device))
        tile_tables.forget()


def _is_tuned(device: torch.device, call: TileKey) -> bool:
    """Return whether the device's table has tiles for a pass of this call over many query rows."""
    return tile_lookup.has_pass_tiles(tile_lookup.choose_tiles(tile_lookup.local_table(device), *call))


def _tunable(device: torch.device) -> bool:
    """Return whether a device can be tuned now: a GPU, and no CUDA graph is being captured."""
    return device.type != "cpu" and not torch.cuda.is_current_stream_capturing()


def _tune(device: torch.device, call: TileKey, shape: tuple[int, int, int], allowed: float) -> None:
    """Run `tritoncp autotune`, for at most twice ``allowed`` seconds, since it compiles first. Only one
    process of a machine runs that command at a time. Raises RuntimeError if no tiles were measured."""
    deadline = time.monotonic() + 2 * allowed
    folder = tile_tables.output_folder()
    path = tile_tables.path_in(folder, tile_tables.device_of(device)).with_suffix(".tuning")
    with tile_tables.locked(path, max(0.0, deadline - time.monotonic())):
        tile_tables.forget()
        if _is_tuned(device, call):
            return
        arguments = _command_arguments(call, shape, allowed)
        warnings.warn(
            f"TRITONCP_AUTOTUNE: this call waits about {allowed:.0f} s for `tritoncp autotune "
            f"{' '.join(arguments)}`, whose results are stored in {folder}",
            stacklevel=2,
        )
        remaining = max(1.0, deadline - time.monotonic())
        try:
            process = subprocess.run(
                [*COMMAND, *arguments], env=_environment(device), stdin=subprocess.DEVNULL, timeout=remaining,
                capture_output=True, text=True, errors="replace",
            )  # fmt: skip
            failure = (
                process.stderr.strip().rpartition("\n")[2] or f"the command ended with {process.returncode}"
            )
        except subprocess.TimeoutExpired:
            failure = f"the command had not ended after {remaining:.0f} s"
        tile_tables.forget()
        if not _is_tuned(device, call):
            raise RuntimeError(failure)


def _command_arguments(call: TileKey, shape: tuple[int, int, int], allowed: float) -> list[str]:
    """Return arguments of `tritoncp autotune` for a call: its shape, a mask of its kind, and softcap in place
    of any score_mod.

    >>> " ".join(_command_arguments(TileKey("bfloat16", (192, 128), "interval", False), (16, 16, 5000), 60))
    '--shapes 16x16,192x128,4992 --mask document --ops fwd,bwd --dtype bfloat16 --budget 60s'
    """
    (heads, kv_heads, rows), (least, most) = shape, LENGTHS
    length = min(most, max(least, rows // 128 * 128))
    width = "x".join(map(str, dict.fromkeys(call.dims)))
    arguments = ["--shapes", f"{heads}x{kv_heads},{width},{length}", "--mask", MEASURED[call.mask]]
    arguments += ["--ops", "fwd,bwd", "--dtype", call.dtype, "--budget", f"{max(1.0, allowed):.0f}s"]
    return [*arguments, "--score-mod", "softcap"] if call.score else arguments


def _environment(device: torch.device) -> dict[str, str]:
    """Return the environment of the subprocess, which imports this package: only this device is visible, and
    TRITONCP_AUTOTUNE is unset."""
    env = {name: value for name, value in os.environ.items() if name != AUTOTUNE.name}
    home = str(tile_tables.PACKAGE.parent)
    env["PYTHONPATH"] = os.pathsep.join([home, *filter(None, [env.get("PYTHONPATH")])])
    if device.type != "cpu":
        visible = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in env else "CUDA_VISIBLE_DEVICES"
        index = torch.cuda.current_device() if device.index is None else device.index
        env[visible] = env[visible].split(",")[index] if env.get(visible) else str(index)
    return env

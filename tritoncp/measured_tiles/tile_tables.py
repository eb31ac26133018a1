"""Files and tables of the tile shapes that ``tritoncp autotune`` measured.

A file has the measurements of one device with one Triton version:
``<folder>/<arch>/<device>-triton-<version>.json``.  The first entry counts, of the folders
TRITONCP_CONFIG_DIR, the user's, the package's; then, in the same order, of files for other devices of the
same architecture or for other Triton versions; then the defaults in ``kernels/tile_rules.py``.  With
``TRITONCP_CONFIG_DIR=-`` no folder is read.

An entry of kernel "route" names the fastest route of the forward pass for a call.  It applies only to calls
with exactly its properties, on that device with that Triton, where the route was verified.

``tile_lookup.py`` looks up tiles for a call. A call without an entry can tune first, if requested:
``tune_on_first_call.py``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tritoncp.core.environment import CONFIG_DIR
from tritoncp.core.files import parse_json, slug
from tritoncp.core.log_lines import area_logger, log_decision
from tritoncp.core.versions import installed_version
from tritoncp.kernels import tile_rules
from tritoncp.kernels.options import ROUTES, check_options
from tritoncp.kernels.tile_rules import architecture, head_dim_fault

tiles_log = area_logger("tiles")
PACKAGE = Path(__file__).parents[1]
SHIPPED = Path(tile_rules.__file__).with_name("configs")
LOCK_SECONDS = 60.0  # seconds that a writer waits for the lock, which writers hold for milliseconds
# Kind of mask whose tiles are used if a kind was not measured: both have long rows of full blocks.
NEAREST_KIND = {"full": "causal", "causal": "full", "interval": "causal", "mod": "interval"}
MIN_SPEEDUP = 1.02  # tiles are stored if they are faster than the built-in default by this factor

# An entry's keys: kernel, dtype, head_dim, mask, config; v_head_dim if it differs; score, the name of a
# score_mod, and loads = 2 if the score_mod loads a value for each score.
Entries = list[dict[str, Any]]
Table = dict[tuple[Any, ...], dict[str, Any]]  # the config of each key, see entry_key()


class Device(NamedTuple):
    """A GPU model: its architecture, as in kernels/tile_rules.py, and its product name."""

    arch: str
    name: str


def device_of(device: torch.device) -> Device:
    """Return the model of a device.

    >>> device_of(torch.device("cpu"))
    Device(arch='interpreter', name='cpu')
    """
    return Device(architecture(device), "cpu") if device.type == "cpu" else _gpu_of(device)


@functools.lru_cache(maxsize=64)
def _gpu_of(device: torch.device) -> Device:
    return Device(architecture(device), torch.cuda.get_device_name(device))


def folders() -> list[Path]:
    """Return the folders with files of tile shapes, in order of preference."""
    variable = CONFIG_DIR.read()
    if variable == "-":
        return []
    return [*([Path(variable)] if variable else []), user_folder(), SHIPPED]


def user_folder() -> Path:
    """Return the user's configuration folder."""
    import platformdirs

    return Path(platformdirs.user_config_dir("tritoncp", appauthor=False)) / "configs"


def output_folder() -> Path:
    """Return the first folder in which calls look for tiles, for results. Raises ValueError if calls use no
    measured tiles."""
    if CONFIG_DIR.read() == "-":
        raise ValueError(
            "TRITONCP_CONFIG_DIR=-: calls use no measured tiles; pass --out with a folder for the results, "
            "or unset the variable"
        )
    return folders()[0]


def path_in(folder: Path, device: Device, triton: str | None = None) -> Path:
    """Return the path of a device's file of tile shapes.

    >>> path_in(Path("x"), Device("sm_90", "NVIDIA H200"), "3.7.1").as_posix()
    'x/sm_90/nvidia-h200-triton-3.7.1.json'
    """
    version = triton or installed_version("triton") or "none"
    return folder / device.arch / f"{slug(device.name)}-triton-{version}.json"


def sources(device: Device) -> Iterator[Path]:
    """Yield the existing files with tile shapes for a device, in order of preference."""
    exact = [path_in(folder, device) for folder in folders()]
    yield from (path for path in exact if path.is_file())
    own = exact[0].name.partition("-triton-")[0] if exact else ""
    for folder in folders():
        paths = [path for path in sorted((folder / device.arch).glob("*.json")) if path not in exact]
        yield from sorted(paths, key=lambda path: path.name.partition("-triton-")[0] != own)


def read(path: Path) -> Entries:
    """Read the entries of a file. Raises ValueError for a file that ``tritoncp autotune`` did not write."""
    try:
        entries = parse_json(path.read_bytes())["entries"]
        for entry in entries:
            check_entry(entry)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {str(error)[:300]}"
        raise ValueError(
            f"{path} is not a file of tritoncp autotune and is ignored ({why}): remove it, or run tritoncp "
            "autotune again"
        ) from error
    return entries


def entries_of(path: Path) -> Entries:
    """Read the entries of a file; for an unusable file, warn and return no entries."""
    try:
        return read(path)
    except ValueError as error:
        warnings.warn(str(error), stacklevel=2)
        return []


def entry_key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key of an entry: kernel, dtype, head dims, mask, and score as in ``tile_lookup.TileKey``.

    >>> entry_key({"kernel": "dq", "dtype": "float16", "head_dim": 64, "mask": "causal", "score": "softcap"})
    ('dq', 'float16', 64, 64, 'causal', 1)
    """
    dim = entry["head_dim"]
    first = entry["kernel"], entry["dtype"], dim, entry.get("v_head_dim", dim)
    return *first, entry["mask"], max(1, entry.get("loads", 0)) if entry.get("score") else 0


def kernel_and_tiles(kernel: str, config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return (kernel, tiles) of an entry; a config may name the kernel of a route.

    >>> kernel_and_tiles("route", {"ROUTE": "gluon", "num_stages": 3})
    ('gluon', {'num_stages': 3})
    >>> kernel_and_tiles("dq", {"num_stages": 2})
    ('dq', {'num_stages': 2})
    """
    if kernel != "route":
        return kernel, dict(config)
    route, tiles = config["ROUTE"], {name: value for name, value in config.items() if name != "ROUTE"}
    return "forward" if route == ROUTES[0] else route, tiles


def check_entry(entry: Mapping[str, Any]) -> None:
    """Raise ValueError, KeyError or TypeError for an invalid entry."""
    if entry["kernel"] == "route":
        check_options({"ROUTE": entry["config"]["ROUTE"]})
    kernel, tiles = kernel_and_tiles(entry["kernel"], entry["config"])
    check_options({"CONFIGS": ((kernel, tuple(tiles.items())),)})
    _, dtype, *dims, mask, _ = entry_key(entry)
    if not isinstance(getattr(torch, dtype), torch.dtype) or mask not in (*NEAREST_KIND, "window"):
        raise ValueError(f"an entry has dtype {dtype!r} and mask {mask!r}, of which one is unknown")
    for dim, of_values in zip(dims, (False, True), strict=True):
        if type(dim) is not int or (fault := head_dim_fault(dim, of_values)):
            raise ValueError(f"an entry has head dims {dims}; whole numbers are needed, of which {fault}")


@functools.lru_cache(maxsize=16)
def table(device: Device, config_dir: str | None) -> Table:
    """Return all configs for a device; the first of entries with equal keys counts. config_dir: the current
    TRITONCP_CONFIG_DIR. Plans use the tiles that they looked up until :func:`forget`."""
    configs_by_key: Table = {}
    paths = list(sources(device))
    origin = f"files {', '.join(map(str, paths))}" if paths else "no file, the rule chooses them"
    log_decision(tiles_log, "measured tiles of %s (%s): %s", device.name, device.arch, origin)
    exact = path_in(Path(), device).name
    for path in paths:
        for entry in entries_of(path):
            if path.name == exact or entry["kernel"] != "route":
                configs_by_key.setdefault(entry_key(entry), entry["config"])
    return configs_by_key


table_generation = 0  # incremented by forget(), after which tiles are looked up again


def forget() -> None:
    """Drop the cached tables, after files were written."""
    global table_generation
    table_generation += 1
    table.cache_clear()


def write(
    folder: Path,
    device: Device,
    entries: Entries,
    facts: Mapping[str, Any],
    triton: str | None = None,
) -> Path:
    """Write entries into the device's file; they replace entries with the same key. The file is replaced
    atomically, under a lock, so that no entry of another writer is lost.

    facts: further fields of the file's header; triton: version with which the entries were measured, default:
    the installed one. Raises the errors of :func:`locked`.
    """
    path = path_in(folder, device, triton)
    version = triton or installed_version("triton") or "none"
    header = {"device": device.name, "arch": device.arch, "triton": version, **facts}
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with locked(path, LOCK_SECONDS):
        old = entries_of(path) if path.is_file() else []
        merged = {entry_key(entry): entry for entry in [*old, *entries]}
        lines = ",\n".join(json.dumps(entry) for entry in merged.values())
        try:
            temporary.write_text(f'{json.dumps(header)[:-1]}, "entries": [\n{lines}\n]}}\n')
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    forget()
    return path


@contextlib.contextmanager
def locked(path: Path, seconds: float) -> Iterator[None]:
    """Hold the lock of a file of tile shapes (``<file>.lock`` beside it), to read and replace the file.

    Raises TimeoutError if another process holds it for more than ``seconds``, OSError if the folder is not
    writable or its filesystem has no locks.
    """
    from filelock import FileLock, Timeout

    name = path.with_name(f"{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(name).acquire(timeout=seconds)
    except Timeout as error:
        raise TimeoutError(
            f"{path} is not written: another process (tritoncp autotune, or a program with "
            f"TRITONCP_AUTOTUNE) has held the lock {name} for {seconds:g} s; wait for it or end it, then run "
            "again"
        ) from error
    except OSError as error:
        raise OSError(
            error.errno,
            f"{path} is not written: {name} cannot be locked ({error.strerror}); make the folder writable, "
            "on a filesystem with locks, or name another one with --out or TRITONCP_CONFIG_DIR",
        ) from error
    with lock:
        yield

"""Look-up of measured tile shapes for a call, in the table of its device.

Every rank reads the files of its host: tile shapes change no messages, and results only by rounding.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tritoncp.core import environment
from tritoncp.core.log_lines import area_logger, log_decision
from tritoncp.kernels.options import ROUTES
from tritoncp.kernels.tile_rules import KINDS, PASSES
from tritoncp.masks.mask import Mask
from tritoncp.measured_tiles import tile_tables
from tritoncp.measured_tiles.tile_tables import Device, Table

tiles_log = area_logger("tiles")
# The masks with which tile shapes are measured (names of tritoncp.perf.problem.MASKS), and the kind of mask
# that uses the result.
MEASURED_KINDS = {"causal": "causal", "full": "full", "document": "interval", "window": "window"}
FEW_ROWS_KIND = "full"  # the only kind measured for few query rows: nearly all their tiles are full


class TileKey(NamedTuple):
    """The key of measured tile shapes: dtype, head dims, kind of mask and of score_mod, for all lengths.

    dims: head dim of q and k, and of v; mask: see :func:`kind_of`; score: 0 without a score_mod, 2 if it
    loads a value for each score, else 1
    """

    dtype: str
    dims: tuple[int, int]
    mask: str
    score: int

    @classmethod
    def of(cls, dtype: torch.dtype, dims: tuple[int, int], mask: str, score: int = 0) -> TileKey:
        return cls(str(dtype).removeprefix("torch."), dims, mask, score)


def kind_of(mask: Mask, mod: bool = False) -> str:
    """Classify a mask into the kinds that tile shapes are measured for.

    mod: whether its mask_mod runs in the kernel

    >>> from tritoncp import causal, create_block_mask, document, sliding_window
    >>> masks = causal(), sliding_window(8), document(lengths=[40, 24])
    >>> [kind_of(create_block_mask(mask, 1, 1, 64, 64)) for mask in masks]
    ['causal', 'window', 'interval']
    """
    if mod:
        return "mod"
    if mask.window is not None:
        return "causal" if min(mask.window) < 0 else "window"
    return "full" if mask.mask_mod is None else "interval"


def local_table(device: torch.device) -> Table:
    """Return the table of a device from this process's files."""
    return tile_tables.table(tile_tables.device_of(device), environment.CONFIG_DIR.read())


def choose_tiles(table: Table, dtype: str, dims: tuple[int, int], mask: str, score: int) -> tuple[Any, ...]:
    """Choose measured tiles for one call from a table: (kernel, items of its config) of each kernel.

    If no entry equals the call, entries are preferred by the same use of a score_mod (required if it loads a
    value for each score), then by the same head dims over larger ones, then by the same kind of mask over the
    nearest kind. A route needs an entry that equals the call.
    """
    nearest = tile_tables.NEAREST_KIND.get(mask, "")
    masks = list(dict.fromkeys([mask, nearest, tile_tables.NEAREST_KIND.get(nearest)]))
    widest = (max(dims),) * 2
    tiles_by_kernel: dict[str, tuple[Any, ...]] = {}
    for candidate in itertools.product(((0,), (1, 0), (2,))[score], (dims, widest), masks):
        measured_score, widths, kind = candidate
        for kernel in KINDS:
            measured_kind = FEW_ROWS_KIND if kernel == "few" else kind
            key = kernel, dtype, *widths, measured_kind, measured_score
            if key in table:
                tiles_by_kernel.setdefault(kernel, tuple(table[key].items()))
    config = table.get(("route", dtype, *dims, mask, score), {})
    if config.get("ROUTE", ROUTES[0]) != ROUTES[0]:
        kernel, tiles = tile_tables.kernel_and_tiles("route", config)
        tiles_by_kernel |= {kernel: tuple(tiles.items()), "route": (("ROUTE", kernel),)}
    return tuple(tiles_by_kernel.items())


def measured_options(device: torch.device, call: TileKey) -> dict[str, Any]:
    """Return engine options with the measured tiles of a call: {"CONFIGS": ...}, or {} without any."""
    tiles = choose_tiles(local_table(device), *call)
    if not has_pass_tiles(tiles):
        _warn_untuned(device)
    _log_tiles(device, call, tiles)
    return {"CONFIGS": tiles} if tiles else {}


def _log_tiles(device: torch.device, call: TileKey, tiles: tuple[Any, ...]) -> None:
    """Log which kernels of a call have measured tiles."""
    if tiles_log.isEnabledFor(logging.INFO):
        kernels = ", ".join(kernel for kernel, _ in tiles)
        origin = f"measured tiles for {kernels}, the rule for others" if tiles else "tiles by the rule"
        line = "%s, %s, head dims %d and %d, mask of kind %s: %s"
        log_decision(tiles_log, line, device, call.dtype, *call.dims, call.mask, origin)


def has_pass_tiles(tiles: tuple[Any, ...]) -> bool:
    """Return whether any of these tiles are for a pass over many query rows."""
    return any(kernel in PASSES for kernel, _ in tiles)


WARNED_DEVICES: set[Device] = set()


def _warn_untuned(device: torch.device) -> None:
    """Warn once per GPU model, on rank 0, that no tile shapes were measured for it."""
    if device.type == "cpu" or environment.CONFIG_DIR.read() == "-":
        return
    model = tile_tables.device_of(device)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if model in WARNED_DEVICES or rank:
        return
    WARNED_DEVICES.add(model)
    warnings.warn(
        f"tile shapes for {model.name} ({model.arch}) were not tuned, so that built-in defaults are used: "
        "run `tritoncp autotune --preset llama3-8b` once, or with the --shapes of your model; "
        "TRITONCP_AUTOTUNE=1 tunes for a minute at the first call of a kind, and TRITONCP_CONFIG_DIR=- uses "
        "the defaults without this warning",
        stacklevel=2,
    )

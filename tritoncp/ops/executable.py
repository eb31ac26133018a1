"""The executable of a call: its engine, its mask_mod on the device and its launches, found by one look-up.

All caches of the process on the path of a call are listed here, with what bounds them and their keys. Two
rules hold: a :class:`~tritoncp.core.bounded_cache.BoundedCache` (or an lru_cache) evicts its least recently
used entry, and state "of" a plan, a group or a mask is freed with it
(:class:`~tritoncp.core.owned_state.OwnedState`). A plan stands there for ``plan.derived``, which the views of
all ranks share.

Found once a call:
    frontend.mask_source._CONSTANT_SOURCES
        one of a mask; the mask
    frontend.plan_cache._CACHES
        of a group: 64 plans and 1 GiB; code, plain values and lengths of a mask. An entry serves the same
        tensors, unedited
    frontend.plan_cache._CHECKED
        of a plan: 1024 calls that passed their checks; rank, shapes, dtypes, devices, flags
    frontend.dynamo._MASKS
        8 masks made in a graph; code and plain values of the mask_mod, sizes
    mods.mod._TRANSLATIONS
        256 mods; code and plain values of a function, dtype
    ops.executable._CACHES
        of a plan: 256 executables, see :func:`tritoncp.ops.engine_factory.engine_of` for the key, each with
        1024 launches by kernel, tables, first head and flags; 64 mask_mods by ranks, batch rows, heads and
        device; 16 structures by schedule; 1024 counts of visible pairs by rank, batch rows and heads
    ops.signatures._TABLES
        of a group: 1024 signatures that ranks compared, with 16 scales each, and 1024 plans
    ops.engine_factory.encoded
    ops.engine_factory.decode
        256 specs; their fields, or their text
    ops.graph.inputs._parsed
        256 structures; their text
    planning.derived (of a plan, in the plan)
        one result for each rank, buffer of keys and device, and 64 plans of batch rows
    distributed.schedules.head_exchange._EXCHANGES
        of a plan: 64 exchanges; rank, schedule, degree, heads
    distributed.schedules.ulysses.stretches
        256 cuts of heads; heads of a rank, size of a group
    api.varlen._ROUTES
        64 routes; an unedited tensor of lengths, ranks, device

Read where an executable is made:
    kernels.options._chosen
        1024 configs; kernel, architecture, options
    kernels.route_check._VERDICTS
        256 kinds of steps, the oldest are evicted; kernels, dtypes, flags
    kernels.options.option_names
    kernels.tile_rules.pieces
    kernels.toolchain._version
    kernels.toolchain._numbers
    ops.tile_tables.device_of
        few by their nature: kinds of passes, head dims, compilers, devices
    ops.tile_tables.table
        16 tables; device, TRITONCP_CONFIG_DIR
    ops.tile_lookup._SHARED_TABLES
        of a group: its text of measured tiles
    ops.tile_lookup.choose_tiles
        256 choices; text of a table, dtype, dims, mask, score
    mods.bytecode._READS
        4096 codes, all are dropped where it is full; the code
    mods.replace_captures.code_names
        4096 codes; the code
    mods.translate.graph_passes.decompositions
        one table

Registers, which hold what lives for another reason:
    core.handles._HELD
        objects that a tensor names, freed with the tensor
    distributed.groups._CONTROLS
    distributed.groups._COMPANIONS
    distributed.groups._CONNECTED
        communicators of a group
    mods.mod._STRUCTURES
    mods.source_cache._MODULES
        mods and their modules, freed with the last mod of a structure
    mods.source_cache._PRIVATE_DIRECTORIES
    mods.source_cache._WRITES
        folders of generated code
    ops.graph.inputs._LAYOUTS
        one layout
    ops.graph.layouts.CONSTANTS
    ops.graph.layouts._NUMBERS
        objects that compiled graphs name by number
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritoncp.core.bounded_cache import BoundedCache
from tritoncp.core.owned_state import OwnedState
from tritoncp.core.upload import DeviceCopy, upload
from tritoncp.mods import Mod
from tritoncp.mods.mod import arguments
from tritoncp.planning.plan import Plan

MAX_EXECUTABLES = 256  # of one plan
MAX_LAUNCHES = 1024  # of one executable
MAX_MASK_MODS = 64  # copies of a plan's mask_mod, for ranks, batch rows, heads and devices
MAX_STRUCTURES, MAX_COUNTS = 16, 1024


@dataclass(frozen=True, eq=False)
class Executable:
    """What all calls of one signature under a plan share.

    engine:   the TritonEngine, without the captures of the score_mod, with its cache of launches
    mask_mod: the mask_mod whose captures the engine reads, on the device
    """

    engine: Any
    mask_mod: DeviceCopy[Mod] | None

    def bind(self, score: Mod | None, device: torch.device, grads: Sequence[Tensor]) -> Any:
        """Return the engine with the captures of one call. ``grads``: a buffer for each capture that requires
        a gradient."""
        if self.mask_mod is not None:
            self.mask_mod.on_current_stream()  # the engine reads its tensors on this stream
        if score is None or not (score.tensors or score.numbers):
            return self.engine
        caps = arguments(upload(score.tensors, device), score.numbers)
        return self.engine.with_captures(caps, score.dcaps(grads) if grads else ())


class PlanCaches:
    """What is cached for one plan, for all ranks' views of it."""

    def __init__(self) -> None:
        self.executables: BoundedCache[Any, Executable] = BoundedCache(MAX_EXECUTABLES)
        self.mask_mods: BoundedCache[Any, tuple[DeviceCopy[Mod] | None]] = BoundedCache(MAX_MASK_MODS)
        self.structures: BoundedCache[Any, Any] = BoundedCache(MAX_STRUCTURES)
        self.visible_pairs: BoundedCache[Any, int] = BoundedCache(MAX_COUNTS)


_CACHES = OwnedState(PlanCaches)


def caches_of(plan: Plan) -> PlanCaches:
    """Return the caches of a plan."""
    return _CACHES.of(plan.derived)

"""The executable of a call: its engine, its mask_mod on the device and its launches, found by one look-up.

All caches of the process are listed here, with bound and key. Two rules hold: a full cache evicts the entry
that was not used for longest, as an lru_cache does, and state "of" a plan, group or mask is freed with it
(:mod:`tritoncp.core.bounded_cache`). A plan stands for ``plan.derived``, which all ranks' views share.

    core.log_lines._LOGGED: 4096; the lines that were logged at INFO
    core.versions.warn_untested: once; the versions of this process
    api.mask_source._CONSTANT_SOURCES: one of a mask; the mask
    api.plan_cache._CACHES: of a group, 64 plans, 1 GiB; code, plain values, lengths, tensors of a mask
    api.plan_cache._CHECKED: of a plan, 1024 calls; rank, shapes, dtypes, devices, flags
    api.dynamo._MASKS: 8; code, plain values and tensors of the mask_mod, sizes
    mods.mod._TRANSLATIONS: 256; code and plain values of a function, dtype
    mods.bytecode._READS: 4096; a code object
    mods.translate.graph_passes.decompositions: one table
    ops.executable._CACHES: of a plan, see :class:`PlanCaches`
    ops.signatures._TABLES: of a group, 1024 signatures with 16 scales each, 1024 plans; what ranks share
    ops.call.encode_spec, ops.call.decode_spec: 256; the fields of a spec, its text
    ops.graph.inputs._parsed: 256; the text of a structure
    ops.graph.layouts._CONSTANTS, ops.graph.layouts._NUMBERS: 32768; an object that compiled graphs name
    ops.tile_tables.device_of: 64; a device
    ops.tile_tables.table: 16; device, TRITONCP_CONFIG_DIR
    ops.tile_lookup.choose_tiles: 256; text of a table, dtype, dims, mask, score
    planning.derived: of a plan, a result for each rank, buffer and device, and 64 plans of batch rows
    distributed.schedules.head_exchange._EXCHANGES: of a plan, 64; rank, schedule, degree, heads, each with
        64 layouts of messages by batch rows, channels and dtypes
    distributed.schedules.ulysses.stretches: 256; heads of a rank, size of a group
    api.varlen._ROUTES: 64; a tensor of lengths, ranks, device
    kernels.options._chosen: 1024; kernel, architecture, options
    kernels.options.option_names: passes, of which few exist
    kernels.toolchain._version, kernels.toolchain._numbers: 128; a compiler
    kernels.route_check._VERDICTS: 256, the oldest is evicted; kernels, dtypes, flags of a step

Not caches, but registers, whose entries live as long as what they name:

    core.handles._HELD: objects, by the tensors that name them
    distributed.failures._RECORDS, distributed.groups._COMPANIONS, distributed.groups._CONNECTED: of a group
    mods.mod._STRUCTURES, mods.source_cache._MODULES: structures of mods and their modules, by digest
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tritoncp.core.bounded_cache import BoundedCache, OwnedState
from tritoncp.core.upload import DeviceCopy
from tritoncp.mods import Mod
from tritoncp.planning.plan import Plan

MAX_EXECUTABLES = 256  # of one plan
MAX_LAUNCHES = 1024  # of one executable
MAX_MASK_MODS = 64  # copies of a plan's mask_mod, for ranks, batch rows, heads and devices
MAX_STEPS = 256  # of the CPU engine, for one plan
MAX_STRUCTURES, MAX_COUNTS = 16, 1024


@dataclass(frozen=True, eq=False)
class Executable:
    """The parts that all calls of one signature under a plan share.

    engine:   the TritonEngine, without the captures of the score_mod, with its cache of launches
    mask_mod: the mask_mod whose captures the engine reads, on the device
    """

    engine: Any
    mask_mod: DeviceCopy[Mod] | None


class PlanCaches:
    """The caches of one plan, for all ranks' views of it.

    executables:   by what :func:`tritoncp.ops.engine_factory.engine_of` lists, each with MAX_LAUNCHES
                   launches by kernel, tables, first head and flags
    mask_mods:     by ranks, batch rows, heads and device
    cpu_steps:     steps of the CPU engine, by tables, shapes, first row and head
    structures:    by schedule and degree
    visible_pairs: counts by rank, batch rows and heads
    """

    def __init__(self) -> None:
        self.executables: BoundedCache[Any, Executable] = BoundedCache(MAX_EXECUTABLES)
        self.mask_mods: BoundedCache[Any, tuple[DeviceCopy[Mod] | None]] = BoundedCache(MAX_MASK_MODS)
        self.cpu_steps: BoundedCache[Any, Any] = BoundedCache(MAX_STEPS)
        self.structures: BoundedCache[Any, Any] = BoundedCache(MAX_STRUCTURES)
        self.visible_pairs: BoundedCache[Any, int] = BoundedCache(MAX_COUNTS)


_CACHES = OwnedState(PlanCaches)


def caches_of(plan: Plan) -> PlanCaches:
    """Return the caches of a plan."""
    return _CACHES.of(plan.derived)

"""Caches of a plan for its execution: engines with their launches, mask_mods on devices, steps of the CPU
engine.

They belong to ``plan.derived``, which the views of all ranks share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tritoncp.core.bounded_cache import BoundedCache
from tritoncp.core.upload import DeviceCopy
from tritoncp.mods import Mod
from tritoncp.planning.plan import Plan

if TYPE_CHECKING:
    from tritoncp.call.facts import Facts  # late: it imports this module
    from tritoncp.kernels.engine import TritonEngine  # late: it imports all kernels

MAX_EXECUTABLES = 256  # max executables of one plan
MAX_LAUNCHES = 1024  # max launches of one executable
MAX_MASK_MODS = 64  # max copies of a plan's mask_mod, for ranks, batch rows, heads and devices
MAX_STEPS = 256  # max steps of the CPU engine, for one plan
MAX_CHECKED_CALLS = 1024
MAX_STRUCTURES = 16


@dataclass(frozen=True, eq=False)
class Executable:
    """The engine and mask_mod that all calls of one plan and :class:`tritoncp.call.facts.EngineKey` share.

    engine:   the TritonEngine with its cached launches, without the captures of the score_mod
    mask_mod: the translated mask_mod with its captures on the device
    """

    engine: TritonEngine
    mask_mod: DeviceCopy[Mod] | None


class PlanCaches:
    """The caches of one plan, shared by the views of all ranks.

    executables:   by :class:`tritoncp.call.facts.EngineKey`, each with up to MAX_LAUNCHES
                   launches by kernel, tables, first head and flags
    mask_mods:     by ranks, batch rows, heads and device
    cpu_steps:     steps of the CPU engine, by tables, shapes, first row and head
    structures:    by schedule and degree
    checked_calls: keys of the calls whose shards have the plan's sizes
    visible_keys:  look-ups of pairs for selected keys, by first row, device and mask_mod
    facts:         by kind of call and its parts, see :func:`tritoncp.call.facts.with_facts`
    """

    def __init__(self) -> None:
        self.executables: BoundedCache[Any, Executable] = BoundedCache(MAX_EXECUTABLES)
        self.mask_mods: BoundedCache[Any, tuple[DeviceCopy[Mod] | None]] = BoundedCache(MAX_MASK_MODS)
        self.cpu_steps: BoundedCache[Any, Any] = BoundedCache(MAX_STEPS)
        self.structures: BoundedCache[Any, Any] = BoundedCache(MAX_STRUCTURES)
        self.visible_keys: BoundedCache[Any, Any] = BoundedCache(MAX_STRUCTURES)
        self.checked_calls: set[Any] = set()  # no cache, whose look-up takes three times as long
        self.facts: BoundedCache[Any, Facts] = BoundedCache(MAX_CHECKED_CALLS)


def caches_of(plan: Plan) -> PlanCaches:
    """Return the caches of a plan."""
    caches = plan.derived.caches
    own: PlanCaches | None = caches.get(PlanCaches)
    return caches.setdefault(PlanCaches, PlanCaches()) if own is None else own

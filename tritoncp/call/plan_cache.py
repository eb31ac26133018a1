"""Cache of the plans of raw masks: a plan is made once and reused until its mask changes.

A plan is reused while the mask has the same code, plain values and lengths, and the same tensor objects,
unedited, see :class:`tritoncp.core.bounded_cache.TensorCache`; writes through ``.data`` or NumPy are not
detected.

Making a plan for a group is a collective operation, so a look-up has to hit on all ranks or miss on all.
Therefore every group has a separate cache, which only calls on that group change. Plans are evicted in the
order of calls, by the number of plans and the bytes of their masks and placements, which are equal on all
ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tritoncp.call import check_shards, prepare
from tritoncp.call.check_arguments import MAX_CHECKED_CALLS
from tritoncp.call.mask_source import MaskState, RawMask, Sources
from tritoncp.call.read import Arguments, ShardSizes
from tritoncp.core.bounded_cache import OwnedState, TensorCache
from tritoncp.core.caller import warn_caller
from tritoncp.core.host_copy import on_host
from tritoncp.core.log_lines import area_logger, log_decision
from tritoncp.core.records import replace
from tritoncp.distributed import consistency, groups
from tritoncp.distributed.consistency import fact
from tritoncp.masks.mask_mod import name_of
from tritoncp.masks.traced_mask import plain_mask
from tritoncp.mods.user_code import describe
from tritoncp.planning.build import build as build_plan
from tritoncp.planning.derived import PlanCache
from tritoncp.planning.plan import Plan
from tritoncp.report.text import format_title

MAX_PLANS = 64  # max plans per group, and of calls without a group
MAX_BYTES = 1 << 30  # max bytes of their masks and placements
MAX_NAME = 200  # max characters of a mask_mod in a log line
WARN_IMBALANCE = 1.2  # above this max/mean work, natural order causes a warning


class CacheInfo(NamedTuple):
    """Counts of the plan cache since the last `plan_cache_clear`, summed over groups and calls without one,
    and the limits of each group's cache."""

    hits: int
    misses: int
    plans: int  # plans that are in the cache now
    nbytes: int  # bytes of their masks and placements
    most: int  # max plans that a cache keeps
    most_bytes: int


_CACHES = OwnedState(lambda: TensorCache(MAX_PLANS, lambda entry: entry[0].nbytes, MAX_BYTES))
_COUNTS = {"hits": 0, "misses": 0}
plan_log, cache_log = area_logger("plan"), area_logger("cache")
# Keys of the calls whose shards have the sizes of a plan; no BoundedCache, whose look-up takes three times as
# long.
_CHECKED_CALLS: PlanCache[set[Any]] = PlanCache(set)
_WARNED: set[Any] = set()  # (name of a mask_mod, number of ranks) with a warning about uneven work


def find_plan(call: Arguments) -> Plan:
    """Return the plan of a checked call, and check that its shards lie in the plan's order."""
    kind = call.kind
    assert kind is not None
    group, key = kind.ranks and kind.ranks(), kind if kind.is_kept else None
    plan = plan_for(current_mask(call.block_mask), kind.sizes, group, key, call.batch_offset)
    check_shards.check_order(plan, call.positions)
    return plan


def current_mask(block_mask: Any) -> Any:
    """Return the mask or Plan that a call was given. Raises RuntimeError for a Plan if state that its
    mask_mod reads has changed since the mask was made; :meth:`MaskState.of` reads the state of other
    masks."""
    mask = plain_mask(block_mask)
    if isinstance(mask, Plan):
        mask.check_sources()
    return mask


def plan_for(
    mask: RawMask | Plan,
    sizes: ShardSizes,
    group: Any,
    call_key: Any = None,
    batch_offset: int | None = None,
) -> Plan:
    """Return the plan of a call, after a check of the shards' sizes: ``mask`` itself if it is a Plan, else
    the natural-order plan of the raw mask, from the cache or new.

    mask: result of :func:`current_mask`

    call_key: hashable; a plan checked once for a key is not checked again for it
    batch_offset: batch row of the mask for row 0 of the shards (None: the shards have all rows)
    """
    if batch_offset is not None:
        rows = check_shards.whole_batch(mask, sizes.batch, batch_offset)
        whole = plan_for(mask, sizes._replace(batch=rows), group, call_key)
        return whole.batch_rows(batch_offset, sizes.batch)
    if isinstance(mask, Plan):
        _check_call(mask, sizes, group, call_key)
        return mask
    state, cache = MaskState.of(mask), _CACHES.of(group)
    layer = sizes.layer
    key = state.key, sizes.rows, sizes.kv_rows, sizes.batch, layer and tuple(layer.items())
    plan = cache.find(key, state.tensors)
    _COUNTS["misses" if plan is None else "hits"] += 1
    if cache_log.isEnabledFor(logging.DEBUG if plan is not None else logging.INFO):
        _log_look_up(Sources.of(mask, state), plan is not None)
    if plan is None:
        sources = Sources.of(mask, state)
        plan = _make(sources, sizes, group)
        if state.key is None:
            sources.warn_incomparable()
        else:
            cache.keep(key, state.tensors, plan)
    _check_call(plan, sizes, group, call_key)
    return plan


def _check_call(plan: Plan, sizes: ShardSizes, group: Any, call_key: Any) -> None:
    """Check the shards of a call against its plan, unless a call with the same key passed the check. (Rows
    of a raw mask are checked as its plan is made, by `check_shards.check_shard_lengths`.)"""
    checked, key = _CHECKED_CALLS.of(plan.derived), (plan.rank, call_key)
    if key not in checked or call_key is None:
        check_shards.check_ranks(plan, group)
        check_shards.check_sizes(plan, sizes)
        if len(checked) >= MAX_CHECKED_CALLS:
            checked.clear()
        checked.add(key)


def plan_cache_info() -> CacheInfo:
    """Return hits, misses, number of plans and bytes of the cache for the plans of raw masks.

    If every training step has a new mask, every look-up is a miss: make the plans with `make_plan`, in the
    data loader's workers.

    >>> import torch, tritoncp
    >>> tritoncp.plan_cache_clear()
    >>> q = k = v = torch.randn(1, 1, 64, 16)
    >>> mask = tritoncp.causal()
    >>> for _ in range(3):
    ...     out = tritoncp.flex_attention(q, k, v, mask)
    >>> info = tritoncp.plan_cache_info()
    >>> info.hits, info.misses, info.plans
    (2, 1, 1)
    """
    plans = [plan for cache in _CACHES.values() for plan, _ in cache.values()]
    total = sum(plan.nbytes for plan in plans)
    return CacheInfo(**_COUNTS, plans=len(plans), nbytes=total, most=MAX_PLANS, most_bytes=MAX_BYTES)


def plan_cache_clear() -> None:
    """Empty the cache for the plans of raw masks and reset its counts. Call it on all ranks of a group."""
    _CACHES.clear()
    _COUNTS.update(hits=0, misses=0)


@on_host
def _make(sources: Sources, sizes: ShardSizes, group: Any) -> Plan:
    """Exchange the lengths of the shards and make the plan of a raw mask (collective over the group)."""
    call = "flex_attention, which makes the plan of a raw mask"

    def compare_shapes() -> tuple[None, consistency.Compared, Sequence[int]]:
        same = {
            "call": fact(call),
            "versions": consistency.versions(),
            "batch": fact(f"batch {sizes.batch}"),
            "heads": fact(f"{sizes.heads} query heads and {sizes.kv_heads} key heads"),
            "head dims": fact(f"head dim {sizes.dim}"),
            "selected keys": fact(f"{sizes.selected or 'all'} keys of a query"),
        }
        return None, same, (sizes.rows, sizes.kv_rows)

    _, rows = consistency.together(group, call, compare_shapes)
    lengths, kv_lengths = map(list, zip(*rows, strict=True))
    rank = 0 if group is None else group.rank()

    def build() -> tuple[Plan, consistency.Compared, Sequence[int]]:
        digest = sources.digest() if group else b""
        result = plan_in_order(sources, sizes, lengths, kv_lengths, rank, digest)
        mask_fact = fact(lambda: prepare.mask_text(result.mask), digest)
        return result, {"call": fact(call, b"building"), "mask": mask_fact}, ()

    result, _ = consistency.together(group, call, build)
    connect_new_plans(group, [result])
    return result


def connect_new_plans(group: Any, plans: Iterable[Plan]) -> None:
    """Record that the group's ranks have compared new plans, and make its data communicator."""
    if group is None:
        return
    table = prepare.table_of(group)
    for one in plans:
        table.plans[one.identity] = True
    groups.connect_data(group)


def plan_in_order(
    sources: Sources, sizes: ShardSizes, lengths: Sequence[int], kv_lengths: Sequence[int], rank: int = 0,
    digest: bytes = b"",
) -> Plan:  # fmt: skip
    """Make the plan of a raw mask whose ranks hold pieces of these lengths, in order."""
    mask = sources.compact(sizes.batch, sum(lengths), sum(kv_lengths))
    heads = sizes.heads, sizes.kv_heads
    check_shards.check_shard_lengths(lengths, kv_lengths, mask.q_len, mask.kv_len, heads)
    natural_plan = build_plan(
        mask, len(lengths), rank, balancer=None, lengths=lengths, kv_lengths=kv_lengths, layer=sizes.layer
    )
    _warn_uneven(sources, natural_plan)
    log_plan(sources, natural_plan)
    return replace(natural_plan, mask_digest=digest).pinned()


def _log_look_up(sources: Sources, is_hit: bool) -> None:
    """Log a look-up in the cache of plans: a miss as a decision, a hit at DEBUG."""
    line = f"plan cache: {'hit' if is_hit else 'miss'}, mask {_mask_text(sources)}"
    cache_log.debug(line) if is_hit else log_decision(cache_log, line)


def log_plan(sources: Sources, plan: Plan) -> None:
    """Log the placement, schedule and balance of a new plan."""
    if plan_log.isEnabledFor(logging.INFO):
        title = format_title(plan).removeprefix("Plan: ")
        line = "mask %s, %s; work of a rank, max/mean %.3f"
        log_decision(plan_log, line, _mask_text(sources), title, plan.imbalance)


def _mask_text(sources: Sources) -> str:
    """Return a mask_mod as it was written, or its name, for log lines."""
    return "none" if sources.mod is None else name_of(sources.mod)[:MAX_NAME]


def _warn_uneven(sources: Sources, natural: Plan) -> None:
    """Warn about uneven work: on the first rank, once per mask_mod name and number of ranks."""
    warning_key = describe(sources.mod), natural.world_size
    if natural.rank or natural.imbalance <= WARN_IMBALANCE or warning_key in _WARNED:
        return
    _WARNED.add(warning_key)
    busiest = max(range(natural.world_size), key=natural.work.__getitem__)
    warn_caller(
        f"block_mask without a plan: in natural order rank {busiest} of {natural.world_size} does "
        f"{natural.imbalance:.2f} times the mean work. Two lines balance it:\n"
        "    plan = tritoncp.make_plan(block_mask, mesh)\n"
        "    q, k, v = (tritoncp.shard(x, plan, dim=2) for x in (q, k, v))  # of the global tensors\n"
        "and flex_attention(q, k, v, plan, mesh) in place of the mask."
    )

"""Cache of the plans of raw masks: each is made once, reused, and never stale.

A plan is reused while the mask has the same code, plain values and lengths, and the very same tensors,
unedited. Tensors are compared by weak references (a freed id is reused for another tensor) and by their
version counters; writes through ``.data`` or NumPy are not noticed.

Making a plan for a group communicates. So every group has a cache of its own, which other calls of this
process do not touch, and eviction is in call order, by the number of plans and the bytes of their masks and
placements, which are equal on every rank: all ranks reuse a plan, or all make one.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tritoncp.core.host_copy import on_host
from tritoncp.distributed import collectives, consistency
from tritoncp.distributed.consistency import fact
from tritoncp.frontend import validate
from tritoncp.frontend.mask_source import RawMask, Sources
from tritoncp.frontend.validate import check_lengths, check_plan, check_plannable
from tritoncp.masks.mask import Mask
from tritoncp.mods.captures import describe
from tritoncp.ops import signatures, tile_tables
from tritoncp.planning import plan
from tritoncp.planning.balance import Balancer, find
from tritoncp.planning.plan import Plan

MOST = 64  # plans of a group, or of calls without one
MOST_BYTES = 1 << 30  # of their masks and placements
UNEVEN = 1.2  # of the mean work on one rank: natural order is then worth a warning


@dataclass(frozen=True)
class Entry:
    plan: Plan
    tensors: tuple[weakref.ref[Tensor], ...]
    versions: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.plan.mask.nbytes + self.plan.q.nbytes + self.plan.kv.nbytes

    def serves(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the very tensors the plan was made from, unedited since."""
        for ref, version, t in zip(self.tensors, self.versions, tensors, strict=True):
            if ref() is not t or t._version != version:
                return False
        return True


class PlanCache:
    """Plans of one group, or of calls without one, in order of their last use."""

    def __init__(self) -> None:
        self.entries: OrderedDict[Any, Entry] = OrderedDict()
        self.lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in list(self.entries.values()))

    def serving(self, key: Any, tensors: Sequence[Tensor]) -> Entry | None:
        """The entry for a mask made of these tensors."""
        entry = self.entries.get(key)
        return entry if entry is not None and entry.serves(tensors) else None

    def holds(self, source_key: Any) -> bool:
        """Whether a mask of this key has a plan, for shards of any lengths."""
        return any(key[0] == source_key for key in list(self.entries))

    def renew(self, key: Any) -> None:
        """Note a use of the plan, which is now evicted last."""
        with self.lock:
            if key in self.entries:
                self.entries.move_to_end(key)

    def keep(self, key: Any, entry: Entry) -> None:
        """Add a plan, and evict the least recently used ones. One plan is kept, however large it is."""
        with self.lock:
            self.entries[key] = entry
            self.entries.move_to_end(key)
            while len(self.entries) > MOST or (len(self.entries) > 1 and self.nbytes > MOST_BYTES):
                self.entries.popitem(last=False)


class CacheInfo(NamedTuple):
    """Counts of the plan cache since the last `plan_cache_clear`, over all groups and calls without one; the
    limits are those of each group's cache."""

    hits: int
    misses: int
    plans: int  # in the cache now
    nbytes: int  # of their masks and placements
    most: int  # plans that a cache keeps
    most_bytes: int


_ALONE = PlanCache()  # of calls without a group
# By the group itself, not its name: another group may get the name of one that was destroyed.
_OF_GROUP: weakref.WeakKeyDictionary[Any, PlanCache] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()  # of _OF_GROUP
_COUNTS = {"hits": 0, "misses": 0}
_TOLD: set[Any] = set()  # (name of a mask_mod, ranks) of the warnings about uneven work


def cache_of(group: Any) -> PlanCache:
    """The plans of a group, or of calls without one."""
    if group is None:
        return _ALONE
    cache = _OF_GROUP.get(group)
    if cache is None:
        with _LOCK:
            cache = _OF_GROUP.setdefault(group, PlanCache())
    return cache


def plan_of(
    mask: RawMask | Plan,
    q: Tensor,
    k: Tensor,
    group: Any,
    call_key: Any,
    check: Callable[[], None] = lambda: None,
) -> Plan:
    """The plan of a call, checked against its shards: the one that was passed, or that of a raw mask."""
    if not isinstance(mask, Plan):
        return plan_for(mask, q, k, group, check, call_key)
    if call_key not in mask.checked_calls:
        try:
            check()
            check_plan(mask, q, k, group, call_key)
        except Exception as error:
            signatures.share_failure(group, mask, error)
            raise
    return mask


def plan_of_rows(
    mask: RawMask | Plan,
    q: Tensor,
    k: Tensor,
    group: Any,
    call_key: Any,
    check: Callable[[], None] = lambda: None,
    batch_offset: int | None = None,
) -> Plan:
    """The plan of a call that holds the rows of a batch from ``batch_offset`` on (None: all of them)."""
    if batch_offset is None:
        return plan_of(mask, q, k, group, call_key, check)
    rows = validate.whole_batch(mask, q.shape[0], batch_offset)
    whole_q, whole_k = (torch.empty(rows, *x.shape[1:], device="meta") for x in (q, k))
    return plan_of(mask, whole_q, whole_k, group, call_key, check).batch_rows(batch_offset, q.shape[0])


@on_host
def plan_for(
    mask: RawMask, q: Tensor, k: Tensor, group: Any, check: Callable[[], None] = lambda: None,
    call_key: Any = None,
) -> Plan:  # fmt: skip
    """The natural-order plan of a raw mask for shards of these lengths, from the cache or new, and checked
    against them.

    check: raises for wrong inputs. If it raises before this mask has a plan, all ranks of the group raise.
    call_key: :func:`inputs.call_key` of the call: a plan that served a call of this key needs no check.
    """
    sources = Sources.of(mask)
    cache = cache_of(group)
    tensors = (*sources.lists, *sources.captures)
    key = None if call_key is None else (sources.key, q.shape[2], k.shape[2], q.shape[0])
    entry = cache.serving(key, tensors)
    like = entry is not None and call_key in entry.plan.checked_calls
    if not like:
        try:
            check()
        except Exception as error:
            if group is not None and (consistency.CHECKED or not cache.holds(sources.key)):
                consistency.share_failure(group, signatures.CALL, error, signatures.MOMENT)
            raise
        key = (sources.key, q.shape[2], k.shape[2], q.shape[0])
        entry = entry or cache.serving(key, tensors)
    if entry is not None:
        cache.renew(key)
        _COUNTS["hits"] += 1
        result = entry.plan
    else:
        _COUNTS["misses"] += 1
        result = _make(sources, q, k, group)
        if sources.key is None:
            sources.warn_incomparable()
        else:
            versions = tuple(t._version for t in tensors)
            cache.keep(key, Entry(result, tuple(map(weakref.ref, tensors)), versions))
    if not like:
        try:
            check_plan(result, q, k, group, call_key)
        except Exception as error:
            signatures.share_failure(group, result, error)
            raise
    return result


def plan_cache_info() -> CacheInfo:
    """Hits and misses of the plans made behind raw masks, how many are held, and their bytes.

    A training loop with a new mask every step misses every time: make its plans with `make_plan`, in the data
    loader's workers.

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
    caches = [_ALONE, *list(_OF_GROUP.values())]
    plans, nbytes = sum(len(cache.entries) for cache in caches), sum(cache.nbytes for cache in caches)
    return CacheInfo(**_COUNTS, plans=plans, nbytes=nbytes, most=MOST, most_bytes=MOST_BYTES)


def plan_cache_clear() -> None:
    """Forget all plans made behind raw masks, and count anew. Under several ranks: on every rank."""
    for cache in (_ALONE, *list(_OF_GROUP.values())):
        with cache.lock:
            cache.entries.clear()
    _COUNTS.update(hits=0, misses=0)


def _make(sources: Sources, q: Tensor, k: Tensor, group: Any) -> Plan:
    """A new plan of a raw mask, with the lengths of all ranks' shards."""
    call = "flex_attention, which makes the plan of a raw mask"

    def compare_shapes() -> tuple[None, consistency.Facts, Sequence[int]]:
        same = {"call": fact(call), "versions": consistency.versions(), **signatures.shape_facts(q, k)}
        return None, same, (q.shape[2], k.shape[2])

    _, rows = consistency.together(group, call, compare_shapes)
    lengths, kv_lengths = ([row[i] for row in rows] for i in (0, 1))
    rank = 0 if group is None else group.rank()

    def build() -> tuple[Plan, consistency.Facts, Sequence[int]]:
        digest = sources.digest() if group else b""
        result = _natural(sources, q.shape[0], lengths, kv_lengths, rank, digest)
        if not group:
            return result, {}, ()
        text = lambda: signatures.mask_text(result.mask)  # noqa: E731 - read only where ranks differ
        return result, {"call": fact(call, b"building"), "mask": fact(text, digest)}, tile_tables.summary()

    result, tiles = consistency.together(group, call, build)
    _connect(group, [result], tiles)
    return result


def _connect(group: Any, plans: Iterable[Plan], tiles: Sequence[Sequence[int]]) -> None:
    """Agree on measured tile shapes (rank 0's; ``tiles``: the summary of each rank) and make the
    communicator of the group's data: once for new plans, on every rank."""
    if group is None:
        return
    tile_tables.agree(group, tiles)
    table = signatures.table_of(group)
    for one in plans:
        table.note_plan(one)
    collectives.connect_data(group)


def in_order(mask: RawMask, batch: int, lengths: Sequence[int], kv_lengths: Sequence[int], rank: int) -> Plan:
    """The plan of a raw mask whose ranks hold pieces of these lengths, in order."""
    return _natural(Sources.of(mask), batch, lengths, kv_lengths, rank)


def _natural(
    sources: Sources, batch: int, lengths: Sequence[int], kv_lengths: Sequence[int], rank: int,
    digest: bytes = b"",
) -> Plan:  # fmt: skip
    mask = sources.compact(batch, sum(lengths), sum(kv_lengths))
    check_lengths(lengths, kv_lengths, mask.q_len, mask.kv_len)
    natural_plan = plan.build(mask, len(lengths), rank, balancer=None, lengths=lengths, kv_lengths=kv_lengths)
    _warn_uneven(sources, natural_plan)
    return replace(sources.keep(natural_plan), mask_digest=digest).pinned()


def _warn_uneven(sources: Sources, natural: Plan) -> None:
    """Warn about uneven work, on the first rank, once for a mask_mod's name and a number of ranks."""
    warning_key = describe(sources.mod), natural.world_size
    if natural.rank or natural.imbalance <= UNEVEN or warning_key in _TOLD:
        return
    _TOLD.add(warning_key)
    busiest = max(range(natural.world_size), key=natural.work.__getitem__)
    warnings.warn(
        f"in natural order rank {busiest} of {natural.world_size} does {natural.imbalance:.2f} times "
        "the mean work of this mask. Two lines balance it:\n"
        "    plan = tritoncp.make_plan(block_mask, mesh)\n"
        "    q, k, v = (tritoncp.shard(x, plan, dim=2) for x in (q, k, v))  # of the global tensors\n"
        "and flex_attention(q, k, v, plan, mesh) in place of the mask.",
        stacklevel=6,
    )


@on_host
def make(
    masks: Mapping[str, BlockMask | Mask],
    group: Any,
    world_size: int,
    rank: int,
    balancer: str | Balancer | None,
    schedule: str,
    degree: int = 0,
) -> dict[str, Plan]:
    """One placement for all these masks, and a plan each."""

    def build() -> tuple[dict[str, Plan], consistency.Facts, Sequence[int]]:
        check_plannable(masks)
        sources = {name: Sources.of(mask) for name, mask in masks.items()}
        compact = {name: source.compact(1, 0, 0) for name, source in sources.items()}
        unpinned = {
            name: plan.build(
                mask,
                world_size,
                rank,
                balancer=balancer,
                schedule=schedule,
                weighed=list(compact.values()),
                degree=degree,
            )
            for name, mask in compact.items()
        }
        first = next(iter(unpinned.values()))  # equal placements are one: a tensor sharded by one is by all
        unpinned = {name: replace(one, q=first.q, kv=first.kv) for name, one in unpinned.items()}
        # Also without a group: the plan may go to one, as from a data loader's worker.
        digests = {name: source.digest() if world_size > 1 else b"" for name, source in sources.items()}
        plans = {
            name: replace(sources[name].keep(one), mask_digest=digests[name]).pinned()
            for name, one in unpinned.items()
        }
        if not group:
            return plans, {}, ()
        chosen = find(balancer)[0] if callable(balancer) else balancer
        options = f"balancer={chosen!r}, schedule={schedule!r}, degree {degree}, masks {list(masks)}"
        text = lambda: "; ".join(map(signatures.mask_text, compact.values()))  # noqa: E731 - where ranks differ
        facts = {
            "call": fact(call),
            "versions": consistency.versions(),
            "options": fact(options),
            "mask": fact(text, b"".join(digests.values())),
            "placement": fact(f"balancer={chosen!r}", b"".join(one.digest for one in unpinned.values())),
        }
        return plans, facts, tile_tables.summary()

    call = "make_plan"
    plans, tiles = consistency.together(group, call, build)
    _connect(group, plans.values(), tiles)
    return plans

"""Plans behind raw masks: made once, served again, never stale.

A plan serves again while the mask is made of the same: code, plain values, lengths, and the very same
tensors, unedited. Tensors are told apart by weak references (an id alone comes back as another tensor's) and
by their version counters; what is written through ``.data`` or NumPy is not seen.

Making a plan for a group communicates. So every group has a cache of its own, which other calls of this
process do not touch, and eviction is in call order, by the number of plans and the bytes of their masks and
placements, which are equal on every rank: a plan is served or made on all ranks alike.
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

from tritoncp import agreement, comm, inputs, plan, signatures, tuned
from tritoncp.agreement import fact
from tritoncp.balance import Balancer, find
from tritoncp.host import on_host
from tritoncp.inputs import check_lengths, check_plan, check_plannable
from tritoncp.masks import Mask
from tritoncp.mods.captures import describe
from tritoncp.plan import Plan
from tritoncp.sources import RawMask, Sources

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
    """Plans of one group, or of calls without one, the one that served last at the end."""

    def __init__(self) -> None:
        self.entries: OrderedDict[Any, Entry] = OrderedDict()
        self.lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())

    def serving(self, key: Any, tensors: Sequence[Tensor]) -> Entry | None:
        """The entry for a mask made of these tensors."""
        entry = self.entries.get(key)
        return entry if entry is not None and entry.serves(tensors) else None

    def holds(self, source_key: Any) -> bool:
        """Whether a mask of this key had a plan, for shards of whatever lengths."""
        return any(key[0] == source_key for key in list(self.entries))

    def renew(self, key: Any) -> None:
        """The plan served: the last one to be evicted now."""
        with self.lock:
            if key in self.entries:
                self.entries.move_to_end(key)

    def keep(self, key: Any, entry: Entry) -> None:
        """Add a plan, and evict the ones that served longest ago. One plan is kept, however large it is."""
        with self.lock:
            self.entries[key] = entry
            self.entries.move_to_end(key)
            while len(self.entries) > MOST or (len(self.entries) > 1 and self.nbytes > MOST_BYTES):
                self.entries.popitem(last=False)


class CacheInfo(NamedTuple):
    """How the plans behind raw masks have fared since the last `plan_cache_clear`, in all groups and without
    one; the limits are those of each group's cache."""

    hits: int
    misses: int
    plans: int  # held now
    nbytes: int  # of their masks and placements
    most: int  # plans that are kept
    most_bytes: int


_ALONE = PlanCache()  # of calls without a group
# By the group itself, not its name: another group may get the name of one that was destroyed.
_OF_GROUP: weakref.WeakKeyDictionary[Any, PlanCache] = weakref.WeakKeyDictionary()
_COUNTS = {"hits": 0, "misses": 0}
_TOLD: set[Any] = set()  # (name of a mask_mod, ranks) whose uneven work has been spoken of


def cache_of(group: Any) -> PlanCache:
    """The plans of a group, or of calls without one."""
    if group is None:
        return _ALONE
    cache = _OF_GROUP.get(group)
    if cache is None:
        cache = _OF_GROUP[group] = PlanCache()
    return cache


def plan_of(
    mask: RawMask | Plan,
    q: Tensor,
    k: Tensor,
    group: Any,
    about: Any,
    check: Callable[[], None] = lambda: None,
) -> Plan:
    """The plan of a call, checked against its shards: the one that was passed, or that of a raw mask."""
    if not isinstance(mask, Plan):
        return plan_for(mask, q, k, group, check, about)
    if about not in mask.well:
        try:
            check()
            check_plan(mask, q, k, group, about)
        except Exception as error:
            signatures.share_failure(group, mask, error)
            raise
    return mask


def plan_of_rows(
    mask: RawMask | Plan,
    q: Tensor,
    k: Tensor,
    group: Any,
    about: Any,
    check: Callable[[], None] = lambda: None,
    batch_offset: int | None = None,
) -> Plan:
    """The plan of a call that holds the rows of a batch from ``batch_offset`` on (None: all of them)."""
    if batch_offset is None:
        return plan_of(mask, q, k, group, about, check)
    rows = inputs.whole_batch(mask, q.shape[0], batch_offset)
    whole_q, whole_k = (torch.empty(rows, *x.shape[1:], device="meta") for x in (q, k))
    return plan_of(mask, whole_q, whole_k, group, about, check).batch_rows(batch_offset, q.shape[0])


@on_host
def plan_for(
    mask: RawMask, q: Tensor, k: Tensor, group: Any, check: Callable[[], None] = lambda: None,
    about: Any = None,
) -> Plan:  # fmt: skip
    """The natural-order plan of a raw mask for shards of these lengths, from the cache or new, and checked
    against them.

    check: of the other inputs. Where it fails before this mask has had a plan, all ranks of the group hear.
    about: what is checked, :func:`inputs.about`: a plan that served a call like it needs no check.
    """
    sources = Sources.of(mask)
    cache = cache_of(group)
    tensors = (*sources.lists, *sources.captures)
    key = None if about is None else (sources.key, q.shape[2], k.shape[2], q.shape[0])
    entry = cache.serving(key, tensors)
    like = entry is not None and about in entry.plan.well
    if not like:
        try:
            check()
        except Exception as error:
            if group is not None and (agreement.CHECKED or not cache.holds(sources.key)):
                agreement.share_failure(group, signatures.CALL, error, signatures.MOMENT)
            raise
        key = (sources.key, q.shape[2], k.shape[2], q.shape[0])
        entry = entry or cache.serving(key, tensors)
    if entry is not None:
        cache.renew(key)
        _COUNTS["hits"] += 1
        made = entry.plan
    else:
        _COUNTS["misses"] += 1
        made = _make(sources, q, k, group)
        if sources.key is None:
            sources.warn_incomparable()
        else:
            versions = tuple(t._version for t in tensors)
            cache.keep(key, Entry(made, tuple(map(weakref.ref, tensors)), versions))
    if not like:
        try:
            check_plan(made, q, k, group, about)
        except Exception as error:
            signatures.share_failure(group, made, error)
            raise
    return made


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
    caches = [_ALONE, *_OF_GROUP.values()]
    plans, nbytes = sum(len(cache.entries) for cache in caches), sum(cache.nbytes for cache in caches)
    return CacheInfo(**_COUNTS, plans=plans, nbytes=nbytes, most=MOST, most_bytes=MOST_BYTES)


def plan_cache_clear() -> None:
    """Forget all plans made behind raw masks, and count anew. Under several ranks: on every rank."""
    for cache in (_ALONE, *_OF_GROUP.values()):
        cache.entries.clear()
    _COUNTS.update(hits=0, misses=0)


def _make(sources: Sources, q: Tensor, k: Tensor, group: Any) -> Plan:
    """A new plan of a raw mask, with the lengths of all ranks' shards."""
    call = "flex_attention, which makes the plan of a raw mask"

    def compare_shapes() -> tuple[None, agreement.Facts, Sequence[int]]:
        same = {"call": fact(call), "versions": agreement.versions(), **signatures.shape_facts(q, k)}
        return None, same, (q.shape[2], k.shape[2])

    _, rows = agreement.together(group, call, compare_shapes)
    lengths, kv_lengths = ([row[i] for row in rows] for i in (0, 1))
    rank = 0 if group is None else group.rank()

    def build() -> tuple[Plan, agreement.Facts, Sequence[int]]:
        digest = sources.digest() if group else b""
        made = _natural(sources, q.shape[0], lengths, kv_lengths, rank, digest)
        if not group:
            return made, {}, ()
        text = lambda: signatures.mask_text(made.mask)  # noqa: E731 - read only where ranks differ
        return made, {"call": fact(call, b"building"), "mask": fact(text, digest)}, tuned.summary()

    made, tiles = agreement.together(group, call, build)
    _connect(group, [made], tiles)
    return made


def _connect(group: Any, plans: Iterable[Plan], tiles: Sequence[Sequence[int]]) -> None:
    """What takes every rank and comes once: measured tile shapes, which are rank 0's (``tiles`` says who has
    which), and what the schedules communicate over besides the group."""
    if group is None:
        return
    tuned.agree(group, tiles)
    table = signatures.table_of(group)
    for one in plans:
        signatures.note_plan(table, one)
        if "ring" in one.schedule:
            comm.aside(group)


def in_order(mask: RawMask, batch: int, lengths: Sequence[int], kv_lengths: Sequence[int], rank: int) -> Plan:
    """The plan of a raw mask whose ranks hold pieces of these lengths, in order."""
    return _natural(Sources.of(mask), batch, lengths, kv_lengths, rank)


def _natural(
    sources: Sources, batch: int, lengths: Sequence[int], kv_lengths: Sequence[int], rank: int,
    digest: bytes = b"",
) -> Plan:  # fmt: skip
    mask = sources.compact(batch, sum(lengths), sum(kv_lengths))
    check_lengths(lengths, kv_lengths, mask.q_len, mask.kv_len)
    made = plan.build(mask, len(lengths), rank, balancer=None, lengths=lengths, kv_lengths=kv_lengths)
    _warn_uneven(sources, made)
    return replace(sources.keep(made), mask_digest=digest).pinned()


def _warn_uneven(sources: Sources, made: Plan) -> None:
    """Once for a mask_mod, by name, and a number of ranks; on the first rank."""
    about = describe(sources.mod), made.world_size
    if made.rank or made.imbalance <= UNEVEN or about in _TOLD:
        return
    _TOLD.add(about)
    busiest = max(range(made.world_size), key=made.work.__getitem__)
    warnings.warn(
        f"in natural order rank {busiest} of {made.world_size} does {made.imbalance:.2f} times the mean "
        "work of "
        f"this mask. Two lines balance it:\n"
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

    def build() -> tuple[dict[str, Plan], agreement.Facts, Sequence[int]]:
        check_plannable(masks)
        sources = {name: Sources.of(mask) for name, mask in masks.items()}
        whole = {name: source.compact(1, 0, 0) for name, source in sources.items()}
        made = {
            name: plan.build(
                mask,
                world_size,
                rank,
                balancer=balancer,
                schedule=schedule,
                weighed=list(whole.values()),
                degree=degree,
            )
            for name, mask in whole.items()
        }
        # Also without a group: the plan may go to one, as from a data loader's worker.
        digests = {name: source.digest() if world_size > 1 else b"" for name, source in sources.items()}
        plans = {
            name: replace(sources[name].keep(one), mask_digest=digests[name]).pinned()
            for name, one in made.items()
        }
        if not group:
            return plans, {}, ()
        named = find(balancer)[0] if callable(balancer) else balancer
        options = f"balancer={named!r}, schedule={schedule!r}, degree {degree}, masks {list(masks)}"
        text = lambda: "; ".join(map(signatures.mask_text, whole.values()))  # noqa: E731 - where ranks differ
        facts = {
            "call": fact(call),
            "versions": agreement.versions(),
            "options": fact(options),
            "mask": fact(text, b"".join(digests.values())),
            "placement": fact(f"balancer={named!r}", b"".join(one.digest for one in made.values())),
        }
        return plans, facts, tuned.summary()

    call = "make_plan"
    made, tiles = agreement.together(group, call, build)
    _connect(group, made.values(), tiles)
    return made

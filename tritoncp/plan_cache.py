"""Plans behind raw masks: made once, found again, never stale.

A plan is found again while the mask is made of the same: code, plain values, lengths, and the very same
tensors, unedited. Tensors are known by weak references (an id alone comes back as another tensor's) and by
their version counters; what is written through ``.data`` or NumPy is not seen. Eviction is in call order, by
the number of plans and the bytes of their masks and placements, which are equal on every rank: a plan is
found or made on all ranks alike.
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tritoncp import agreement, captured, comm, inputs, plan, tuned
from tritoncp.agreement import fact
from tritoncp.balance import Balancer, find
from tritoncp.host import on_host
from tritoncp.inputs import check_lengths, check_plan, check_plannable
from tritoncp.masks import Mask
from tritoncp.mods.captures import describe
from tritoncp.plan import Plan
from tritoncp.sources import RawMask, Sources

MOST = 64  # plans
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


class CacheInfo(NamedTuple):
    """How the plans behind raw masks have fared since the last `plan_cache_clear`."""

    hits: int
    misses: int
    plans: int  # held now
    nbytes: int  # of their masks and placements
    most: int  # plans that are kept
    most_bytes: int


_PLANS: OrderedDict[Any, Entry] = OrderedDict()
_COUNTS = {"hits": 0, "misses": 0}
_TOLD: set[Any] = set()  # (name of a mask_mod, ranks) whose uneven work has been spoken of


def plan_of(
    mask: RawMask | Plan,
    q: Tensor,
    k: Tensor,
    group: Any,
    about: Any,
    check: Callable[[], None] = lambda: None,
) -> Plan:
    """The plan of a call, checked against its shards: what was given, or that of a raw mask."""
    if not isinstance(mask, Plan):
        return plan_for(mask, q, k, group, check, about)
    if about not in mask.well:
        check()
        check_plan(mask, q, k, group, about)
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
    """The natural-order plan of a raw mask for shards of these lengths, found or made, and fit for them.

    check: of the other inputs. Where it fails before this mask has had a plan, all ranks of the group hear.
    about: what is checked, :func:`inputs.about`: a plan that had a call like it is found without a check.
    """
    sources = Sources.of(mask)
    home = sources.key, None if group is None else group.group_name
    tensors = (*sources.lists, *sources.captures)
    key = None if about is None else (*home, q.shape[2], k.shape[2], q.shape[0])
    entry = _serving(key, tensors)
    like = entry is not None and about in entry.plan.well
    if not like:
        try:
            check()
        except Exception:
            if group is not None and not any(key[:2] == home for key in _PLANS):
                agreement.together(group, lambda: _lengths(q, k, check))
            raise
        key = (*home, q.shape[2], k.shape[2], q.shape[0])
        entry = entry or _serving(key, tensors)
    if entry is not None:
        _PLANS.move_to_end(key)
        _COUNTS["hits"] += 1
        made = entry.plan
    else:
        _COUNTS["misses"] += 1
        made = _make(sources, q, k, group, check)
        _keep(key, made, sources, tensors)
    if not like:
        check_plan(made, q, k, group, about)
    return made


def _serving(key: Any, tensors: Sequence[Tensor]) -> Entry | None:
    entry = _PLANS.get(key)
    return entry if entry is not None and entry.serves(tensors) else None


def _keep(key: Any, made: Plan, sources: Sources, tensors: Sequence[Tensor]) -> None:
    if sources.key is None:
        sources.warn_incomparable()
        return
    _PLANS[key] = Entry(made, tuple(map(weakref.ref, tensors)), tuple(t._version for t in tensors))
    _PLANS.move_to_end(key)
    while len(_PLANS) > MOST or (len(_PLANS) > 1 and _held() > MOST_BYTES):
        _PLANS.popitem(last=False)


def _held() -> int:
    return sum(entry.nbytes for entry in _PLANS.values())


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
    return CacheInfo(**_COUNTS, plans=len(_PLANS), nbytes=_held(), most=MOST, most_bytes=MOST_BYTES)


def plan_cache_clear() -> None:
    """Forget all plans made behind raw masks, and count anew. Under several ranks: on every rank."""
    _PLANS.clear()
    _COUNTS.update(hits=0, misses=0)


def _make(sources: Sources, q: Tensor, k: Tensor, group: Any, check: Callable[[], None]) -> Plan:
    _, rows = agreement.together(group, lambda: _lengths(q, k, check))
    lengths, kv_lengths = ([row[i] for row in rows] for i in (0, 1))
    rank = 0 if group is None else group.rank()

    def build() -> tuple[Plan, agreement.Facts, Sequence[int]]:
        made = _natural(sources, q.shape[0], lengths, kv_lengths, rank)
        facts = {"call": fact("building"), "mask": fact(repr(made.mask), sources.digest())} if group else {}
        return made, facts, tuned.summary() if group else ()

    made, tiles = agreement.together(group, build)
    _connect(group, [made], tiles)
    return made


def _connect(group: Any, plans: Iterable[Plan], tiles: Sequence[Sequence[int]]) -> None:
    """What takes every rank and comes once: measured tile shapes, which are rank 0's (``tiles`` says who has
    which), and what the schedules communicate over besides the group."""
    if group is None:
        return
    tuned.agree(group, tiles)
    if any("ring" in one.schedule for one in plans):
        comm.aside(group)


def facts_of_call(
    made: Plan, q: Tensor, k: Tensor, v: Tensor, score_mod: Any, *options: Any
) -> agreement.Facts:
    """What the ranks of one call have in common."""
    score = captured.score_of(score_mod, q)
    shapes = (
        f"batch {q.shape[0]}, {q.shape[1]} and {k.shape[1]} heads, head dims {q.shape[3]} and {v.shape[3]}"
    )
    said = f"score_mod {score and score.digest[:12]}, options {options}, schedule {made.schedule!r}"
    return {
        "call": fact("the call itself"),
        "versions": agreement.versions(),
        "options": fact(said),
        "shapes": fact(f"{shapes}, {q.dtype}"),
        "mask": fact(repr(made.mask), made.digest),
    }


def _lengths(q: Tensor, k: Tensor, check: Callable[[], None]) -> tuple[None, agreement.Facts, Sequence[int]]:
    check()
    shapes = f"batch {q.shape[0]}, {q.shape[1]} and {k.shape[1]} heads, head dim {q.shape[3]}, {q.dtype}"
    facts = {"call": fact("flex_attention"), "versions": agreement.versions(), "shapes": fact(shapes)}
    return None, facts, (q.shape[2], k.shape[2])


def in_order(mask: RawMask, batch: int, lengths: Sequence[int], kv_lengths: Sequence[int], rank: int) -> Plan:
    """The plan of a raw mask whose ranks hold pieces of these lengths, in order."""
    return _natural(Sources.of(mask), batch, lengths, kv_lengths, rank)


def _natural(
    sources: Sources, batch: int, lengths: Sequence[int], kv_lengths: Sequence[int], rank: int
) -> Plan:
    mask = sources.compact(batch, sum(lengths), sum(kv_lengths))
    check_lengths(lengths, kv_lengths, mask.q_len, mask.kv_len)
    made = plan.build(mask, len(lengths), rank, balancer=None, lengths=lengths, kv_lengths=kv_lengths)
    _warn_uneven(sources, made)
    return sources.keep(made).pinned()


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
        named = find(balancer)[0] if callable(balancer) else balancer
        options = f"balancer={named!r}, schedule={schedule!r}, degree {degree}, masks {list(masks)}"
        facts = {
            "call": fact("make_plan"),
            "versions": agreement.versions(),
            "options": fact(options),
            "mask": fact(", ".join(map(repr, whole.values())), b"".join(s.digest() for s in sources.values()))
            if group
            else fact(""),
            "placement": fact(f"balancer={named!r}", b"".join(one.digest for one in made.values()))
            if group
            else fact(""),
        }
        plans = {name: sources[name].keep(one).pinned() for name, one in made.items()}
        return plans, facts, tuned.summary() if group else ()

    made, tiles = agreement.together(group, build)
    _connect(group, made.values(), tiles)
    return made

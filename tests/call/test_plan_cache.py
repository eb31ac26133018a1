"""Tests of the plan cache: hits for unchanged masks, misses after any change, and the cost of both."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

import tritoncp
from tritoncp import (
    and_masks,
    causal,
    document,
    flex_attention,
    make_plan,
    plan_cache_clear,
    plan_cache_info,
    sliding_window,
)
from tritoncp.call import check_arguments, check_shards, mask_source, plan_cache
from tritoncp.call.plan_cache import plan_in_order
from tritoncp.call.read import ShardSizes
from tritoncp.mods import recording
from tritoncp.reference.dense import dense_attention

S = 32
Q = torch.zeros(1, 2, S, 16)


@pytest.fixture(autouse=True)
def eager(cpu_engine):
    """Use the CPU engine and an empty plan cache."""
    plan_cache_clear()
    for store in (plan_cache._WARNED, mask_source._WARNED, recording._WARNED):
        store.clear()


def count_built() -> int:
    """Return the number of plans that calls built since the cache was cleared."""
    return plan_cache_info().misses


def lower(b, h, q, kv):
    return q >= kv


def block_mask(mod=lower, **options):
    return torch_block_mask(mod, 1, 1, S, S, device="cpu", BLOCK_SIZE=16, **options)


def plan(mask, q=Q):
    return plan_cache.plan_for(mask, ShardSizes.of(q, q), None)


# -- found again -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["torch", "compact", "closed", "none"])
@pytest.mark.bar(16)
def test_the_same_mask_finds_its_plan(kind):
    compact = tritoncp.create_block_mask(lower, 1, 1, S, S, BLOCK_SIZE=16)
    mask = {"torch": block_mask(), "compact": compact, "closed": causal(), "none": None}[kind]
    first = plan(mask)
    assert plan(mask) is first is plan(mask, torch.zeros(1, 4, S, 8)) and count_built() == 1
    if kind == "closed":
        assert plan(causal(), torch.zeros(1, 2, 24, 16)).q.length == 24 and count_built() == 2
        assert plan(causal() & sliding_window(3)) is plan(causal() & sliding_window(3))
        assert count_built() == 3


def chosen(count, block_size=1):
    return tritoncp.Selection(torch.zeros(1, 1, S, count).int(), block_size)


def test_one_plan_serves_numbers_of_selected_keys_up_to_a_power_of_two():
    plans = [
        plan_cache.plan_for(causal(), ShardSizes.of(Q, Q, None, one), None)
        for one in (chosen(5), chosen(8), chosen(9), chosen(1, 16), None)
    ]
    assert [one.selected for one in plans] == [8, 8, 16, 16, 0] and count_built() == 3
    assert flex_attention(Q, Q, Q, causal(), selected=chosen(7)).shape == Q.shape
    assert count_built() == 3


def test_a_raw_mask_gets_the_schedule_of_the_keys_that_queries_select():
    """As make_plan chooses it for the same layer; and work of a query is weighed by these keys."""
    rows, lengths = 1 << 15, [1 << 13] * 4
    q, k = (torch.empty(1, heads, 1 << 13, 128, device="meta") for heads in (32, 8))
    few = tritoncp.Selection(torch.zeros(1, 1, 1 << 13, 60, dtype=torch.int32, device="meta"))
    sources = mask_source.Sources.of(causal())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # uneven work where all keys count
        plans = [
            plan_in_order(sources, ShardSizes.of(q, k, None, one), lengths, lengths) for one in (None, few)
        ]
    mask = tritoncp.create_block_mask(causal(), None, None, rows, rows)
    want = make_plan(mask, world_size=4, rank=0, balancer=None, layer={"selected": 64})
    assert plans[1].schedule == want.schedule != plans[0].schedule
    assert plans[1].imbalance < 1.01 < 1.5 < plans[0].imbalance


# -- made again ------------------------------------------------------------------------------------------


def by_table(table):
    return lambda b, h, q, kv: kv <= table[q]


def visible(plan):
    return plan.mask.to_dense()[0, 0]


EDITED = r"\(32,\).*edited in place.*make the mask and the plan again"


def test_an_edited_capture_makes_a_new_plan_of_lists_and_refuses_a_compact_mask():
    table = torch.arange(S)
    mask, compact = block_mask(by_table(table)), tritoncp.create_block_mask(by_table(table), 1, 1, S, S)
    stale = plan(mask)
    table -= 1
    with pytest.raises(RuntimeError, match=EDITED):
        flex_attention(Q, Q, Q, compact)
    fresh = plan(mask)
    assert fresh is not stale and count_built() == 2
    with pytest.raises(RuntimeError, match=EDITED):
        flex_attention(Q, Q, Q, stale)
    expected = dense_attention(*[torch.randn(1, 2, S, 16)] * 3, fresh.mask)
    assert expected.lse[0, 0, 0] == -torch.inf  # now row 0 sees no key, although its block is listed


def test_an_edited_closure_makes_a_new_plan_of_lists_and_refuses_a_compact_mask():
    """The lists of a BlockMask decide which blocks are visited; its current mask_mod decides inside them."""
    width = 3

    def near(b, h, q, kv):
        return (q - kv <= width) & (q >= kv)

    mask, compact = block_mask(near), tritoncp.create_block_mask(near, 1, 1, S, S)
    plan(mask)
    width = 5
    assert visible(plan(mask))[8].sum() == 6 and count_built() == 2
    with pytest.raises(RuntimeError, match=r"closure variable width was 3 and is 5.*make the mask"):
        plan(compact)


def test_edited_index_lists_make_a_new_plan():
    mask = block_mask()
    assert visible(plan(mask))[20, 3]
    mask.kv_num_blocks[..., 1] = 1
    mask.kv_indices[..., 1, 0] = 1
    mask.full_kv_num_blocks[..., 1] = 0
    assert not visible(plan(mask))[20, 3] and count_built() == 2


def test_new_closures_around_the_same_tensors_are_the_same_mask():
    table = torch.arange(S)
    mask = block_mask(by_table(table))
    first = plan(mask)
    mask.mask_mod = by_table(table)
    assert plan(mask) is first
    mask.mask_mod = by_table(table.clone())
    assert plan(mask) is not first and count_built() == 2


@pytest.mark.long
def test_the_plan_of_a_freed_mask_is_never_found_for_another_mask():
    """Dozens of short-lived masks, whose ids may be reused, each get the right result."""
    for i in range(80):
        limit = torch.full((S,), i % 7)
        mask = tritoncp.create_block_mask(by_table(limit), 1, 1, S, S)
        assert visible(plan(mask))[0].sum() == i % 7 + 1
        del mask, limit
    assert count_built() == 80


def test_the_cache_keeps_neither_masks_nor_index_lists_alive():
    mask = block_mask()
    lists = weakref.ref(mask.kv_indices), weakref.ref(mask)
    plan(mask)
    del mask
    gc.collect()
    assert [ref() for ref in lists] == [None, None]


def test_eviction_is_by_count_in_call_order():
    masks = [sliding_window(i) for i in range(plan_cache.MAX_PLANS + 1)]
    plans = [plan(mask) for mask in masks[: plan_cache.MAX_PLANS]]
    assert plan(masks[0]) is plans[0]  # used again: now the youngest
    plan(masks[-1])
    assert plan(masks[0]) is plans[0] and plan(masks[2]) is plans[2]
    count = count_built()
    assert plan(masks[1]) is not plans[1] and count_built() == count + 1


def test_hits_and_misses_are_counted_and_cached_bytes_are_bounded(monkeypatch):
    one = plan(sliding_window(0))
    size = plan_cache_info().nbytes
    assert size == one.mask.nbytes + one.q.nbytes + one.kv.nbytes > 0
    monkeypatch.setattr(plan_cache._CACHES.of(None), "max_weight", 3 * size)
    for window in (0, 1, 2, 3, 0, 3):
        plan(sliding_window(window))
    info = plan_cache_info()
    assert (info.hits, info.misses, info.plans) == (2, 5, 3)  # 0 and 3 are hits; 0 was evicted by 3
    assert info.nbytes <= 3 * size
    monkeypatch.setattr(plan_cache._CACHES.of(None), "max_weight", 1)
    last = plan(sliding_window(9))
    assert plan(sliding_window(9)) is last  # one plan is kept, however large it is
    plan_cache_clear()
    assert plan_cache_info()[:4] == (0, 0, 0, 0)


def test_a_plan_that_served_a_call_of_a_key_is_not_checked_again(monkeypatch):
    own, checks = plan(causal()), []
    monkeypatch.setattr(check_shards, "check_sizes", lambda *_: checks.append(key))
    for key in (None, None, "a", "a", "b"):
        plan_cache.plan_for(own, ShardSizes.of(Q, Q), None, key)
    assert checks == [None, None, "a", "b"]


def test_the_tensors_of_equal_calls_are_checked_once_and_before_a_plan_is_made(monkeypatch):
    checks, check = [], check_arguments.check_tensors
    monkeypatch.setattr(
        check_arguments, "check_tensors", lambda *args: checks.append(count_built()) or check(*args)
    )
    masks = causal(), sliding_window(2)
    for shape in ((1, 2, 23, 7), (1, 2, 23, 9), (1, 2, 23, 7)):
        for mask in masks:
            tritoncp.flex_attention(*torch.zeros(3, *shape), mask)
    assert checks == [0, 2] and count_built() == 2


# -- what cannot be compared -----------------------------------------------------------------------------


def test_tensors_without_a_version_always_miss_and_are_warned_of_once():
    with torch.inference_mode():
        table = torch.arange(S)
    mask = block_mask(by_table(table))
    with pytest.warns(UserWarning, match=r"inference_mode.*make_plan\(mask, mesh\)"):
        first = plan(mask)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan(mask) is not first
        flex_attention(Q, Q, Q, mask)
    assert count_built() == 3


def test_a_mask_mod_whose_state_cannot_be_compared_is_run_to_find_its_plan():
    values = iter(range(3))  # an object without attributes and without a value to compare
    sign = [1]

    def odd(b, h, q, kv):
        return (q >= kv) if values is not None and sign[0] > 0 else (q < kv)

    mask = block_mask(odd)
    with pytest.warns(UserWarning, match=r"closure variable values is a range_iterator.*capture it instead"):
        plan(mask)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(mask)
    assert count_built() == 1
    sign[0] = -1
    assert visible(plan(mask))[0, 1] and count_built() == 2


# -- what it costs ---------------------------------------------------------------------------------------


def test_a_mask_on_a_device_is_copied_once_lists_and_captures_together(host_copies):
    table, other = torch.arange(S), torch.ones(S, dtype=torch.bool)
    mask = block_mask(lambda b, h, q, kv: (kv <= table[q]) & other[kv])
    q = torch.randn(1, 2, S, 16, requires_grad=True)
    for _ in range(3):
        flex_attention(q, q, q, mask).sum().backward()
    assert host_copies == [6]
    make_plan(mask, world_size=2)
    assert host_copies == [6, 6]


def test_closed_forms_of_tensors_are_copied_once_and_of_numbers_never(host_copies):
    flex_attention(Q, Q, Q, and_masks(causal(), sliding_window(3)))
    assert host_copies == []
    ids, more = torch.arange(S) // 8, torch.arange(S) // 16
    flex_attention(Q, Q, Q, and_masks(document(ids=ids), document(ids=more)))
    assert host_copies == [2]


def test_an_untranslatable_mask_on_a_device_is_copied_once(host_copies):
    table = torch.arange(S)
    mask = block_mask(lambda b, h, q, kv: table.sort().values[q] % 3 != kv % 3)
    q = torch.randn(1, 2, S, 16)
    for _ in range(2):
        out = flex_attention(q, q, q, mask)
    assert host_copies == [5]
    whole = plan_in_order(mask_source.Sources.of(mask), ShardSizes.of(q, q), [S], [S]).mask
    torch.testing.assert_close(out, dense_attention(q, q, q, whole).out)


def test_a_mask_mod_for_one_device_is_evaluated_there(host_copies):
    table = torch.arange(S)
    home = id(table)

    def picky(b, h, q, kv):
        if id(table) != home:
            raise RuntimeError("Expected all tensors to be on the same device")
        return table.sort().values[q] % 3 != kv % 3

    mask = block_mask(picky)
    q = torch.randn(1, 2, S, 16)
    out = flex_attention(q, q, q, mask)
    whole = tritoncp.from_block_mask(mask)
    torch.testing.assert_close(out, dense_attention(q, q, q, whole).out, atol=2e-6, rtol=1e-5)


def test_finding_a_plan_again_does_nothing_to_any_tensor():
    table = torch.arange(S)
    mask = block_mask(by_table(table))
    plan(mask)

    class Nothing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(f"{func} ran")

    with Nothing():
        plan(mask)


def test_calls_of_a_kind_are_checked_once(monkeypatch):
    """After MAX_CHECKED_CALLS kinds, all are forgotten and checked again."""
    monkeypatch.setattr(plan_cache, "MAX_CHECKED_CALLS", 3)
    checked, check = [], check_shards.check_sizes
    monkeypatch.setattr(check_shards, "check_sizes", lambda *a: checked.append(a[1].heads) or check(*a))
    mask = block_mask(lambda b, h, q, kv: q >= kv)
    for heads in (1, 2, 3, 1, 2, 3, 4, 1, 4):
        x = torch.zeros(1, heads, S, 16)
        flex_attention(x, x, x, mask)
    assert checked == [1, 2, 3, 4, 1]

"""The first call of each signature is compared, later ones are looked up; groups have separate caches."""

from __future__ import annotations

import functools
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tritoncp
from tests.multiprocess.ranks import PATIENCE, attempt, run
from tritoncp.call import plan_cache
from tritoncp.call.prepare import MAX_SCALES
from tritoncp.distributed import collectives
from tritoncp.masks import MaskMod
from tritoncp.reference.dense import dense_attention

S = 32

pytestmark = pytest.mark.usefixtures("cpu_engine", "in_pieces")


def mask_of(mod: Any = None) -> tritoncp.Mask:
    mod = tritoncp.causal() if mod is None else mod
    return tritoncp.create_block_mask(mod, 1, 1, S, S, BLOCK_SIZE=8)


def shards(
    heads: int = 2, dim: int = 16, dtype: torch.dtype = torch.float32, batch: int = 1, kv_heads: int = 2,
    v_dim: int = 16,
) -> list[Tensor]:  # fmt: skip
    sizes = (heads, dim), (kv_heads, dim), (kv_heads, v_dim)
    return [torch.ones(batch, n, S // 2, channels, dtype=dtype) for n, channels in sizes]


def count_exchanges(call: Any) -> int:
    """The number of exchanges between the ranks during a call."""
    with mock.patch.object(collectives, "exchange", wraps=collectives.exchange) as exchange:
        call()
    return exchange.call_count


def attend(mask: Any, group: Any, xs: list[Tensor], score_mod: Any = None, **options: Any) -> Any:
    return tritoncp.flex_attention(*xs, score_mod, mask, mesh=group, **options)


def with_slope(slope: float) -> Any:
    return lambda s, b, h, q, kv: s - slope * (q - kv)


def softcap(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return 5 * torch.tanh(s / 5)


def halved(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s / 2


SIZES = {"batch": 1, "heads": 4, "kv_heads": 2, "dim": 16, "v_dim": 16, "dtype": torch.float32}
# By argument of the call or size of its shards: the field in the message, values of both ranks, their texts.
DIFFERENCES: dict[str, tuple[str, tuple[Any, Any], tuple[str, str]]] = {
    "dtype": ("dtype", (torch.bfloat16, torch.float16), ("bfloat16.", "float16.")),
    "batch": ("batch", (2, 3), ("batch 2", "batch 3")),
    "heads": ("heads", (6, 8), ("6 query heads and 2 key heads.", "8 query heads and 2 key heads.")),
    "kv_heads": ("heads", (1, 4), ("4 query heads and 1 key heads.", "4 query heads and 4 key heads.")),
    "dim": ("head dims", (32, 8), ("head dim 32", "head dim 8")),
    "v_dim": ("head dims", (32, 8), ("head dim 16, of values 32.", "head dim 16, of values 8.")),
    "scale": ("scale", (0.5, 1.5), ("scale 0.5.", "scale 1.5.")),
    "kernel_options": (
        "kernel_options",
        ({"PACK_GQA": False}, {"PACK_GQA": True}),
        ("kernel_options {'P",) * 2,
    ),
    "return_lse": ("returns", (False, True), ("out.", "out, lse.")),
    "sinks": ("sinks", (None, torch.zeros(4)), ("no sinks.", "sinks.")),
    "score_mod": ("score_mod", (softcap, halved), ("a score_mod of structure",) * 2),
}


@pytest.mark.bar(18)
def test_ranks_that_differ_raise_everywhere_before_data_moves() -> None:
    """Each runs in a separate group, with a plan and with a raw mask, and after a call that agrees, unless
    rank 0's is the same."""

    def work(group: Any) -> list[tuple[str, str]]:
        said = []
        for name, (_, values, _) in DIFFERENCES.items():
            own = {name: values[group.rank()]}
            sizes, options = (SIZES | own, {}) if name in SIZES else (SIZES, own)
            few = dist.new_group(timeout=PATIENCE)
            for mask in (tritoncp.make_plan(mask_of(), few), mask_of()):
                go = functools.partial(attend, mask, few, enable_gqa=True)
                if name not in ("return_lse", "sinks"):
                    go(shards(**SIZES))
                said.append((name, attempt(lambda: go(shards(**sizes), **options))))  # noqa: B023
        return said

    for said in run(2, work):
        for name, text in said:
            field, _, texts = DIFFERENCES[name]
            assert text.startswith(f"Disagreement: the ranks differ in {field}: rank 0 against rank 1"), text
            for rank, value in enumerate(texts):
                assert f"Rank {rank} has {value}" in text, text


def test_a_captured_graph_and_a_group_of_one_rank_compare_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(group: Any) -> list[int]:
        alone = [dist.new_group([rank]) for rank in range(2)][group.rank()]
        xs = [x.repeat(1, 1, 2, 1) for x in shards()]
        counts = [count_exchanges(lambda: attend(tritoncp.make_plan(mask_of(), alone), alone, xs))]
        plan = tritoncp.make_plan(mask_of(), group)
        with monkeypatch.context() as capture:
            for name in ("is_available", "is_current_stream_capturing"):
                capture.setattr(torch.cuda, name, lambda: True)
            counts.append(count_exchanges(lambda: attend(plan, group, shards())))
        return [*counts, count_exchanges(lambda: attend(plan, group, shards()))]

    assert run(2, work) == [[1, 0, 1]] * 2


@pytest.mark.long
def test_a_compiled_call_is_compared_too() -> None:
    def work(group: Any) -> str:
        plan = tritoncp.make_plan(mask_of(), group)
        fast = torch.compile(tritoncp.flex_attention, backend="aot_eager", fullgraph=True)
        score = [softcap, halved][group.rank()]
        return attempt(lambda: fast(*shards(), score, plan, mesh=group))

    for text in run(2, work):
        assert "the ranks differ in score_mod: rank 0 against rank 1" in text


@pytest.mark.long
def test_lengths_and_captures_may_differ_or_change_after_one_comparison() -> None:
    """These are lengths of shards, and captures of a score_mod: numbers, tensors, learned tensors."""

    def work(group: Any) -> tuple[list[int], Tensor]:
        whole = torch.randn(1, 2, S, 16, generator=torch.Generator().manual_seed(1))
        piece = whole[:, :, :11] if group.rank() == 0 else whole[:, :, 11:]
        plan = tritoncp.make_plan(mask_of(), group)
        bias = torch.zeros(2, requires_grad=True)

        def learned(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return s + bias[h]

        def with_floats() -> None:
            for i in range(4):
                tritoncp.flex_attention(*shards(), with_slope(0.5 + i + group.rank()), plan, mesh=group)

        def with_learned() -> None:
            for _ in range(5):
                out = tritoncp.flex_attention(*shards(), learned, plan, mesh=group)
                out.sum().backward()
                bias.data += 0.1

        def with_scales() -> None:
            for i in range(MAX_SCALES + 4):
                tritoncp.flex_attention(*shards(), plan, group, scale=1 + i / 7)

        def uneven() -> None:
            for _ in range(3):
                outs.append(tritoncp.flex_attention(piece, piece, piece, mask_of(), group))

        outs: list[Tensor] = []
        counts = [count_exchanges(call) for call in (with_floats, with_learned, with_scales, uneven)]
        return counts, outs[-1]

    (counts, first), (second_counts, second) = run(2, work)
    assert counts == second_counts and counts[:2] == [1, 1]
    assert counts[2] == MAX_SCALES, "a scale that changes at every step is not compared for ever"
    assert counts[3] == 2 * 3 + 1  # three plans of new masks, one signature
    whole = torch.randn(1, 2, S, 16, generator=torch.Generator().manual_seed(1))
    expected = dense_attention(whole, whole, whole, mask_of()).out
    torch.testing.assert_close(torch.cat([first, second], 2), expected, atol=2e-6, rtol=1e-5)


def test_parts_of_a_batch_are_compared_by_their_rows() -> None:
    """Each part is compared once, although all parts have one shape; ranks that begin with different parts
    raise."""

    def work(group: Any) -> tuple[list[int], str]:
        mask = tritoncp.create_block_mask(lambda b, h, q, kv: q >= kv + b, 2, 1, S, S, BLOCK_SIZE=8)
        parts = [tritoncp.make_plan(mask, group).batch_rows(row, 1) for row in (0, 1)]
        call = lambda part, group: tritoncp.flex_attention(*shards(), part, group)  # noqa: E731
        counts = [count_exchanges(lambda i=i: call(parts[i], group)) for i in (0, 1, 0, 1)]
        few = dist.new_group(timeout=PATIENCE)
        own = tritoncp.make_plan(mask, few).batch_rows(group.rank(), 1)
        return counts, attempt(lambda: call(own, few))

    for counts, text in run(2, work):
        assert counts == [1, 1, 0, 0]
        assert "the ranks differ in batch: rank 0 against rank 1" in text and "from row 1 on" in text


@pytest.mark.long
def test_plans_of_data_loaders_are_compared_at_their_first_use() -> None:
    """Nothing is hashed for it: the digest comes with the plan. Plans made by the group were compared
    before."""

    def shipped(group: Any, limit: int) -> tritoncp.Plan:
        mask = mask_of(Below(limit))
        plan = tritoncp.make_plan(mask, world_size=2, rank=group.rank(), schedule="allgather")
        return pickle.loads(pickle.dumps(plan))

    def work(group: Any) -> tuple[list[int], str]:
        plans = [shipped(group, 9), shipped(group, 10)]
        plans.append(tritoncp.make_plan(mask_of(Below(11)), group, schedule="allgather"))
        call = lambda plan: tritoncp.flex_attention(*shards(), plan, group)  # noqa: E731
        counts = [count_exchanges(lambda i=i: call(plans[i])) for i in (0, 0, 1, 0, 1, 2)]
        odd = shipped(group, 12 + group.rank())
        return counts, attempt(lambda: call(odd))

    for counts, text in run(2, work):
        assert counts == [1, 0, 1, 0, 0, 0]
        assert "the ranks differ in mask: rank 0 against rank 1" in text


class Below(MaskMod):
    """A mask_mod that can be pickled, with a value that matters only in partial blocks."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & ((q * kv) % self.limit != 1)


# -- caches ------------------------------------------------------------------------------------------------


def local_calls(group: Any, count: int) -> tuple[list[int], int]:
    """Exchanges of two calls of a group, between which rank 0 alone evaluates with many masks."""
    mask = mask_of()
    q = torch.ones(1, 1, 2, 8)

    def train() -> None:
        tritoncp.flex_attention(*(x.requires_grad_() for x in shards()), mask, group).sum().backward()

    first = count_exchanges(train)
    if group.rank() == 0:
        for i in range(count):
            tritoncp.flex_attention(q, q, q, tritoncp.sliding_window(i))
    return [first, count_exchanges(train)], tritoncp.plan_cache_info().plans


@pytest.mark.long
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_calls_of_one_rank_evict_no_plan_of_a_group(count: int) -> None:
    tritoncp.plan_cache_clear()
    (first, plans), (second, _) = run(2, local_calls, count)
    assert first == second == [3, 0]
    assert plans == tritoncp.plan_cache_info().most + 1  # of this process alone, and the group's


@pytest.mark.long
def test_every_rank_evicts_the_same_plans_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MAX_PLANS", 4)

    def work(group: Any) -> list[int]:
        masks = [tritoncp.sliding_window(i) for i in range(tritoncp.plan_cache_info().most + 2)]
        q = torch.ones(1, 1, 2, 8)
        if group.rank() == 1:
            tritoncp.flex_attention(q, q, q, tritoncp.causal())
        counts = []
        for mask in (*masks, masks[0], masks[-1]):
            counts.append(count_exchanges(lambda m=mask: tritoncp.flex_attention(q, q, q, m, group)))
        return counts[-2:]

    assert run(2, work) == [[2, 0]] * 2


def test_a_new_group_shares_nothing_with_a_destroyed_one(tmp_path: Path) -> None:
    def work(group: Any) -> list[int]:
        mask, rank, counts = mask_of(), group.rank(), []
        store = dist.FileStore(str(tmp_path / "again"), 2)
        for prefix in ("a", "b"):
            dist.destroy_process_group()
            prefixed = dist.PrefixStore(prefix, store)
            dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=2)
            fresh = dist.group.WORLD
            assert fresh.group_name == "0"
            for _ in range(2):
                counts.append(count_exchanges(lambda g=fresh: attend(mask, g, shards())))
        return counts

    assert run(2, work) == [[3, 0, 3, 0]] * 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["allgather", "ring"])
def test_ranks_may_be_in_different_numbers_of_groups(schedule: str) -> None:
    """Rank 0 may have another group, for example for evaluation."""

    def work(group: Any) -> Tensor:
        own = dist.new_group([0], timeout=PATIENCE)
        both = dist.new_group(timeout=PATIENCE)
        if group.rank() == 0:
            tritoncp.flex_attention(*shards(), tritoncp.causal(), own)
        plan = tritoncp.make_plan(mask_of(), both, schedule=schedule)
        xs = [x.requires_grad_() for x in shards()]
        tritoncp.flex_attention(*xs, plan, both).sum().backward()
        return xs[0].grad

    assert all(bool(grad.isfinite().all()) for grad in run(2, work))

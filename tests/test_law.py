"""Property test: for every mask, layout, world and schedule, the CPU engine in float64 equals the
oracle."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.zoo import Score, agree, differentiate, oracle, simulated
from tritoncp import and_masks, causal, create_block_mask, document, make_plan, simulate, sliding_window
from tritoncp.distributed.schedules import SCHEDULES
from tritoncp.masks import Mask

CLOSE = {"atol": 1e-8, "rtol": 1e-8, "grad_atol": 1e-8}
BALANCERS = (None, "contiguous", "head_tail", "ptrr", "per_document", "locality")


class Layer(NamedTuple):
    batch: int
    heads: tuple[int, int]
    q_len: int
    kv_len: int
    mask: Mask
    score: Score


@st.composite
def layers(draw: Any) -> Layer:
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    q_len = draw(st.integers(1, 90))
    kv_len = draw(st.sampled_from([q_len, draw(st.integers(1, 90))]))
    blocks = draw(st.sampled_from([(8, 8), (16, 16), (8, 16), (16, 8), (13, 13)]))
    heads = kv_heads * group
    many = draw(st.sampled_from([1, heads])), draw(st.sampled_from([1, batch]))
    mod = draw(st.sampled_from(["causal", "window", "documents", "bits"]))
    if mod == "documents" and q_len == kv_len:
        cuts = [sorted({0, q_len, *draw(st.lists(st.integers(0, q_len), max_size=4))}) for _ in range(batch)]
        lengths = [[b - a for a, b in itertools.pairwise(row)] for row in cuts]
        widest = max(map(len, lengths))
        rows = [row + [0] * (widest - len(row)) for row in lengths]
        mod_fn, many = and_masks(causal(), document(lengths=rows)), (1, batch)
    elif mod == "bits":
        g = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        bits = torch.rand(batch, heads, q_len, kv_len, generator=g) < draw(st.sampled_from([0.05, 0.5]))
        mod_fn, many = (lambda b, h, q, kv: bits[b, h, q, kv]), (heads, batch)
    else:
        mod_fn = (
            causal()
            if mod == "causal"
            else sliding_window(draw(st.integers(0, 30)), draw(st.integers(0, 30)))
        )
    mask = create_block_mask(mod_fn, many[1], many[0], q_len, kv_len, BLOCK_SIZE=blocks)
    slopes = torch.linspace(0.1, 1, heads, dtype=torch.float64, requires_grad=True)
    score = Score(lambda s, b, h, q, kv: s - slopes[h] * (q - kv).abs() * (1 + b), (slopes,))
    return Layer(batch, (heads, kv_heads), q_len, kv_len, mask, draw(st.sampled_from([Score(None), score])))


def tensors(layer: Layer) -> list[torch.Tensor]:
    shapes = (
        (layer.heads[0], layer.q_len, 4),
        (layer.heads[1], layer.kv_len, 4),
        (layer.heads[1], layer.kv_len, 6),
    )
    g = torch.Generator().manual_seed(1)
    return [torch.randn(layer.batch, *s, generator=g, dtype=torch.float64).requires_grad_() for s in shapes]


SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
ANY_CASE = given(layers(), st.sampled_from([1, 2, 3, 4, 5, 8]), st.sampled_from(BALANCERS))
pytestmark = pytest.mark.usefixtures("cpu_engine")


@pytest.mark.filterwarnings("ignore:.*heads cannot be divided")
@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(SHARED, max_examples=20)
@ANY_CASE
def test_any_schedule_is_the_oracle(
    schedule: str, layer: Layer, world_size: int, balancer: str | None
) -> None:
    check(schedule, layer, world_size, balancer)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*heads cannot be divided")
@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(SHARED, max_examples=300)
@ANY_CASE
def test_any_schedule_is_the_oracle_in_many_cases(
    schedule: str, layer: Layer, world_size: int, balancer: str | None
) -> None:
    check(schedule, layer, world_size, balancer)


def check(schedule: str, layer: Layer, world_size: int, balancer: str | None) -> None:
    qkv = tensors(layer)
    plan = make_plan(layer.mask, world_size=world_size, rank=0, balancer=balancer, schedule=schedule)
    agree(simulated(qkv, plan, layer.score), oracle(qkv, layer.mask, layer.score), **CLOSE)


@pytest.mark.filterwarnings("ignore:in natural order")
@settings(SHARED, max_examples=25)
@given(layers(), st.data())
def test_pieces_of_any_length_in_order_are_the_oracle(layer: Layer, data: Any) -> None:
    qkv = tensors(layer)
    world_size = data.draw(st.sampled_from([1, 2, 3, 5]))

    def cut(x: torch.Tensor) -> list[torch.Tensor]:
        inner = st.lists(st.integers(0, x.shape[2]), min_size=world_size - 1, max_size=world_size - 1)
        edges = [0, *sorted(data.draw(inner)), x.shape[2]]
        return [x[:, :, a:b] for a, b in itertools.pairwise(edges)]

    q, k = cut(qkv[0]), cut(qkv[1])
    v = list(qkv[2].split([x.shape[2] for x in k], 2))
    outs, lses = simulate(world_size).flex_attention(
        q, k, v, layer.score.mod, layer.mask, enable_gqa=True, return_lse=True
    )
    got = differentiate(torch.cat(outs, 2), torch.cat(lses, 2), qkv, layer.score.wants)
    agree(got, oracle(qkv, layer.mask, layer.score), **CLOSE)

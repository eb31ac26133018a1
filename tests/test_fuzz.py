"""Any call is dense attention: every pair of factors, and random cases from a grammar.

The factors are engine (CPU, interpreted kernels), mask, score_mod, schedule, world, balancer, heads, pass,
dtype, layout and shapes, see :class:`tests.cases.Case`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.cases import DTYPES, LAYOUTS, PASSES, Case, Expression, case_of, check, named, pairs, spread
from tests.compat import torch_mods
from tests.zoo import BALANCERS, MASKS, SCORES

pytestmark = [pytest.mark.filterwarnings("ignore:in natural order"), pytest.mark.usefixtures("in_pieces")]
FACTORS: dict[str, Any] = {
    "mask": tuple(MASKS),
    "score": tuple(SCORES),
    "schedule": ("auto", "allgather", "ring", "fetch", "ulysses", "ulysses+ring"),
    "world": (1, 2, 3, 4, 6),
    "balancer": (*BALANCERS, "any pieces"),
    "loss": PASSES,
    "dtype": DTYPES,
    "heads, group": ((2, 1), (1, 4), (3, 2), (2, 2)),
    "batch, first_row": ((1, 0), (2, 0), (3, 0), (3, 1)),
    "length, kv_length": ((40, 40), (37, 37), (21, 34), (34, 21), (5, 5)),  # the last: one block
    "dims": ((8, 8), (3, 16), (16, 1), (1, 5)),
    "block": (8, 13, (8, 16), (16, 4), (32, 5)),
    "own_lists": ((False, False), (True, False), (False, True)),
    "form": ("compact", "torch's", "without lists"),
    "layout": LAYOUTS,
    "sinks": (False, True),
    "scale": (None, 0.3, -0.2, 0.0),
}
CPU = pytest.mark.parametrize("engine", ["cpu"], indirect=True)
KERNELS = pytest.mark.parametrize("engine", ["kernels"], indirect=True)

APART = ("mask", "score")  # these two need most of the rows, since they are paired with each other
PAIRS = [case_of(row, seed) for seed, row in enumerate(pairs(FACTORS, APART))]
SMALL = (
    FACTORS
    | {  # for interpreted kernels
        "world": (2, 1, 3),
        "length, kv_length": ((24, 24), (19, 30), (30, 19)),
        "heads, group": ((2, 1), (1, 3)),
        "batch, first_row": ((1, 0), (2, 0), (2, 1)),
        "loss": PASSES[1:],  # tests/kernels has calls without a backward pass
        "dims": ((40, 8), (3, 16), (16, 1), (1, 24)),  # two of the head dims have two pieces
        "options": (
            {},
            {"USE_TMA": True},
            {"FUSED_BACKWARD": True},
            {"PACK_GQA": True, "SPLIT_KV": 2},
            {"FLIP": True, "maxnreg": 128},  # a limit on registers, which no answer depends on
            {"FLIP": True, "FUSED_BACKWARD": True},
            dict.fromkeys(("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), 16),
            {"FUSED_BACKWARD": True, "USE_TMA": True, "PACK_GQA": True, "SPLIT_KV": 3, "BLOCK_N": 16},
        ),
    }
)
EACH = spread(SMALL | {"world": (2, 1)}, len(MASKS))
# The cases of torch's flex attention tests: each score once, with few values of the other factors.
OF_TORCH = {
    "mask": tuple(torch_mods.MASKS),
    "score": tuple(torch_mods.SCORES),
    "world": (1, 2),
    "batch, first_row": ((1, 0), (2, 1)),
    "heads, group": ((2, 1), (1, 2)),
    "block": (16, (8, 16)),
}
TORCHS, TORCHS_SMALL = (
    [
        replace(case, dtype=torch.float64) if case.score in torch_mods.FLOAT64 else case
        for case in spread(factors | OF_TORCH | worlds, len(torch_mods.SCORES))
    ]
    for factors, worlds in ((FACTORS, {}), (SMALL, {"world": (1,)}))
)


@pytest.mark.sample(50)
@CPU
@pytest.mark.parametrize("case", named([*PAIRS, *TORCHS]))
@pytest.mark.bar(12)
def test_every_pair_of_factors(engine: str, case: Case) -> None:
    check(case)


@pytest.mark.long
@CPU
@pytest.mark.parametrize("case", named([case_of(row, seed) for seed, row in enumerate(pairs(FACTORS))]))
@pytest.mark.bar(12)
def test_every_pair_of_factors_and_every_mask_with_every_score(engine: str, case: Case) -> None:
    check(case)


@pytest.mark.sample(30)
@KERNELS
@pytest.mark.parametrize("case", named([*EACH, *TORCHS_SMALL]))
def test_every_factor_in_kernels(engine: str, case: Case) -> None:
    check(case)


@pytest.mark.long
@KERNELS
@pytest.mark.parametrize("case", named([case_of(row, seed) for seed, row in enumerate(pairs(SMALL, APART))]))
@pytest.mark.bar(1)
def test_every_pair_of_factors_in_kernels(engine: str, case: Case) -> None:
    check(case)


@pytest.mark.nightly
@KERNELS
@pytest.mark.parametrize("case", named([case_of(row, seed) for seed, row in enumerate(pairs(SMALL))]))
def test_every_pair_of_factors_and_every_mask_with_every_score_in_kernels(engine: str, case: Case) -> None:
    check(case)


@pytest.mark.sample(2)
@CPU
@pytest.mark.parametrize("schedule", FACTORS["schedule"])
def test_gradients_of_keys_that_many_ranks_read(engine: str, schedule: str) -> None:
    """Each rank returns its part of the gradients of keys, whose places differ between batch rows."""
    documents = ("or", ("causal documents of rows", 6), ("pieces", 39))
    check(Case(documents, "distances", schedule, world=4, balancer="ptrr", batch=3, block=4))


# -- random cases -----------------------------------------------------------------------------------------


def masks(depth: int) -> st.SearchStrategy[Expression]:
    """Draw masks of the zoo, combined with ``and``, ``or`` and ``not``."""
    leaf = st.tuples(st.sampled_from(list(MASKS)), st.integers(0, 1000))
    if not depth:
        return leaf
    part = masks(depth - 1)
    return st.one_of(
        leaf, st.tuples(st.just("not"), part), st.tuples(st.sampled_from(["and", "or"]), part, part)
    )


@st.composite
def cases(draw: st.DrawFn, longest: int) -> Case:
    length, dtype, batch = (
        draw(st.integers(1, longest)),
        draw(st.sampled_from(DTYPES)),
        draw(st.integers(1, 3)),
    )
    some = {
        name: draw(st.sampled_from(FACTORS[name]))
        for name in ("score", "schedule", "balancer", "loss", "layout")
    }
    return Case(
        mask=draw(masks(2)),
        world=draw(st.integers(1, 8)),
        batch=batch,
        first_row=draw(st.integers(0, batch - 1)),
        heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        length=length,
        kv_length=draw(st.one_of(st.just(length), st.integers(1, longest))),
        dims=(draw(st.sampled_from([1, 3, 7, 16, 24, 40])), draw(st.sampled_from([1, 5, 16, 40]))),
        dtype=dtype,
        own_lists=draw(st.tuples(st.booleans(), st.booleans())),
        form=draw(st.sampled_from(FACTORS["form"])),
        block=draw(st.sampled_from([4, 8, 13, 16, 32, 40, (8, 16), (16, 8), (16, 32), (32, 5)])),
        sinks=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.3, 1.0, -0.2])),
        size=draw(st.sampled_from([1.0, 30.0])) if dtype.itemsize == 8 else 1.0,
        seed=draw(st.integers(0, 1 << 20)),
        **some,
    )


SAMPLE = settings(phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck))


@CPU
@settings(SAMPLE, max_examples=settings().max_examples // 2)
@given(case=cases(longest=70))
def test_a_drawn_case_has_the_dense_answer(engine: str, case: Case) -> None:
    check(case)


@pytest.mark.nightly
@CPU
@settings(SAMPLE, max_examples=4000)
@given(case=cases(longest=250))
def test_many_drawn_cases_have_the_dense_answer(engine: str, case: Case) -> None:
    check(case)


@pytest.mark.nightly
@KERNELS
@settings(SAMPLE, max_examples=150)
@given(case=cases(longest=120))
def test_many_drawn_cases_in_kernels_have_the_dense_answer(engine: str, case: Case) -> None:
    check(case)

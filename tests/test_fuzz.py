"""Any call is dense attention: every pair of factors, and random cases from a grammar.

The factors are mask, score_mod, schedule, world, balancer, heads, pass, dtype, layout and shapes, see
:class:`tests.cases.Case`. These are cases of the CPU engine and drawn ones; tests/kernels/test_cases.py has
those of the kernels.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.cases import DTYPES, FACTORS, Case, Expression, case_of, check, named, of_torch, pairs
from tests.zoo import MASKS

pytestmark = [pytest.mark.filterwarnings("ignore:.*in natural order"), pytest.mark.usefixtures("in_pieces")]
CPU = pytest.mark.parametrize("engine", ["cpu"], indirect=True)
KERNELS = pytest.mark.parametrize("engine", ["kernels"], indirect=True)

APART = ("mask", "score")  # these two need most of the rows, since they are paired with each other
PAIRS = [case_of(row, seed) for seed, row in enumerate(pairs(FACTORS, APART))]
OF_TORCH = of_torch(FACTORS)


@pytest.mark.sample(50)
@CPU
@pytest.mark.parametrize("case", named([*PAIRS, *OF_TORCH]))
@pytest.mark.bar(12)
def test_every_pair_of_factors(engine: str, case: Case) -> None:
    check(case)


@pytest.mark.long
@CPU
@pytest.mark.parametrize("case", named([case_of(row, seed) for seed, row in enumerate(pairs(FACTORS))]))
@pytest.mark.bar(12)
def test_every_pair_of_factors_and_every_mask_with_every_score(engine: str, case: Case) -> None:
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

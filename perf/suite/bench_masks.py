"""`pytest perf/suite/bench_masks.py`: times mask construction, in closed form and traced, against torch's.

pytest-benchmark shows each time as a ratio to the fastest of its group. The tests assert ratios within one
run: against torch where its Q x KV table fits in memory, and of 1M tokens to 64K.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask as torch_builder
from tritoncp.perf.suite.timing import shortest_seconds

from tritoncp.api.masks import create_block_mask
from tritoncp.planning.problem import Problem

SMALL, MIDDLE, LARGE = 16384, 1 << 16, 1 << 20


pytestmark = pytest.mark.usefixtures("one_core")


# Keys of planning.problem.MASKS.
NAMES = {
    "causal": "causal",
    "documents": "corpus",
    "window": "window",
    "prefix-lm": "prefix",
    "documents-window": "corpus-window",
}


@cache
def forms(name: str, tokens: int) -> tuple[Any, Any]:
    """Return a mask as a closed form and as a plain mask_mod."""
    problem = Problem(NAMES[name], tokens)
    return problem.closed_form(), problem.plain_mod(torch.device("cpu"))


@pytest.mark.parametrize("form", ["closed form", "traced", "torch"])
@pytest.mark.parametrize("name", NAMES)
def test_small(benchmark: Any, name: str, form: str) -> None:
    benchmark.group = f"{SMALL} tokens, {name}"
    closed, plain = forms(name, SMALL)
    if form == "torch":
        benchmark.pedantic(lambda: torch_builder(plain, 1, 1, SMALL, SMALL, device="cpu"), rounds=2)
    else:
        mod = closed if form == "closed form" else plain
        benchmark.pedantic(lambda: create_block_mask(mod, 1, 1, SMALL, SMALL), rounds=10, warmup_rounds=1)


@pytest.mark.parametrize("form", ["closed form", "traced"])
@pytest.mark.parametrize("name", NAMES)
def test_large(benchmark: Any, name: str, form: str) -> None:
    benchmark.group = f"{LARGE} tokens, {form}"
    mod = forms(name, LARGE)[form == "traced"]
    mask = benchmark.pedantic(lambda: create_block_mask(mod, 1, 1, LARGE, LARGE), rounds=3, warmup_rounds=1)
    benchmark.extra_info["MiB"] = mask.nbytes / 2**20
    assert mask.nbytes <= 16 << 20


@pytest.mark.parametrize("name", NAMES)
def test_many_times_quicker_than_torchs_eager_builder_with_the_same_blocks(name: str) -> None:
    closed, plain = forms(name, SMALL)
    torch_seconds = shortest_seconds(lambda: torch_builder(plain, 1, 1, SMALL, SMALL, device="cpu"), 2)
    for mod, times in ((closed, 100), (plain, 20)):
        mask = create_block_mask(mod, 1, 1, SMALL, SMALL)
        assert mask.runs == create_block_mask(plain, 1, 1, SMALL, SMALL).runs
        duration = shortest_seconds(partial(create_block_mask, mod, 1, 1, SMALL, SMALL))
        assert torch_seconds > times * duration, (
            f"{name}: {duration * 1e3:.2f} ms, torch {torch_seconds * 1e3:.0f} ms"
        )


@pytest.mark.parametrize("form", ["closed form", "traced"])
@pytest.mark.parametrize("name", NAMES)
def test_sixteen_times_the_tokens_take_about_sixteen_times_as_long(name: str, form: str) -> None:
    durations = []
    for tokens in (MIDDLE, LARGE):
        mod = forms(name, tokens)[form == "traced"]
        create_block_mask(mod, 1, 1, tokens, tokens)
        durations.append(shortest_seconds(partial(create_block_mask, mod, 1, 1, tokens, tokens)))
    assert durations[1] < 32 * durations[0], (
        f"{name}, {form}: {durations[0] * 1e3:.1f} ms for 64K, {durations[1] * 1e3:.1f} for 1M"
    )

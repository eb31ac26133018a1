"""`pytest perf/suite/bench_masks.py`: times mask construction, in closed form and traced, against torch's.

pytest-benchmark shows each time as a ratio to the fastest of its group. The tests assert ratios within one
run: against torch where its Q x KV table fits in memory, and of 1M tokens to 64K.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask as torch_builder

from tritoncp.api.masks import create_block_mask
from tritoncp.masks.closed_forms import causal, document, prefix_lm, sliding_window
from tritoncp.masks.mask_mod import MaskFn
from tritoncp.perf.studies.balance import corpus_lengths

SMALL, MIDDLE, LARGE = 16384, 1 << 16, 1 << 20
WINDOW, PREFIX = 1023, 5000


pytestmark = pytest.mark.usefixtures("one_core")


@cache
def ids(tokens: int) -> Tensor:
    """Return the document number of each token of a packed corpus."""
    lengths = corpus_lengths(tokens)
    return torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.as_tensor(lengths))


def forms(tokens: int) -> dict[str, tuple[MaskFn, MaskFn]]:
    """Return each mask as a closed form and as a plain mask_mod."""
    document_ids = ids(tokens)
    same_document = document(ids=document_ids)
    return {
        "causal": (causal(), lambda b, h, q, kv: q >= kv),
        "documents": (
            causal() & same_document,
            lambda b, h, q, kv: (q >= kv) & (document_ids[q] == document_ids[kv]),
        ),
        "window": (sliding_window(WINDOW), lambda b, h, q, kv: (q >= kv) & (q - kv <= WINDOW)),
        "prefix-lm": (prefix_lm(PREFIX), lambda b, h, q, kv: (q >= kv) | (kv < PREFIX)),
        "documents-window": (
            same_document & sliding_window(WINDOW),
            lambda b, h, q, kv: (q >= kv) & (document_ids[q] == document_ids[kv]) & (q - kv <= WINDOW),
        ),
    }


NAMES = list(forms(SMALL))


def seconds(call: Callable[[], Any], times: int = 3) -> float:
    """Return the shortest of several times of a call, in seconds."""
    durations = []
    for _ in range(times):
        begin = time.process_time()
        call()
        durations.append(time.process_time() - begin)
    return min(durations)


@pytest.mark.parametrize("form", ["closed form", "traced", "torch"])
@pytest.mark.parametrize("name", NAMES)
def test_small(benchmark: Any, name: str, form: str) -> None:
    benchmark.group = f"{SMALL} tokens, {name}"
    closed, plain = forms(SMALL)[name]
    if form == "torch":
        benchmark.pedantic(lambda: torch_builder(plain, 1, 1, SMALL, SMALL, device="cpu"), rounds=2)
    else:
        mod = closed if form == "closed form" else plain
        benchmark.pedantic(lambda: create_block_mask(mod, 1, 1, SMALL, SMALL), rounds=10, warmup_rounds=1)


@pytest.mark.parametrize("form", ["closed form", "traced"])
@pytest.mark.parametrize("name", NAMES)
def test_large(benchmark: Any, name: str, form: str) -> None:
    benchmark.group = f"{LARGE} tokens, {form}"
    mod = forms(LARGE)[name][form == "traced"]
    mask = benchmark.pedantic(lambda: create_block_mask(mod, 1, 1, LARGE, LARGE), rounds=3, warmup_rounds=1)
    benchmark.extra_info["MiB"] = mask.nbytes / 2**20
    assert mask.nbytes <= 16 << 20


@pytest.mark.parametrize("name", NAMES)
def test_many_times_quicker_than_torchs_eager_builder_with_the_same_blocks(name: str) -> None:
    closed, plain = forms(SMALL)[name]
    torch_seconds = seconds(lambda: torch_builder(plain, 1, 1, SMALL, SMALL, device="cpu"), 2)
    for mod, times in ((closed, 100), (plain, 20)):
        mask = create_block_mask(mod, 1, 1, SMALL, SMALL)
        assert mask.runs == create_block_mask(plain, 1, 1, SMALL, SMALL).runs
        duration = seconds(partial(create_block_mask, mod, 1, 1, SMALL, SMALL))
        assert torch_seconds > times * duration, (
            f"{name}: {duration * 1e3:.2f} ms, torch {torch_seconds * 1e3:.0f} ms"
        )


@pytest.mark.parametrize("form", ["closed form", "traced"])
@pytest.mark.parametrize("name", NAMES)
def test_sixteen_times_the_tokens_take_about_sixteen_times_as_long(name: str, form: str) -> None:
    durations = []
    for tokens in (MIDDLE, LARGE):
        mod = forms(tokens)[name][form == "traced"]
        create_block_mask(mod, 1, 1, tokens, tokens)
        durations.append(seconds(partial(create_block_mask, mod, 1, 1, tokens, tokens)))
    assert durations[1] < 32 * durations[0], (
        f"{name}, {form}: {durations[0] * 1e3:.1f} ms for 64K, {durations[1] * 1e3:.1f} for 1M"
    )

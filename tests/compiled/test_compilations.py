"""Training steps need few kernels beside those of the first one, if they differ in sizes and values only.

Triton's hook ahead of a compilation collects the keys of the kernels that a step needs, and keeps Triton from
compiling and launching them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from triton import knobs

import tritoncp
from tests.draws import few
from tritoncp import alibi, causal, create_block_mask, document, prefix_lm, sliding_window
from tritoncp.executor import compiled_kernels
from tritoncp.kernels.backward import delta_kernel, dkdv_kernel, dq_kernel
from tritoncp.kernels.forward import forward_kernel
from tritoncp.kernels.selected.attention import selected_dq_kernel, selected_forward_kernel
from tritoncp.kernels.selected.gradients import partial_dkdv_kernel, sum_dkdv_kernel
from tritoncp.kernels.selected.probabilities import selected_probabilities_kernel

HEADS, KV_HEADS, DIM = 4, 2, 64
LEAST = 128  # fewer queries have other tiles; all tiles divide it
Kernels = set[tuple[str, str]]
KERNELS: tuple[Any, ...] = (
    forward_kernel, delta_kernel, dq_kernel, dkdv_kernel, selected_forward_kernel, selected_dq_kernel,
    partial_dkdv_kernel, sum_dkdv_kernel, selected_probabilities_kernel,
)  # fmt: skip

lengths = st.integers(1, 6).map(lambda n: n * LEAST)
batches = st.integers(1, 3)
integers = st.one_of(st.sampled_from([0, 1, 7, 16]), st.integers(0, 2**20))
floats = st.sampled_from([0.0, 1.0, 2.5, -1.0])
sizes = st.integers(1, 700).map(lambda n: 2 * n + 1)  # of tables, which have no multiples of 16


@contextmanager
def needed_kernels() -> Iterator[Kernels]:
    """Yield the set of (name, key) of the kernels that launches need, none of which is compiled or run."""
    found: Kernels = set()
    caches = {fn: fn.device_caches for fn in KERNELS}  # other tests may have compiled the kernels already

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        found.add((fn.name.rpartition(".")[2], key))
        return True  # do not compile

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, note
    for fn in KERNELS:
        fn.device_caches = defaultdict(fn.create_binder)
    try:
        with compiled_kernels("sm_90", check=False):
            yield found
    finally:
        knobs.runtime.jit_cache_hook = before
        for fn, cache in caches.items():
            fn.device_caches = cache


def step(
    length: int, batch: int, mask: Any = None, score: Any = None, kv_heads: int = KV_HEADS, **options: Any
) -> Kernels:
    """Return the kernels of a forward and backward pass."""
    shapes = [(batch, heads, length, DIM) for heads in (kv_heads * HEADS // KV_HEADS, kv_heads, kv_heads)]
    q, k, v = (torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    with needed_kernels() as found:
        out = tritoncp.flex_attention(q, k, v, score, mask, enable_gqa=True, **options)
        out = out[0] if isinstance(out, tuple) else out
        torch.autograd.backward(out, torch.zeros_like(out))
    return found


def documents(draw: st.DataObject, length: int) -> list[int]:
    """Draw lengths of documents, from one document on."""
    ends = sorted({*draw.draw(st.lists(st.integers(1, length - 1), max_size=5)), length})
    return [end - begin for begin, end in zip([0, *ends], ends)]


def document_ids(draw: st.DataObject, length: int, batch: int) -> Tensor:
    """Draw the document of each token of each batch row."""
    rows = [torch.tensor(documents(draw, length)) for _ in range(batch)]
    return torch.stack([torch.arange(len(row)).repeat_interleave(row) for row in rows])


def packed(draw: st.DataObject, length: int, batch: int) -> Any:
    ids = document_ids(draw, length, batch)
    return create_block_mask(
        lambda b, h, q, kv: (q >= kv) & (ids[b, q] == ids[b, kv]), batch, None, length, length
    )


def strided(draw: st.DataObject, length: int, batch: int) -> Any:
    """A mask that no intervals describe, so that kernels run the mask_mod."""
    ids, n, far = document_ids(draw, length, batch), draw.draw(integers), draw.draw(integers)
    return create_block_mask(
        lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) & ((q - kv + n) % (h + 3) != 1) | (kv - q == far),
        batch, HEADS, length, length,
    )  # fmt: skip


MASKS: dict[str, Callable[[st.DataObject, int, int], Any]] = {
    "full": lambda draw, length, batch: None,
    "causal": lambda draw, length, batch: causal(),
    "window": lambda draw, length, batch: sliding_window(draw.draw(integers)),
    "prefix": lambda draw, length, batch: prefix_lm(draw.draw(st.integers(0, length))),
    "documents": lambda draw, length, batch: causal() & document(lengths=documents(draw, length)),
    "documents, not causal": lambda draw, length, batch: document(lengths=documents(draw, length)),
    "tensors of documents": packed,
    "mask_mod in the kernel": strided,
}


def relative_bias(draw: st.DataObject) -> Any:
    table = torch.zeros(HEADS, draw.draw(sizes), requires_grad=True)
    return lambda s, b, h, q, kv: s + table[h, q - kv]


def offset_bias(draw: st.DataObject) -> Any:
    """The first offset has kernels of its own."""
    table, n = torch.zeros(HEADS, draw.draw(sizes), requires_grad=True), draw.draw(integers)
    return lambda s, b, h, q, kv: s + table[h, q - kv + 2 * n]


def bucket_bias(draw: st.DataObject) -> Any:
    """As in T5, with a row of the table for each bucket."""
    table = torch.zeros(draw.draw(sizes), HEADS, requires_grad=True)
    return lambda s, b, h, q, kv: s + table[(q - kv).clamp(min=0).clamp(max=7), h]


def compared(draw: st.DataObject) -> Any:
    near, factor, addend = (draw.draw(integers) for _ in range(3))
    return lambda s, b, h, q, kv: torch.where((q - kv > near) & (kv >= 0), s * factor, s + addend)


def capped(draw: st.DataObject) -> Any:
    factor, cap = draw.draw(floats), draw.draw(floats)
    return lambda s, b, h, q, kv: torch.tanh(s * factor / cap) * cap


def per_position(draw: st.DataObject) -> Any:
    """Values by query and by key, of more rows than the call has."""
    rows = torch.zeros(3, 700 + draw.draw(sizes), requires_grad=True)
    cols = torch.zeros(700 + draw.draw(sizes), requires_grad=True)
    return lambda s, b, h, q, kv: s + rows[b, q] * cols[kv]


SCORES: dict[str, Callable[[st.DataObject], Any]] = {
    "alibi": lambda draw: alibi(torch.ones(HEADS, requires_grad=True)),
    "size of a table": relative_bias,
    "offsets": offset_bias,
    "buckets of a table": bucket_bias,
    "integers in comparisons": compared,
    "floats": capped,
    "positions": per_position,
}
FOUND: dict[str, Kernels] = {}  # by all steps of a law
STEP = {"forward_kernel", "delta_kernel", "dq_kernel", "dkdv_kernel"}
SEVERAL = {  # kernels of masks that need several of each pass
    "mask_mod in the kernel": 7,  # it captures a tensor with one row, or several, of the batch
    "window": 10,  # bounds of 1, multiples of 16, others
    "prefix": 7,  # a batch may have no masked block
    "documents, not causal": 7,  # the same
}


def check(name: str, kernels: Kernels, most: int = len(STEP)) -> None:
    """Compare the number of kernels that all steps need with ``most``."""
    assert {name for name, _ in kernels} == STEP and len(kernels) == len(STEP)
    found = FOUND.setdefault(name, set())
    found |= kernels
    assert len(found) <= most


@pytest.mark.parametrize("name", MASKS)
@few(4)
@given(draw=st.data())
def test_other_sizes_and_masks_of_a_kind_compile_nothing(name: str, draw: st.DataObject) -> None:
    length, batch = draw.draw(lengths), draw.draw(batches)
    check(name, step(length, batch, MASKS[name](draw, length, batch)), SEVERAL.get(name, len(STEP)))


@few(4)
@given(length=st.integers(LEAST, 700), batch=batches)
def test_lengths_are_of_three_kinds(length: int, batch: int) -> None:
    """Multiples of the tile, other multiples of 16, others."""
    check("lengths", step(length, batch, causal()), 3 * len(STEP))


@pytest.mark.parametrize("name", SCORES)
@few(4)
@given(draw=st.data())
def test_other_captures_compile_nothing(name: str, draw: st.DataObject) -> None:
    most = 2 * len(STEP) - 1 if name == "offsets" else len(STEP)  # delta has no score_mod
    check(name, step(draw.draw(lengths), draw.draw(batches), causal(), SCORES[name](draw)), most)


@few(4)
@given(length=lengths, batch=batches, heads=st.sampled_from([1, KV_HEADS, HEADS]))
def test_other_sizes_of_a_selection_compile_nothing(length: int, batch: int, heads: int) -> None:
    """Probabilities are computed in parts: each batch row and head of the selection alone. Sums of dK and dV
    that take several launches need another kernel for the first and for the others."""
    indices = torch.zeros(batch, heads, length, 16, dtype=torch.int32)
    aux = tritoncp.SelectionAuxRequest(probabilities=True)
    found = FOUND.setdefault(f"{heads} heads of the selection", set())
    found |= step(length, batch, causal(), selected=tritoncp.Selection(indices), return_aux=aux)
    assert len({name for name, _ in found}) == 6 and len(found) <= 8


def test_keys_that_exceed_a_cache_compile_nothing() -> None:
    """Those of 16 heads do so from about 4,000 keys on, and programs start in another order."""
    assert step(LEAST, 1, causal(), kv_heads=16) == step(8192, 1, causal(), kv_heads=16)


def test_other_dtypes_and_head_dims_are_noticed() -> None:
    """The collected keys do tell kernels apart."""
    q = torch.zeros(1, HEADS, 256, DIM, dtype=torch.bfloat16)
    calls = [q, q.half(), q[..., :32], q[:, :1]]
    found: list[Kernels] = []
    for x in calls:
        with needed_kernels() as kernels:
            tritoncp.flex_attention(x, x[:, :1], x[:, :1], None, causal(), enable_gqa=True)
        found.append(kernels)
    assert all(len(kernels) == 1 for kernels in found)
    assert len(set.union(*found)) == len(calls)

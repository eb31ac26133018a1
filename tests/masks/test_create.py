"""The public create_block_mask: torch's signature, few evaluated pairs, little memory."""

import inspect
import random

import pytest
import torch
from torch.nn.attention import flex_attention as flex

import tritoncp
from tritoncp import masks
from tritoncp.masks.classification.tile_bounds import trace
from tritoncp.masks.mask import capture_device

S = 1 << 20
IDS = torch.arange(300).repeat_interleave(S // 300 + 1)[:S]


def test_the_signature_is_torchs() -> None:
    public, torchs = (
        inspect.signature(f).parameters for f in (tritoncp.create_block_mask, flex.create_block_mask)
    )
    shared = list(torchs)[: len(public)]
    assert list(public) == shared
    assert all(public[name].default == torchs[name].default for name in shared)


@pytest.mark.parametrize(
    ("mod", "form"),
    [
        (lambda b, h, q, kv: q >= kv, tritoncp.causal()),
        (lambda b, h, q, kv: (q >= kv) & (q - kv <= 1000), tritoncp.sliding_window(1000)),
        (lambda b, h, q, kv: (q >= kv) | (kv < 5000), tritoncp.prefix_lm(5000)),
        (lambda b, h, q, kv: (q >= kv) & (IDS[q] == IDS[kv]), tritoncp.causal() & tritoncp.document(ids=IDS)),
        (
            lambda b, h, q, kv: (q >= kv) & (IDS[q] == IDS[kv]) & (q - kv <= 1024),
            tritoncp.document(ids=IDS) & tritoncp.sliding_window(1024),
        ),
    ],
)
def test_a_million_tokens_take_few_evaluations_and_little_memory(
    mod, form, evaluated_pairs: list[int]
) -> None:
    """Traced and closed forms have the same runs; of 2^40 pairs none is evaluated but the first."""
    traced = tritoncp.create_block_mask(mod, None, None, S, S)
    assert evaluated_pairs == [1, 1]  # a trace, and a pair that raises the errors of a mask_mod
    closed = tritoncp.create_block_mask(form, None, None, S, S)
    assert traced.runs == closed.runs
    assert traced.nbytes <= closed.nbytes <= 16 << 20


def test_a_mask_that_cannot_be_traced_is_evaluated_in_bounded_chunks(
    monkeypatch: pytest.MonkeyPatch, evaluated_pairs: list[int]
) -> None:
    def opaque(b, h, q, kv):
        return torch.ops.aten.ge.Tensor(q, kv) if random.random() >= 0 and not reads_value(q) else q >= kv

    def reads_value(q) -> bool:
        return bool(torch._C._functorch.is_batchedtensor(q)) or q.item() < 0  # .item() cannot be traced

    monkeypatch.setattr("tritoncp.masks.classification.classify.PAIRS", 1 << 12)
    assert trace(opaque) is None
    mask = masks.create_block_mask(opaque, None, None, 400, 300, BLOCK_SIZE=64)
    assert mask.runs == masks.create_block_mask(tritoncp.causal(), None, None, 400, 300, BLOCK_SIZE=64).runs
    assert max(evaluated_pairs) <= 1 << 12


def test_a_mask_is_made_where_its_tensors_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    on_cpu, on_meta = torch.zeros(S), torch.zeros(S, device="meta")
    assert capture_device(lambda b, h, q, kv: on_cpu[q] > on_meta[kv]).type == "meta"
    assert capture_device(lambda b, h, q, kv: on_cpu[q] > kv).type == "cpu"

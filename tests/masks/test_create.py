"""The public create_block_mask: torch's signature, few evaluated pairs, little memory."""

import inspect
import io
import sys

import pytest
import torch
from torch.nn.attention import flex_attention as flex

import tritoncp
from tritoncp import masks
from tritoncp.masks.classification import progress
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


@pytest.mark.sample(2)
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


def opaque(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """A causal mask_mod that cannot be traced, since it reads a value."""
    is_batched = torch._C._functorch.is_batchedtensor(q)
    return q >= kv if is_batched or q.item() >= 0 else kv


def opaque_mask() -> masks.Mask:
    """Make a mask that is evaluated in each of its 9 blocks."""
    assert trace(opaque) is None
    return masks.create_block_mask(opaque, None, None, 48, 48, BLOCK_SIZE=16)


def test_a_mask_that_cannot_be_traced_is_evaluated_in_bounded_chunks(
    monkeypatch: pytest.MonkeyPatch, evaluated_pairs: list[int]
) -> None:
    monkeypatch.setattr("tritoncp.masks.classification.classify.PAIRS", 1 << 12)
    assert trace(opaque) is None
    mask = masks.create_block_mask(opaque, None, None, 400, 300, BLOCK_SIZE=64)
    assert mask.runs == masks.create_block_mask(tritoncp.causal(), None, None, 400, 300, BLOCK_SIZE=64).runs
    assert max(evaluated_pairs) <= 1 << 12


def test_a_mask_mod_is_evaluated_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    on_cpu, on_meta = torch.zeros(S), torch.zeros(S, device="meta")
    assert capture_device(lambda b, h, q, kv: on_cpu[q] > on_meta[kv]).type == "meta"
    assert capture_device(lambda b, h, q, kv: on_cpu[q] > kv).type == "cpu"


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A bar would appear at once, after each block."""
    monkeypatch.setattr("tritoncp.masks.classification.progress.DELAY", -1.0)
    monkeypatch.setattr("tritoncp.masks.classification.classify._BLOCKS", 1)
    for name in ("RANK", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return monkeypatch


def test_a_terminal_shows_a_bar_of_a_slow_mask(
    late: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left: list[int] = []
    real = progress.Bar.show
    late.setattr(progress.Bar, "show", lambda bar, n: left.append(n) or real(bar, n))
    late.setattr(sys, "stderr", Terminal())
    mask = opaque_mask()
    text = sys.stderr.getvalue()
    assert left == sorted(left, reverse=True) and {*left} == {*range(10)}
    assert mask.runs == masks.create_block_mask(tritoncp.causal(), None, None, 48, 48, BLOCK_SIZE=16).runs
    assert "create_block_mask 48 x 48" in text and "56%" in text and "100%" in text
    assert text.endswith("\x1b[2K"), "the bar is removed"
    assert not capsys.readouterr().out, "stdout belongs to the caller"


@pytest.mark.parametrize("quiet", ["file", "rank", "quick"])
def test_no_bar_is_shown_without_a_terminal_on_other_ranks_and_for_quick_masks(
    quiet: str, late: pytest.MonkeyPatch
) -> None:
    late.setattr(sys, "stderr", io.StringIO() if quiet == "file" else Terminal())
    late.setenv("RANK", "3" if quiet == "rank" else "0")
    late.setattr(progress, "DELAY", 1e9 if quiet == "quick" else -1.0)
    opaque_mask()
    assert not sys.stderr.getvalue()

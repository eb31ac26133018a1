"""Forward kernels: masks by every route, score_mods, scales, statistics."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

import tritoncp
from tests.kernels.support.harness import F64, agree, check, close, cotangents, qkv, run, same
from tritoncp import Mask, causal, create_block_mask, full_mask, not_, sliding_window
from tritoncp.core.records import replace

TILE = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_M1": 16, "BLOCK_N1": 16, "BLOCK_M2": 16, "BLOCK_N2": 16}


def from_kinds(rows: list[list[int]], mask_mod: Any = None) -> Mask:
    """A mask of 16 x 16 blocks: 0 for the mask_mod, 1 for all pairs, 3 for none."""
    kinds = torch.tensor(rows, device="cpu")[None, None]
    lists = []
    for kind in (0, 1):
        listed = kinds == kind
        lists += [listed.sum(-1).int(), listed.int().argsort(dim=-1, descending=True, stable=True).int()]
    sizes = 16 * kinds.shape[2], 16 * kinds.shape[3]
    return tritoncp.from_block_mask(BlockMask.from_kv_blocks(*lists, 16, mask_mod, sizes))


# -- rows that see nothing ----------------------------------------------------------------------------

EMPTY_ROWS = {
    "no block listed": from_kinds([[3, 1, 3], [3, 3, 3], [1, 3, 1]]),
    "hidden by the mask_mod": from_kinds(
        [[0, 3, 0], [0, 1, 3], [3, 0, 3]], lambda b, h, q, kv: (q + kv) % 40 < 3
    ),
    "outside every interval": create_block_mask(not_(causal()), None, None, 48, 48, BLOCK_SIZE=16),
    "window past the end": create_block_mask(sliding_window(3), None, None, 48, 20, BLOCK_SIZE=16),
    "nothing at all": from_kinds([[3, 3, 3]] * 3),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", EMPTY_ROWS)
@pytest.mark.bar(3)
def test_rows_that_see_nothing_are_zero(name: str) -> None:
    mask = EMPTY_ROWS[name]
    blind = ~mask.to_dense()[0, 0].any(1)
    assert bool(blind.any())
    x = qkv(mask.q_len, mask.kv_len, heads=2, kv_heads=1)
    got = check(x, mask)
    assert bool((got.out[:, :, blind] == 0).all() and (got.grads[0][:, :, blind] == 0).all())
    assert bool(
        (got.lse[:, :, blind] == -math.inf).all() and (got.max_scores[:, :, blind] == -math.inf).all()
    )
    unseen = ~mask.to_dense()[0, 0].any(0)
    assert all(bool((g[:, :, unseen] == 0).all()) for g in got.grads[1:])


@pytest.mark.bar(4)
def test_a_score_mod_may_hide_whole_rows_and_leading_tiles() -> None:
    """It may do so in full blocks too, where no other pairs are masked: the first tiles of a row are all
    -inf."""

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.where((q % 7 == 3) | (kv < q // 2), -math.inf, s * 2)

    x = qkv(48, heads=2)
    for mask in (full_mask(48, 48, block=16), create_block_mask(causal(), None, None, 48, 48, BLOCK_SIZE=16)):
        got = check(x, mask, lambda: score)
        assert bool((got.lse[:, :, 3::7] == -math.inf).all() and (got.out[:, :, 3::7] == 0).all())


# -- scores -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter evaluates hidden pairs too
@pytest.mark.bar(5)
@pytest.mark.bits  # an error of one bit in a score is one of many in its exponential
def test_large_scores_do_not_overflow() -> None:
    x = qkv(40, dtype=F64)
    got = check(x._replace(q=x.q * 3000), create_block_mask(causal(), None, None, 40, 40, BLOCK_SIZE=32))
    assert got.max_scores.max() > 1000


# -- masks that differ between batch rows and heads ---------------------------------------------------

FACTORS = {"shared": (1, 1), "by batch row": (2, 1), "by head": (1, 2), "by both": (2, 2)}


@pytest.mark.sample(2)
@pytest.mark.parametrize("listed", ["shared", "by both"])
@pytest.mark.parametrize("reads", FACTORS)
def test_masks_by_batch_row_and_head(reads: str, listed: str) -> None:
    """A mask_mod that reads more than its block lists know; tests/test_fuzz.py has lists of rows or heads."""
    (rb, rh), (B, H) = FACTORS[reads], FACTORS[listed]

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q + (9 * b if rb > 1 else 0) >= kv + (5 * h if rh > 1 else 0)

    check(qkv(28, batch=2, heads=2, kv_heads=1), create_block_mask(mask_mod, B, H, 28, 28, BLOCK_SIZE=16))


# -- routes -------------------------------------------------------------------------------------------

WINDOWS = {
    "causal": causal(),
    "left": sliding_window(17),
    "both": sliding_window(5, 20),
    "right only": sliding_window(0, 30),
    "anti-causal": sliding_window(0, -1),
}


def routes(mask: Mask) -> dict[str, Mask]:
    return {
        "window": mask,
        "interval": replace(mask, window=None),
        "mod": replace(mask, window=None, interval=None, reads=(True, True)),
    }


def decided(mask: Mask) -> tuple[str, bool]:
    tables = tritoncp.make_plan(mask).tables("cpu", 1, 1)
    return tables.mask, tables.window is not None


@pytest.mark.sample(1)
@pytest.mark.bits
@pytest.mark.parametrize("name", WINDOWS)
def test_window_table_and_mask_mod_give_the_same_bits(name: str) -> None:
    """Whole tiles in the same order by three routes: positions alone, runs and intervals, the mask_mod."""
    routed = routes(create_block_mask(WINDOWS[name], None, None, 48, 48, BLOCK_SIZE=16))
    assert [decided(mask) for mask in routed.values()] == [
        ("interval", True),
        ("interval", False),
        ("mod", False),
    ]
    x = qkv(48)
    start = cotangents(x)
    want = check(x, routed["window"], start=start, **TILE)
    for route in ("interval", "mod"):
        same(run(x, routed[route], start=start, **TILE), want)


@pytest.mark.sample(1)
@pytest.mark.bits
@pytest.mark.parametrize("lengths", [(41, 41), (20, 50), (50, 20)], ids=str)
@pytest.mark.parametrize("name", WINDOWS)
def test_routes_agree_at_ragged_ends(name: str, lengths: tuple[int, int]) -> None:
    """The window route may treat a ragged tile as full which the table masks: the order differs, not the
    answer."""
    x = qkv(*lengths, dtype=F64)
    start = cotangents(x)
    routed = routes(create_block_mask(WINDOWS[name], None, None, *lengths, BLOCK_SIZE=16))
    want = check(x, routed["window"], start=start, **TILE)
    by_table = run(x, routed["interval"], start=start, **TILE)
    agree(by_table, want)
    same(run(x, routed["mod"], start=start, **TILE), by_table)


def test_block_lists_win_over_the_mask_mod() -> None:
    """An unlisted block is invisible and a full one unmasked, even where the mask_mod disagrees."""
    check(qkv(48), from_kinds([[1, 3, 0], [0, 1, 3], [3, 0, 1]], lambda b, h, q, kv: q >= kv))
    check(qkv(48), from_kinds([[1, 3, 0], [0, 1, 3], [3, 0, 1]], lambda b, h, q, kv: (q * kv) % 3 == 1))


# -- statistics ---------------------------------------------------------------------------------------


def test_max_scores_have_no_gradient_and_follow_the_score_mod() -> None:
    q, k, v = (t.requires_grad_() for t in qkv(20))
    aux = AuxRequest(max_scores=True)
    _, plain = tritoncp.flex_attention(q, k, v, causal(), return_aux=aux)
    _, lifted = tritoncp.flex_attention(q, k, v, lambda s, b, h, i, j: s + 3, causal(), return_aux=aux)
    assert plain.lse is None and not plain.max_scores.requires_grad
    close(lifted.max_scores, plain.max_scores + 3, "max_scores")

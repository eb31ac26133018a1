"""Few rows: query heads packed into a tile, keys shared by several programs. Neither changes the answer."""

import itertools
import math
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import tritoncp
from tests.device import DEVICE, LONG, ON_GPU, REPEATS
from tests.kernels.support.harness import (
    F32,
    F64,
    QKV,
    Results,
    agree,
    close,
    engine_of,
    forward,
    keys_between,
    new_state,
    oracle,
    qkv,
    run,
    same,
    single,
)
from tritoncp import and_masks, causal, create_block_mask, document, full_mask, sliding_window
from tritoncp.call.engine_factory import ENGINES
from tritoncp.kernels import engine, tiles
from tritoncp.kernels.engine import TritonEngine
from tritoncp.kernels.operands import Mods, count_tiles
from tritoncp.kernels.tile_rules import architecture
from tritoncp.mods import Mod
from tritoncp.planning.step_tables import ForwardStep
from tritoncp.reference.dense import dense_attention

ROWS, KEYS, HEADS = 5, 75, 3
TILE = {"BLOCK_M": 16, "BLOCK_N": 16}


def block_mask(mod: Any, heads: int = 1, rows: int = ROWS, block: int = 16):
    return create_block_mask(mod, 1, heads, rows, KEYS, BLOCK_SIZE=block)


def by_head(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q * 7 + kv * 5 + h * 3) % 11 < 4


MASKS = {
    "full, ragged": lambda: full_mask(ROWS, KEYS, block=32),
    "window": lambda: block_mask(sliding_window(2, 50)),
    "window of one edge": lambda: block_mask(sliding_window(-1, 60)),
    "intervals": lambda: block_mask(and_masks(sliding_window(-1, 66), document(lengths=[2, 71, 2]))),
    "mask_mod that reads the head": lambda: block_mask(by_head),
    "rows that see nothing": lambda: block_mask(lambda b, h, q, kv: (q % 3 == 1) & (kv > q * 9)),
    "nothing": lambda: block_mask(lambda b, h, q, kv: kv < 0),
}


def relative(table: Tensor, slopes: Tensor):
    return lambda s, b, h, q, kv: s * slopes[b, h] + table[h, (q - kv) % 5]


def answers(x: QKV, mask: Any, score: Any = None, **options: Any) -> Results:
    return run(x, mask, score and (lambda: score), start=None, **options)


def right(got: Results, x: QKV, mask: Any, score: Any = None) -> None:
    agree(got, oracle(x, mask, score and (lambda: score), start=None))


OPTIONS: dict[str, dict[str, Any]] = {
    "packed": {"PACK_GQA": True},
    "split": {"SPLIT_KV": 2, **TILE},
    "both": {"PACK_GQA": True, "SPLIT_KV": 3, "BLOCK_M": 16, "BLOCK_N": 32, "USE_TMA": True},
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MASKS)
def test_packed_and_split_rows_equal_dense_attention(name: str, options: str) -> None:
    """With a group of three a tile of sixteen rows holds five rows of each head and one unused row."""
    x = qkv(ROWS, KEYS, heads=HEADS, kv_heads=1, dtype=F64)
    right(answers(x, MASKS[name](), **OPTIONS[options]), x, MASKS[name]())


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "tile"),
    [(1, 1, 1, 16), (1, 8, 1, 16), (16, 8, 1, 128), (33, 10, 2, 128), (33, 7, 1, 64), (2, 18, 1, 16)],
)
def test_any_group_and_number_of_rows(rows: int, heads: int, kv_heads: int, tile: int) -> None:
    """Heads that fill a tile, several tiles, or more than one tile of heads."""
    x = qkv(rows, KEYS, heads=heads, kv_heads=kv_heads)
    mask = block_mask(sliding_window(-1, KEYS - rows), rows=rows)
    right(answers(x, mask, PACK_GQA=True, BLOCK_M=tile, BLOCK_N=64), x, mask)


def test_more_programs_than_tiles() -> None:
    """There are two pieces of channels; programs that see no key leave empty states."""
    x, mask = qkv(2, KEYS, batch=2, dim=24, v_dim=40), block_mask(sliding_window(3, 9), rows=2)
    right(answers(x, mask, SPLIT_KV=9, **TILE), x, mask)


@pytest.mark.sample(3)
@pytest.mark.parametrize("options", ["packed", "both"])
@pytest.mark.parametrize("name", ["intervals", "mask_mod that reads the head"])
def test_scores_see_the_batch_row_and_head_of_each_row(name: str, options: str) -> None:
    x, mask = qkv(2, KEYS, batch=2, heads=6, kv_heads=2, dtype=F64), MASKS[name]().rows(0, 2)
    score = relative(torch.randn(6, 5, dtype=F64), torch.randn(2, 6, dtype=F64))
    right(answers(x, mask, score, **OPTIONS[options]), x, mask, score)


def test_a_score_mod_may_hide_all_keys_of_a_program() -> None:
    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.where((kv < 40) | (q % 3 == 0) | (h == 2), -math.inf, s)

    x, mask = qkv(ROWS, KEYS, heads=3, kv_heads=1), MASKS["full, ragged"]()
    got = answers(x, mask, score, PACK_GQA=True, SPLIT_KV=3, **TILE)
    right(got, x, mask, score)
    assert bool((got[0][:, 2] == 0).all() and (got[1][:, :, ::3] == -math.inf).all())


@pytest.mark.bits
def test_packed_rows_have_the_results_of_single_rows() -> None:
    """Results are equal bit for bit if the tiles of keys and their order are the same."""
    x = qkv(ROWS, KEYS, heads=HEADS, kv_heads=1)
    for name in ("full, ragged", "intervals", "mask_mod that reads the head"):
        mask = MASKS[name]()
        same(answers(x, mask, PACK_GQA=True, **TILE), answers(x, mask, PACK_GQA=False, **TILE))


@pytest.mark.bits
def test_shared_keys_give_the_same_bits_every_time() -> None:
    x, mask = qkv(ROWS, KEYS), MASKS["window"]()
    first = answers(x, mask, SPLIT_KV=3, **TILE)
    for _ in range(REPEATS):
        same(answers(x, mask, SPLIT_KV=3, **TILE), first)
    same(answers(x, mask, SPLIT_KV=1, **TILE), answers(x, mask, **TILE))


@pytest.mark.parametrize("rows", [1, 16])
def test_few_rows_of_the_rule_equal_dense_attention(rows: int) -> None:
    """On a GPU its multiprocessors share the keys of a row, and four heads are one tile."""
    x = qkv(rows, 2 * LONG, heads=4, kv_heads=1, dim=128, dtype=torch.bfloat16)
    mask = create_block_mask(sliding_window(-1, 2 * LONG - rows), 1, 1, rows, 2 * LONG)
    args = launch(rows, 4, 1, mask, arch=architecture(DEVICE), keys=2 * LONG, device=str(DEVICE)).args
    assert (args["PACK"], (args["splits"] or 1) > 1) == ((4, True) if ON_GPU else (1, False))
    first = answers(x, mask)
    right(first, x, mask)
    for _ in range(REPEATS):
        same(answers(x, mask), first)


@pytest.mark.bits
def test_any_strides_and_wide_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    x, mask = qkv(3, KEYS, batch=2, heads=2, kv_heads=1), MASKS["intervals"]().rows(0, 3)
    both = {"PACK_GQA": True, "SPLIT_KV": 2}
    want = answers(x, mask, **both)
    turned = QKV(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in x))
    shared = x.q[:, :1].expand_as(x.q)
    same(answers(turned, mask, **both), want)
    right(answers(x._replace(q=shared), mask, **both), x._replace(q=shared), mask)
    monkeypatch.setattr(tiles, "WIDE_STRIDE", 0)
    same(answers(x, mask, **both), want)


def test_no_keys_and_no_queries() -> None:
    out, lse, top, _ = answers(qkv(3, 0, heads=2, kv_heads=1), full_mask(3, 0), PACK_GQA=True, SPLIT_KV=2)
    assert bool((out == 0).all() and (lse == -math.inf).all() and (top == -math.inf).all())
    assert answers(qkv(0, 9), full_mask(0, 9), SPLIT_KV=2)[0].shape == (1, 1, 0, 16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_rounds_once(dtype: torch.dtype) -> None:
    """Partial states are float32: shared keys are as near the float64 oracle, but for the last bit."""
    x, mask = qkv(ROWS, KEYS, heads=2, kv_heads=1, dtype=dtype), MASKS["window"]()
    want = dense_attention(*(t.to(F64) for t in x), mask)
    errors = []
    plain: dict[str, Any] = {}
    for options in (plain, {"PACK_GQA": True, "SPLIT_KV": 4}):
        out, lse, *_ = answers(x, mask, **options, **TILE)
        assert out.dtype == dtype
        close(lse, want.lse, "lse")
        errors.append((out.to(F64) - want.out).abs().max().item())
    assert errors[1] <= 1.5 * errors[0]


# -- states -------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("name", ["intervals", "rows that see nothing"])
def test_keys_in_steps_count_once(name: str, split: int) -> None:
    """Steps from state to state, shared by two programs, count the previous state once."""
    mask = MASKS[name]()
    x = qkv(ROWS, KEYS, heads=HEADS, kv_heads=1, dtype=F64, v_dim=40)
    engine = engine_of(x, mask.mask_mod, PACK_GQA=True, SPLIT_KV=split, BLOCK_M=16, BLOCK_N=16)
    state, ends = new_state(x), list(pairwise([0, 21, 64, KEYS]))
    for i, (begin, end) in enumerate(ends):
        part, last = QKV(x.q, x.k[:, :, begin:end], x.v[:, :, begin:end]), i + 1 == len(ends)
        result = forward(
            engine, part, keys_between(single(mask), begin, end), state=state, load_state=i > 0,
            store_state=not last,
        )  # fmt: skip
        assert last or bool(result[0].isnan().all() and result[1].isnan().all())
    for got, want in zip(result, dense_attention(*x, mask)):
        close(got, want, name)


# -- choice of tiles and splits -----------------------------------------------------------------------


def launch(rows: int, heads: int, kv_heads: int, mask: Any = None, *, arch: str = "sm_90", batch: int = 1,
           keys: int = 4096, device: str = "cpu", first: int = 0, dtype: torch.dtype = torch.bfloat16,
           **options: Any) -> Any:  # fmt: skip
    """Prepare the kernel launch for this architecture, of queries from ``first`` on; the first of two."""
    x = [torch.empty(batch, n, s, 128, dtype=dtype, device=device)
         for n, s in ((heads, rows), (kv_heads, keys), (kv_heads, keys))]  # fmt: skip
    tables = single(mask or full_mask(rows, keys)).tables("cpu" if device == "meta" else device, batch, heads)
    tables = replace(tables, q_first=first) if first else tables
    out, lse = torch.empty_like(x[0]), torch.empty(batch, heads, rows, dtype=F32, device=device)
    return TritonEngine(Mods(), 1.0, options, arch=arch).forward(ForwardStep(*x, tables, out, lse)).parts[0]


def tiles_and_heads(prepared: Any) -> tuple[int, int]:
    """Return the number of tiles and of heads of a launch's programs."""
    heads, tiles, _ = prepared.grid
    assert prepared.args["order"].heads is None
    return tiles, heads


@pytest.mark.parametrize(
    ("shape", "pack", "tile", "programs"),
    [
        ((1, 32, 8), 4, 64, (1, 8)),
        ((16, 32, 8), 4, 64, (1, 8)),  # a tile has 64 rows of all heads
        ((17, 32, 8), 4, 128, (1, 8)),
        ((64, 32, 8), 4, 128, (2, 8)),
        ((100, 32, 8), 1, 128, (1, 32)),  # packing does not reduce three tiles of 32 rows and a part of one
        ((128, 32, 8), 1, 128, (1, 32)),
        ((1000, 32, 8), 1, 128, (8, 32)),
        ((1, 8, 8), 1, 64, (1, 8)),
        ((5, 6, 2), 3, 64, (1, 2)),
        ((1, 300, 1), 128, 128, (1, 3)),
    ],
)
def test_rows_fill_tiles(
    shape: tuple[int, int, int], pack: int, tile: int, programs: tuple[int, int]
) -> None:
    prepared = launch(*shape)
    config = prepared.config  # as many keys as rows, in the tiles of few rows and in others
    assert (prepared.args["PACK"], config.BLOCK_M, config.BLOCK_N) == (pack, tile, tile)
    assert tiles_and_heads(prepared) == programs
    plain = launch(*shape, PACK_GQA=False)
    assert plain.args["PACK"] == 1 and tiles_and_heads(plain)[1] == shape[1]


def test_the_smallest_tiles_without_wgmma_have_16_rows() -> None:
    assert launch(1, 8, 8, arch="sm_80").config.BLOCK_M == 16
    assert launch(1, 8, 8, dtype=F32).config.BLOCK_M == 16
    assert launch(8, 32, 8, arch="sm_80").config.BLOCK_M == 32  # 8 rows of 4 heads


@pytest.mark.parametrize(
    ("block", "heads", "pack", "tile"),
    [
        (16, (8, 2), 4, 64),
        (16, (4, 2), 2, 64),
        (96, (2, 2), 1, 32),
    ],  # without packing, tiles divide the block
)
def test_blocks_of_few_rows_are_filled_too(block: int, heads: tuple[int, int], pack: int, tile: int) -> None:
    mask = create_block_mask(causal(), 1, 1, 480, 512, BLOCK_SIZE=(block, 128))
    prepared = launch(480, *heads, mask, keys=512)
    assert (prepared.args["PACK"], prepared.config.BLOCK_M) == (pack, tile)
    assert tiles_and_heads(prepared) == (480 * pack // tile, 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("side", ["q", "kv"])
def test_every_program_of_a_dense_slot_or_a_window_has_rows(side: str) -> None:
    """Other masks have the tiles of a block for each slot, which a program finds by division."""
    for n, block, mod in itertools.product((5, 64, 65, 100, 200), (64, 128), (causal(), by_head)):
        size, blocks = {"q": ((n, 9), (block, 32)), "kv": ((9, n), (32, block))}[side]
        tables = single(create_block_mask(mod, None, 1, *size, BLOCK_SIZE=blocks)).tables("cpu", 1, 1)
        for tile in (16, 32, 64, 128):
            of_rows = mod is not by_head or (n <= block and tile <= block)
            count = -(-n // tile) if of_rows else -(-n // block) * -(-block // tile)
            assert count_tiles(tables, side, tile) == count


def test_masks_of_each_head_are_not_packed() -> None:
    """Heads have separate tables; the results are the same, also if packing is requested."""
    mask = block_mask(by_head, heads=HEADS)
    assert launch(ROWS, HEADS, 1, mask, keys=KEYS, PACK_GQA=True).args["PACK"] == 1
    x = qkv(ROWS, KEYS, heads=HEADS, kv_heads=1)
    right(answers(x, mask, PACK_GQA=True, SPLIT_KV=2), x, mask)


@triton.jit
def first_head(score, b, h, q_idx, kv_idx, caps):
    if h == 0:
        score = tl.abs(score)
    return score


def test_hand_written_mods_are_given_one_head() -> None:
    x, plan = torch.randn(1, 2, 4, 16), tritoncp.make_plan(full_mask(4, 4))
    tritoncp.flex_attention(x, x, x, Mod.from_triton(first_head), plan)
    ((engine, _),) = ENGINES.of(plan.derived).values()
    assert engine.options["PACK_GQA"] is False


@pytest.mark.long
def test_programs_fill_the_device(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two for each multiprocessor, each with two tiles of the keys that any row sees; a whole tile of rows is
    never split, and the states of all programs stay small."""
    gpus("sm_90")
    monkeypatch.setattr(engine, "MAX_PARTIAL_BYTES", limit := 1 << 22)
    rng, chosen = random.Random(0), set()
    for _ in range(60):
        rows, keys, first = (
            rng.choice([1, 16, 64, 127, 128]),
            rng.choice([100, 4096, 32768]),
            128 * rng.randrange(9),
        )
        batch, heads = rng.choice([1, 4, 100]), rng.choice([(32, 8), (8, 8), (2, 1)])
        left, right = (rng.choice([-1, 0, 100, 2000]) for _ in range(2))
        mask = create_block_mask(sliding_window(left, right), 1, 1, rows, keys)
        prepared = launch(rows, *heads, mask, keys=keys, batch=batch, device="meta", first=first)
        splits, (config, pack) = prepared.args["splits"] or 1, (prepared.config, prepared.args["PACK"])
        begin = 0 if left < 0 else max(0, first - left)
        end = keys if right < 0 else min(keys, first + rows + right)
        tiles = -(-max(0, end - begin) // config.BLOCK_N)
        programs = -(-rows // (config.BLOCK_M // pack)) * heads[0] // pack * batch
        states = limit // (batch * heads[0] * rows * (128 + 2) * 4)
        assert splits == (1 if rows > 127 else max(1, min(264 // programs, tiles // 2, states)))
        chosen.add(splits)
    assert len(chosen) > 8
    assert launch(1, 32, 8, device="meta", invariant=True).args["splits"] is None
    for rows in (0, 128):
        assert launch(rows, 8, 2, device="meta", PACK_GQA=True).args["splits"] is None


def test_programs_of_a_group_share_keys_and_values_where_few_fill_the_device(
    gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each query head if there are fewer than two per multiprocessor for KV heads, and the
    partial sums stay small."""
    gpus("sm_90")
    step, chosen = TritonEngine(Mods(), 1.0, arch="sm_90"), set()
    invariant = TritonEngine(Mods(), 1.0, {"invariant": True}, arch="sm_90")
    for batch, (heads, kv_heads), keys in itertools.product(
        (1, 3, 33), ((8, 8), (8, 2), (33, 11), (4, 2)), (128, 1000, 1024, 11 * 1024)
    ):
        q, k = (
            torch.empty(batch, n, keys, 128, dtype=torch.bfloat16, device="meta") for n in (heads, kv_heads)
        )
        tables = single(full_mask(keys, keys)).tables("cpu", 1, 1)
        sums = 2 * 4 * batch * heads * keys * 128
        for limit in (sums - 1, sums):
            monkeypatch.setattr(engine, "MAX_PARTIAL_BYTES", limit)
            crowded = batch * kv_heads * -(-keys // step.config("dkdv", q, k, tables).BLOCK_N) >= 2 * 132
            group = 1 if crowded or sums > limit else heads // kv_heads
            assert step.split(q, k, tables) == group and invariant.split(q, k, tables) == 1
            chosen.add((crowded, group))
    assert chosen == {(True, 1), *((False, group) for group in range(1, 5))}


def test_interpreted_kernels_only_follow_the_options() -> None:
    assert launch(1, 32, 8, arch="interpreter", SPLIT_KV=2).args["PACK"] == 1
    prepared = launch(1, 32, 8, arch="interpreter")
    assert prepared.args["PACK"] == 1 and prepared.args["splits"] is None and prepared.config.BLOCK_M == 128

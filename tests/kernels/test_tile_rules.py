"""Kernel options: their names, their effects, their errors; and the error of a GPU that is too small."""

import math
from dataclasses import asdict, replace
from itertools import chain, product
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch.nn.attention.flex_attention import FlexKernelOptions
from triton.runtime.errors import OutOfResources

from tests.kernels.support.harness import check, cotangents, qkv, run, same, single
from tritoncp import full_mask
from tritoncp.analysis.resource_table import SHARED_BYTES
from tritoncp.kernels import tiles
from tritoncp.kernels.engine import TritonEngine
from tritoncp.kernels.launch import Launch
from tritoncp.kernels.operands import Mods
from tritoncp.kernels.options import LEFT_OUT, TileRequest, check_options, choose, option_names
from tritoncp.kernels.scores import Closure
from tritoncp.kernels.tile_rules import (
    MAX_HEAD_DIM,
    PASSES,
    Config,
    default,
    fit,
    gqa_pack_factor,
    pieces,
    selected,
    selected_partial,
    selected_rows,
)
from tritoncp.kernels.tiles import channel_range, channels

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "gfx942", "gfx950")


def chosen(kind: str, options: dict[str, Any], q_block: int = 128, kv_block: int = 128) -> Config:
    TritonEngine(Mods(), 1.0, options)
    return choose(TileRequest(kind, "sm_90", 128, torch.bfloat16, q_block, kv_block), options)


@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_architecture_and_dim_has_a_default(arch: str, kind: str) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for dim in (16, 64, 65, 80, 128, 192, 256, 264, 320, 448, 512, 576):
            config = default(kind, arch, dim, dtype)
            assert min(config.BLOCK_M, config.BLOCK_N) >= 16


def test_settings_for_the_rules_tiles_do_not_apply_to_other_tiles() -> None:
    """A limit on registers and a transposed product are chosen for tiles of one size."""
    small = TileRequest("dq", "sm_100", 64, torch.bfloat16, 128, 128)
    assert choose(small, {}).maxnreg == 256 and choose(small, {"num_stages": 3}).maxnreg == 256
    assert choose(small, {"BLOCK_N2": 64}).maxnreg is None
    wide = TileRequest("dkdv", "sm_90", 256, torch.bfloat16, 128, 128)
    assert choose(wide, {}).FLIP and not choose(wide, {"BLOCK_M1": 64}).FLIP
    assert choose(wide, {"BLOCK_M1": 64, "FLIP": True}).FLIP


def test_names_that_torch_knows_are_known(engine: str) -> None:
    x = qkv(24)
    numbers = {"BLOCK": 64, "num": 4, "kpack": 2, "matrix": 16, "waves": 2, "BACKEND": "AUTO"}
    values = {
        name: next((value for start, value in numbers.items() if name.startswith(start)), True)
        for name in FlexKernelOptions.__annotations__
    } | {"BLOCKS_ARE_CONTIGUOUS": True}
    for prefix in ("", "fwd_", "bwd_"):
        options = {prefix + name: value for name, value in values.items()}
        if prefix == "fwd_":  # the tiles of the backward pass, and the other way round
            options = {name: value for name, value in options.items() if name[-1] not in "12"}
        if prefix == "bwd_":
            options = {
                name: value for name, value in options.items() if name not in ("bwd_BLOCK_M", "bwd_BLOCK_N")
            }
        check(x, **options)


@pytest.mark.parametrize("option", LEFT_OUT)
def test_an_option_of_torch_without_effect_has_the_values_that_torch_takes(option: str) -> None:
    """And no others."""
    kind = get_type_hints(FlexKernelOptions).get(option, bool)  # torch's internal options are flags
    values = {bool: (True, False), int: (0, 3)}.get(kind) or get_args(kind)
    for prefix in ("", "fwd_", "bwd_"):
        for value in values:
            check_options({prefix + option: value})
        for value in ("nonsense", None, 2.5, [1], 7 if kind is not int else True):
            with pytest.raises(ValueError, match=f"kernel option {prefix}{option}=.* is needed"):
                check_options({prefix + option: value})


@pytest.mark.bits
def test_hints_change_nothing() -> None:
    flags = ("PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "OUTPUT_LOGSUMEXP")
    hints = {**dict.fromkeys(flags, True), "WRITE_DQ": False, "BACKEND": "TRITON"}
    for kind in PASSES:
        assert chosen(kind, hints) == chosen(kind, {})
    x = qkv(40)
    start = cotangents(x)
    plain, hinted = run(x, start=start), run(x, start=start, **hints)
    same(plain, hinted)


def tile(kind: str, options: dict[str, Any]) -> tuple[int, ...]:
    config = chosen(kind, options)
    return config.BLOCK_M, config.BLOCK_N, config.num_warps, config.num_stages


@pytest.mark.parametrize(
    ("kind", "prefix", "suffix"), [("forward", "fwd_", ""), ("dq", "bwd_", "2"), ("dkdv", "bwd_", "1")]
)
def test_tiles_go_to_their_pass(kind: str, prefix: str, suffix: str) -> None:
    options = {f"BLOCK_M{suffix}": 32, f"BLOCK_N{suffix}": 16, "num_warps": 2, "num_stages": 1}
    assert tile(kind, options) == (32, 16, 2, 1)
    for other in set(PASSES) - {kind}:
        assert chosen(other, options) == replace(chosen(other, {}), num_warps=2, num_stages=1, maxnreg=None)
    prefixed = {prefix + name: value for name, value in options.items()}
    assert tile(kind, prefixed) == (32, 16, 2, 1)
    assert tile(kind, {**prefixed, "num_warps": 16}) == (32, 16, 2, 1)  # the prefixed name is stronger
    strangers = [other for other in PASSES if option_names(other)["num_warps"][1] != prefix + "num_warps"]
    assert all(chosen(other, {prefix + "num_warps": 2}) == chosen(other, {}) for other in strangers)


def test_a_score_mod_of_unknown_loads_has_the_tiles_of_the_heaviest() -> None:
    x = qkv(8, dim=128, dtype=torch.bfloat16)
    tables = single(full_mask(128, 128)).tables("cpu", 1, 1)
    configs = [
        TritonEngine(Mods(score=Closure(object()), **loads), 1.0, arch="sm_100").config(
            "forward", x.q, x.v, tables
        )
        for loads in ({}, {"score_loads": 2}, {"score_loads": 1})
    ]
    assert configs[0] == configs[1] != configs[2]
    assert all(config.USE_TMA for config in configs)  # unless tensors cannot be copied by descriptor


def measured(kind: str, config: Config) -> dict[str, Any]:
    options = {"CONFIGS": ((kind, tuple(asdict(config).items())),)}
    TritonEngine(Mods(), 1.0, options)
    return options


@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "descriptors"])
def test_measured_tiles_replace_the_rule_and_options_replace_both(kind: str, tma: bool) -> None:
    best = Config(64, 64, 2, 4, not tma, tma)
    options = measured(kind, best)
    assert chosen(kind, options) == best
    assert all(chosen(other, options) == chosen(other, {}) for other in {*PASSES, "fused"} - {kind})
    assert chosen(kind, options | {"num_warps": 4}) == replace(best, num_warps=4)
    # Fewer than 64 rows of scores, in dQ keys, are not flipped on Hopper
    assert chosen(kind, options, 16, 128) == replace(best, BLOCK_M=16, FLIP=tma and kind == "dq")


@pytest.mark.parametrize("kind", PASSES)
def test_tiles_measured_with_descriptors_are_not_used_for_pointers(kind: str) -> None:
    """Where strides or the user forbid descriptors, the rule has tiles that leave registers for addresses."""
    call = kind, "sm_90", 128, torch.bfloat16
    rule = default(*call, tma=False)
    copied, plain = (Config(32, 16, 2, 4, tma) for tma in (True, False))
    request = TileRequest(*call, 128, 128, tma=False)
    assert choose(request, measured(kind, copied)) == rule
    assert chosen(kind, measured(kind, copied) | {"USE_TMA": False}) == rule
    assert choose(request, measured(kind, plain)) == plain


POWERS = [16, 32, 64, 128, 256]


def test_tiles_divide_the_masks_blocks() -> None:
    """The largest tile that divides the block is chosen; if none does, the smallest that covers it, or the
    largest."""
    config = chosen("forward", {"BLOCK_M": 256, "BLOCK_N": 256}, 64, 96)
    assert (config.BLOCK_M, config.BLOCK_N) == (64, 32)
    for largest, block in product(POWERS, range(1, 520)):
        allowed = [tile for tile in POWERS if tile <= largest]
        even = [tile for tile in allowed if block % tile == 0]
        assert fit(largest, block) == max(even, default=min([*(t for t in allowed if t >= block), largest]))


def test_channels_are_cut_into_the_two_smallest_pieces_that_hold_them() -> None:
    """One piece is used if it wastes no more, and no piece is wider than requested if two suffice."""
    for dim, widest in product(range(1, 257), (32, 64, 128)):
        limit = widest if dim <= 2 * widest else 128
        pairs = [(a, b) for a in POWERS if a <= limit for b in (0, *POWERS) if b <= a and a + b >= dim]
        assert pieces(dim, widest) == (*min(pairs, key=lambda pair: (sum(pair), pair[1])), 1)


def test_wide_heads_are_cut_into_equal_pieces_and_a_smaller_one() -> None:
    """The last piece has the fewest channels that hold the rest; ranges of pieces are all of them in
    order."""
    for dim in range(257, MAX_HEAD_DIM + 1):
        first, second, count = pieces(dim)
        rest = dim - (dim - 1) // 128 * 128
        last = min(power for power in POWERS if power >= rest)
        assert [first] * count + [second] * bool(second) == [128] * ((dim - 1) // 128) + [last]
        whole = channels(dim, 128)
        for parts in range(1, count + 1):
            ranges = [channel_range(whole, part, parts) for part in range(parts)]
            widths = [[r.first] * r.count + [r.second] * bool(r.second) for r in ranges]
            assert [*chain(*widths)] == [first] * count + [second] * bool(second)
            assert [r.skip for r in ranges] == [sum(map(len, widths[:part])) for part in range(parts)]
            assert max(map(len, widths)) - min(map(len, widths)) <= 1


@pytest.mark.parametrize("kind", PASSES)
def test_tiles_of_selected_keys_of_wide_heads_fit(kind: str) -> None:
    """tcgen05 takes 64 rows, whose sums of 512 channels and scores exceed tensor memory. A tile of q, dout, k
    and v each lies in shared memory."""
    for arch, dim in product(("sm_80", "sm_86", "sm_90", "sm_100"), range(264, MAX_HEAD_DIM + 1, 8)):
        rows = selected_rows(arch, dim, torch.bfloat16)
        first, second, count = pieces(dim)
        partial = selected_partial(arch, rows, 2048, dim, torch.bfloat16)
        for config in (selected(kind, arch, rows, dim, torch.bfloat16), partial):
            assert config.BLOCK_M == rows < 64
            elements = 2 * (config.BLOCK_M + config.BLOCK_N) * (count * first + second)
            assert 2 * elements <= SHARED_BYTES[arch]


def test_query_heads_share_tiles_where_that_takes_a_tenth_fewer() -> None:
    for rows, group, tile in product(range(1, 130), range(1, 20), (16, 64, 128)):
        pack = min(group, tile)
        apart, together = (
            group * math.ceil(rows / tile),
            math.ceil(group / pack) * math.ceil(rows / (tile // pack)),
        )
        assert gqa_pack_factor(rows, group, tile) == (pack if 10 * together <= 9 * apart else 1)


class TooLarge:
    """A kernel for which this GPU has too little shared memory."""

    def __init__(self, kind: str) -> None:
        self.__name__ = f"{kind}_kernel"

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def refuse(**args: Any) -> None:
            raise OutOfResources(required=262144, limit=101376, name="shared memory")

        return refuse


@pytest.mark.parametrize("kind", PASSES)
def test_options_that_do_not_fit_the_gpu_say_what_is_needed(kind: str) -> None:
    launch = Launch(TooLarge(kind), (1, 1, 1), [], Config(256, 128, 8, 4), [])
    with pytest.raises(ValueError, match=r"262144 bytes of shared memory.*101376") as error:
        launch()
    assert str(error.value).endswith("pass smaller ones in kernel_options")
    strongest = {field: both[1] for field, both in option_names(kind).items()}
    for field, value in {"BLOCK_M": 256, "BLOCK_N": 128, "num_warps": 8, "num_stages": 4}.items():
        assert f"{strongest[field]}={value}" in str(error.value)


@pytest.mark.parametrize(
    ("kind", "config"),
    [("dq", Config(16, 16, 8, 1)), *((f"selected_{name}", Config(32, 32, 8, 1)) for name in PASSES)],
)
def test_tiles_that_no_option_makes_smaller_ask_for_other_tensors(kind: str, config: Config) -> None:
    with pytest.raises(ValueError, match=r"262144 bytes.*101376; pass tensors of 16 bits, or with fewer"):
        Launch(TooLarge(kind), (1, 1, 1), [], config, [])()


@pytest.mark.bits
@pytest.mark.bar(9)
def test_wide_offsets_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x = qkv(40, dim=24)
    start = cotangents(x)
    narrow = run(x, start=start)
    monkeypatch.setattr(tiles, "WIDE_STRIDE", 0)
    wide = run(x, start=start)
    same(narrow, wide)


@pytest.mark.bar(9)
def test_strides_whose_products_pass_31_bits_are_wide() -> None:
    """The strides of rows and channels; a tile has 256 of each."""
    for place, stride in product(range(4), ((1 << 22) - 1, 1 << 22)):
        strides = [stride if d == place else 1 for d in range(4)]
        x = torch.empty_strided((1, 1, 2, 2), strides, device="meta")
        assert (tiles.view(x).wide is not None) is (place > 1 and stride * 512 >= 1 << 31)

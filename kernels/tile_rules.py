"""Default tile shapes: BLOCK_M, BLOCK_N, warps and stages of each kernel, by architecture and head dim.

Every default compiles without spills and fits in shared memory (``tests/kernels/test_offline.py``). Measured
tiles and the user's options win over the defaults, see :mod:`tritoncp.kernels.options`.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from tritoncp.core.environment import cpu_target
from tritoncp.kernels.toolchain import multiplies_transposed

PASSES = ("forward", "dq", "dkdv")
KINDS = (*PASSES, "few", "fused", "gluon", "specialized")  # of tiles
MAX_HEAD_DIM, MAX_V_HEAD_DIM = 576, 512  # of q and k, and of v


@dataclass(frozen=True)
class Config:
    """Tile shape of one launch: BLOCK_M query rows by BLOCK_N key rows.

    USE_TMA copies tiles by tensor descriptor if strides allow, which takes fewer instructions and keeps no
    addresses in registers. FLIP computes the scores of a backward pass transposed: wgmma takes 64 rows per
    group of four warps, so eight warps need 128 rows (of queries, in dK/dV). FLIP has no effect on Hopper if
    the transposed scores have fewer rows (`toolchain.flips_right`). maxnreg is Triton's limit of registers
    per thread; without a limit, ptxas sometimes spills to stay within 128 or 168.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int = 4
    num_stages: int = 2
    USE_TMA: bool = False
    FLIP: bool = False
    maxnreg: int | None = None

    def compiler(self) -> dict[str, Any]:
        """Compiler options of a launch, besides the constants of the kernel.

        >>> Config(128, 64, num_warps=8, num_stages=3).compiler()
        {'num_warps': 8, 'num_stages': 3, 'enable_fp_fusion': True}
        """
        options: dict[str, Any] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        # Fuses the scaling of scores into exp2's argument, which Triton does not do by default from 3.10 on.
        options["enable_fp_fusion"] = True
        return options | ({"maxnreg": self.maxnreg} if self.maxnreg else {})


def flipped_rows(kind: str, config: Config) -> int:
    """Rows of the transposed scores that FLIP computes: keys in dQ, else queries."""
    return config.BLOCK_N if kind == "dq" else config.BLOCK_M


def head_dim_fault(dim: int, of_values: bool = False) -> str | None:
    """Return which head dims are supported, and for a dim between two of them how to pad; None if ``dim`` is
    supported.

    >>> head_dim_fault(576), head_dim_fault(0)
    (None, '1 to 256 and multiples of 8 up to 576 are supported')
    >>> head_dim_fault(300, of_values=True)
    '1 to 256 and multiples of 8 up to 512 are supported: pad it with zeros to 304'
    """
    largest = MAX_V_HEAD_DIM if of_values else MAX_HEAD_DIM
    if 0 < dim <= 256 or (dim <= largest and dim % 8 == 0 and dim > 0):
        return None
    supported = f"1 to 256 and multiples of 8 up to {largest} are supported"
    return f"{supported}: pad it with zeros to {dim + -dim % 8}" if 0 < dim < largest else supported


def pieces(dim: int, widest: int = 128) -> tuple[int, int, int]:
    """Split a head dim into powers of two >= 16 that sum to at least ``dim``: (first, second, count) are
    ``count`` pieces of ``first`` channels and, unless it is 0, one of ``second``. Up to 256 channels are one
    or two pieces, each at most ``widest`` wide if two such pieces are enough; more are pieces of 128.

    Two pieces of 128 need fewer registers than one of 256, whose loads are all in flight at once.

    >>> [pieces(d) for d in (16, 40, 64, 80, 96, 128, 192, 256)]  # doctest: +NORMALIZE_WHITESPACE
    [(16, 0, 1), (32, 16, 1), (64, 0, 1), (64, 16, 1), (64, 32, 1), (128, 0, 1), (128, 64, 1),
     (128, 128, 1)]
    >>> [pieces(d, widest=64) for d in (96, 128, 192)]
    [(64, 32, 1), (64, 64, 1), (128, 64, 1)]
    >>> [pieces(d) for d in (264, 320, 344, 512, 576)]
    [(128, 16, 2), (128, 64, 2), (128, 0, 3), (128, 0, 4), (128, 64, 4)]
    """
    if dim > 2 * 128:
        count, rest = divmod(dim, 128)
        second = max(16, 1 << (rest - 1).bit_length()) if rest else 0
        return (128, 0, count + 1) if second == 128 else (128, second, count)
    widest = widest if dim <= 2 * widest else 128
    first = min(widest, max(16, 1 << (dim.bit_length() - 1)))
    if first >= dim:
        return first, 0, 1
    rest = max(16, 1 << (dim - first - 1).bit_length())
    return (first * 2, 0, 1) if rest == first < widest else (first, rest, 1)


def widest_piece(arch: str, dim: int, tile: Config) -> int:
    """Return the max width of a piece of ``dim`` channels in forward and dQ: half of them for mma.sync
    (sm_80, sm_86) if each warp has 16 rows or more.

    Triton lays warps along the longer side of a product, and lays out scores as the product that follows:
    with 64 rows of 128 channels, a row of scores would be spread over all warps, and its softmax would go
    through shared memory.  Halves also need fewer registers: forward of 64 channels spills without.

    >>> tiles = (128, Config(64, 64, 4)), (128, Config(64, 64, 8)), (64, Config(128, 64, 4))
    >>> [widest_piece("sm_80", *tile) for tile in tiles], widest_piece("sm_90", *tiles[0])
    ([64, 128, 32], 128)
    """
    syncs = arch != "interpreter" and family(arch) in ("sm_80", "sm_86")
    halved = syncs and 16 * tile.num_warps <= tile.BLOCK_M and 32 < dim <= 128
    return 1 << ((dim - 1).bit_length() - 1) if halved else 128


# Max width of a piece of values where specialized warps rescale acc, to which Triton gives 88 registers
# (without: forward of 128 channels spills 464 bytes, sm_100).
RESCALED_CHANNELS = 64


def sum_parts(arch: str, dim: int) -> int:
    """Return how many launches share the ``dim`` channels of a sum, each with scores of its own: two on
    sm_100 for more than 384, since its tensor memory has 512 columns, of which scores need some.

    >>> sum_parts("sm_100", 512), sum_parts("sm_100", 384), sum_parts("sm_90", 512)
    (2, 1, 1)
    """
    return 2 if dim > 384 and arch != "interpreter" and family(arch) == "sm_100" else 1


def fit(tile: int, block: int) -> int:
    """Fit a tile size to a mask block: return the max power of two that divides the block and is at most
    ``tile``. If none is >= 16, as for a block of 100 or 8, ragged tiles cover the block.

    >>> fit(128, 128), fit(128, 64), fit(64, 96), fit(128, 100), fit(64, 8)
    (128, 64, 32, 128, 16)
    """
    even = min(block & -block, tile)
    return even if even >= 16 else max(16, min(tile, 1 << (block - 1).bit_length()))


def gqa_pack_factor(rows: int, group: int, tile: int) -> int:
    """Choose how many of a group's query heads, with ``rows`` rows each, share a tile of ``tile`` rows: all
    that fit, if this saves at least a tenth of the tiles; else 1. (FlashAttention-3 packs by this rule.)

    >>> sizes = ((1, 4, 64), (64, 8, 128), (100, 4, 128), (1, 71, 64), (17, 3, 128))
    >>> [gqa_pack_factor(*size) for size in sizes]
    [4, 8, 1, 64, 3]
    """
    pack = min(group, tile)
    apart = group * -(-rows // tile)
    together = -(-group // pack) * -(-rows // (tile // pack))
    return pack if together <= 0.9 * apart else 1


def num_kv_splits(programs: int, tiles: int, processors: int) -> int:
    """Choose how many programs share the ``tiles`` tiles of keys that each of ``programs`` would read: enough
    to give every multiprocessor two (flex attention's rule), and each of them two tiles or more.

    >>> [num_kv_splits(programs, tiles, 132) for programs, tiles in ((8, 256), (8, 20), (200, 256), (8, 1))]
    [33, 10, 1, 1]
    """
    return max(1, min(2 * processors // max(1, programs), tiles // 2))


FEW = 64  # rows of all heads in a tile, up to which the tiles "few" are used
_Tiles = dict[str, dict[int, Config]]  # tiles of an architecture: kernel -> max head dim -> tiles
# Tiles of 16-bit inputs (registers: configs/resources.json).  sm_86 covers all GPUs with 99 KiB of shared
# memory, gfx942 all AMD GPUs (64 KiB).  Those of sm_80 and sm_90 are compared with torch's by executed counts
# (perf/NOTES.md).  Small tiles let two programs share a multiprocessor: one multiplies while the other
# computes its softmax.  Rows of "<kernel>, heavy" and "<kernel>, scored" are for calls with a score_mod, see
# `weight`, in place of the kernel's rows for these head dims, which spill as many bytes as the line says.
_RULES: dict[str, _Tiles] = {
    "sm_80": {
        "forward": {
            64: Config(128, 64, 4, 2),
            128: Config(128, 64, 8, 2),
            192: Config(64, 32, 4, 1),
            256: Config(128, 16, 8, 2),
            320: Config(32, 32, 8, 1),  # 64 rows: 4640 bytes, with a piece of 64 channels
            384: Config(64, 32, 8, 1),
            448: Config(32, 32, 8, 1),  # 6360 bytes
            512: Config(64, 32, 8, 1),
            576: Config(32, 32, 8, 1),
        },
        "forward, heavy": {64: Config(64, 64, 4, 2), 128: Config(64, 64, 4, 2)},  # 40, 8 bytes
        "few": {
            64: Config(64, 64, 4, 3),
            128: Config(64, 64, 4, 2),
            256: Config(64, 64, 8, 2),
            576: Config(32, 32, 8, 1),
        },
        "dq": {
            64: Config(64, 64, 4, 2),
            128: Config(128, 64, 8, 2),
            192: Config(32, 32, 4, 2),  # 64 rows: 296 bytes
            256: Config(64, 64, 8, 1),
            576: Config(32, 32, 8, 1),
        },
        "dq, heavy": {128: Config(64, 32, 4, 2), 256: Config(32, 32, 4, 2)},  # 248, 8 bytes (264 by 3.9)
        "dkdv": {
            64: Config(64, 64, 4, 2),
            128: Config(32, 128, 8, 2),
            192: Config(32, 32, 4, 2),
            256: Config(64, 64, 8, 1, FLIP=True),
            384: Config(32, 32, 8, 1),
            448: Config(32, 16, 8, 1),  # 32 keys: dK 16 bytes, and 8 of 576 channels
            512: Config(32, 32, 8, 1),
            576: Config(32, 16, 8, 1),
        },
    },
    "sm_86": {
        "forward": {
            64: Config(128, 64, 8, 3),
            128: Config(128, 32, 8, 2),
            256: Config(64, 32, 8, 1),
            576: Config(32, 32, 8, 1),
        },
        "few": {
            64: Config(64, 64, 4, 2),
            128: Config(64, 32, 8, 2),
            256: Config(64, 32, 8, 1),
            576: Config(32, 32, 8, 1),
        },
        "dq": {
            64: Config(128, 64, 8, 2),
            128: Config(64, 32, 8, 2),
            256: Config(32, 32, 8, 1),
            576: Config(32, 16, 8, 1),
        },
        "dkdv": {
            64: Config(64, 128, 8, 2),
            128: Config(32, 64, 8, 1),
            256: Config(32, 32, 8, 1),
            576: Config(16, 32, 8, 1),
        },
    },
    "sm_90": {
        "forward": {
            64: Config(128, 64, 4, 2),
            128: Config(128, 128, 8, 2),
            256: Config(128, 64, 8, 2),
            576: Config(64, 64, 8, 1),
        },
        "few": {
            64: Config(64, 64, 4, 4),
            128: Config(64, 64, 4, 3),
            256: Config(64, 64, 4, 2),
            576: Config(64, 64, 8, 1),
        },
        "dq": {
            64: Config(128, 64, 8, 2),
            128: Config(128, 128, 8, 2),
            192: Config(128, 64, 8, 2),
            256: Config(64, 64, 4, 2),
            576: Config(64, 32, 8, 1),
        },
        "dq, heavy": {128: Config(128, 32, 8, 2), 256: Config(128, 32, 8, 2)},  # 776 and 296 bytes
        "dq, scored": {128: Config(128, 64, 8, 2)},  # 224 bytes
        "dkdv": {
            128: Config(64, 128, 8, 2),
            256: Config(128, 64, 8, 1, FLIP=True),
            576: Config(32, 64, 8, 1),
        },
        "dkdv, heavy": {256: Config(64, 64, 8, 1)},  # 320 bytes
        "fused": {
            64: Config(64, 128, 8, 2),
            128: Config(64, 128, 8, 1),
            256: Config(128, 64, 8, 1, FLIP=True),
        },
        "gluon": {64: Config(128, 128, 4, 4), 128: Config(128, 128, 4, 3)},
    },
    "sm_100": {
        "forward": {
            128: Config(128, 64, 4, 1),  # two stages: 64 and 72 bytes of 96 and 64 channels (Triton 3.9)
            256: Config(64, 128, 4, 1),
            576: Config(128, 32, 8, 1),
        },
        "forward, heavy": {128: Config(128, 32, 4, 2)},  # 1352 bytes
        "specialized": {128: Config(128, 128, 4, 1)},  # with more stages: 8 to 16 bytes
        "specialized, heavy": {128: Config(128, 64, 4, 1)},  # 328 bytes, and 2696 of 64 channels
        "few": {
            64: Config(64, 64, 4, 4),
            128: Config(64, 64, 4, 3),
            256: Config(64, 64, 8, 2),
            576: Config(64, 64, 4, 1),
        },
        "dq": {
            128: Config(128, 64, 4, 1, maxnreg=256),  # mask_mod: 56 bytes without
            256: Config(64, 64, 4, 1, maxnreg=256),
            384: Config(64, 32, 8, 1, maxnreg=256),  # 384 channels: 72 bytes without
            576: Config(64, 32, 8, 1),
        },
        "dq, heavy": {
            128: Config(128, 32, 4, 2, maxnreg=256),
            256: Config(64, 32, 4, 1),
        },  # 1272 and 192 bytes
        "dq, scored": {128: Config(128, 32, 4, 2, maxnreg=256)},  # 208 bytes
        "dkdv": {
            128: Config(64, 64, 4, 1, maxnreg=256),
            192: Config(64, 64, 8, 1, maxnreg=256),
            256: Config(64, 64, 8, 1),
            448: Config(32, 64, 8, 1, maxnreg=256),  # dK of 384 channels: 192 bytes without, of 448: 40
            576: Config(32, 64, 8, 1),
        },
    },
    "gfx942": {
        "forward": {64: Config(128, 64, 4, 2), 256: Config(128, 32, 4, 1), 576: Config(64, 16, 4, 1)},
        "few": {
            64: Config(64, 64, 4, 2),
            128: Config(64, 64, 4, 1),
            256: Config(64, 32, 4, 1),
            576: Config(64, 16, 4, 1),
        },
        "dq": {96: Config(128, 32, 4, 1), 256: Config(64, 16, 4, 1), 576: Config(32, 16, 4, 1)},
        "dkdv": {96: Config(16, 128, 4, 1), 256: Config(16, 64, 4, 1), 576: Config(16, 32, 4, 1)},
        "fused": {64: Config(16, 128, 4, 1), 256: Config(16, 64, 4, 1)},
    },
}
# Tiles for tensors whose strides rule out descriptors, since addresses take registers.
_POINTERS: dict[str, _Tiles] = {
    "sm_90": {
        "forward": {128: Config(128, 64, 8, 2)},
        "few": {256: Config(64, 64, 8, 2)},
        "dq": {128: Config(128, 64, 8, 2), 192: Config(64, 64, 4, 2)},
        "dkdv": {256: Config(64, 64, 8, 1, FLIP=True)},  # 24 bytes
        "fused": {256: Config(64, 64, 8, 1)},
    },
    "sm_100": {
        "forward": {
            64: Config(128, 64, 4, 1, maxnreg=256),  # 16 bytes without (Triton 3.9)
            96: Config(128, 64, 4, 1),
            256: Config(64, 64, 4, 1),
        },
        "few": {256: Config(64, 64, 8, 1)},
        "dq": {64: Config(128, 64, 4, 2), 128: Config(128, 64, 8, 1), 256: Config(64, 64, 8, 1)},
        "dkdv": {64: Config(64, 64, 4, 1), 96: Config(64, 64, 8, 1), 192: Config(64, 64, 8, 1)},
    },
}
# Tiles of float32 and float64 inputs, which the FMA units multiply: all operands lie in registers.
_WIDE: _Tiles = {
    "forward": {64: Config(32, 16, 8, 1), 576: Config(16, 16, 8, 1)},
    "few": {64: Config(16, 32, 4, 1), 128: Config(16, 16, 4, 1), 576: Config(16, 16, 8, 1)},
    "dq": {64: Config(32, 32, 8, 1), 576: Config(16, 16, 8, 1)},
    "dkdv": {
        64: Config(32, 32, 8, 1, maxnreg=256),
        128: Config(16, 32, 8, 1),
        256: Config(16, 16, 4, 1, maxnreg=256),  # 8 bytes without (sm_80)
        576: Config(16, 16, 8, 1),
    },
}


def selected_rows(arch: str, head_dim: int, dtype: torch.dtype) -> int:
    """Return the max rows, of query heads and queries that share keys selected at run time, of a tile.

    head_dim: of q and k or of v, whichever is larger

    >>> [selected_rows("sm_100", dim, torch.bfloat16) for dim in (128, 256, 512)]
    [128, 64, 32]
    """
    if dtype.itemsize > 2:
        return 32 if head_dim <= 64 else 16
    if head_dim > 256:
        # 64 rows of 512 channels exceed tensor memory (sm_100) or spill; 32 exceed shared memory (sm_86).
        return 16 if _is_small(arch) else 32
    return 128 if head_dim <= 128 else 64


def selected(kind: str, arch: str, rows: int, head_dim: int, dtype: torch.dtype) -> Config:
    """Return the config of a pass ``kind`` over keys that are selected at run time.

    kind: "forward", "dq", or "dkdv" of blocks of keys; rows: of a tile, at most :func:`selected_rows`;
        head_dim: as there
    """
    tile = max(16, 1 << (rows - 1).bit_length())
    if arch == "interpreter":
        return Config(tile, 64 if head_dim <= 128 else 32)
    if dtype.itemsize > 2:
        return Config(tile, 16, 8, 1)
    if head_dim > 256:
        return Config(tile, 16 if kind == "dkdv" or _is_small(arch) else 32, 8, 1)
    # A warp for each 16 rows: softmax and probabilities of rows that warps share go through shared memory.
    # With 256 channels one warp would spill (forward 216 bytes, dQ 560; sm_90).
    least = 1 if head_dim <= 128 else 4
    if kind == "dkdv":
        keys = {"sm_100": 64, "sm_90": 16}.get(
            family(arch), 32
        )  # sm_80: 64 spill 216 bytes; sm_90: 32 spill 24
        return Config(tile, keys, 4, 2) if head_dim <= 128 else Config(tile, 16, 8, 2)
    warps = max(tile // 16, least)
    keys = 64 if head_dim <= 128 and tile > 16 else 32
    spills = {
        "sm_90": kind == "forward" and head_dim > 128,
        "sm_100": kind == "forward" or (head_dim <= 64 and tile == 16),
    }
    limit = 256 if spills.get(family(arch)) else None  # 8 bytes without
    return Config(tile, keys, warps, 2, maxnreg=limit)


def selected_partial(arch: str, rows: int, keys: int, head_dim: int, dtype: torch.dtype) -> Config:
    """Return the config of partial sums of dK and dV, where keys are selected one by one.

    rows, head_dim: as of :func:`selected`; keys: of a row of the selection

    >>> config = selected_partial("sm_90", 16, 24, 128, torch.bfloat16)
    >>> config.BLOCK_M, config.BLOCK_N, config.num_warps
    (16, 32, 2)
    """
    tile, fitting = max(16, 1 << (rows - 1).bit_length()), max(16, 1 << max(0, keys - 1).bit_length())
    if arch == "interpreter":
        return Config(tile, min(64 if head_dim <= 128 else 32, fitting))
    if dtype.itemsize > 2 or head_dim > 256:
        return Config(tile, 16, 8, 1)
    # A warp has the sums of its own 16 keys, where registers hold them: with 256 channels 64 keys spill 160
    # bytes (sm_90), with 128 rows 616 (sm_80).
    if head_dim > 128:
        return Config(tile, 16 if _is_small(arch) else 32, 8, 1)
    if tile == 128 and family(arch) not in ("sm_90", "sm_100"):
        return Config(tile, 16, 4, 1) if family(arch) == "gfx942" else Config(tile, min(32, fitting), 8, 1)
    return Config(tile, min(64, fitting), min(64, fitting) // 16, 1)


def _is_small(arch: str) -> bool:
    """Return whether shared memory of an architecture holds at most 99 KiB."""
    return arch != "interpreter" and family(arch) in ("sm_86", "gfx942")


def family(arch: str) -> str:
    """Return the architecture whose tiles ``arch`` uses.

    >>> [family(arch) for arch in ("sm_90", "sm_89", "sm_103", "sm_120", "gfx950")]
    ['sm_90', 'sm_86', 'sm_100', 'sm_86', 'gfx942']
    """
    if arch in _RULES:
        return arch
    if arch.startswith("gfx"):
        return "gfx942"
    if not arch.removeprefix("sm_").isdecimal():
        raise ValueError(f"architecture {arch!r} is unknown; pass a name like sm_90 or gfx942")
    return "sm_100" if 100 <= int(arch.removeprefix("sm_")) < 120 else "sm_86"


def copies(arch: str) -> bool:
    """Return whether tiles are copied by tensor descriptor on ``arch`` if strides allow.

    >>> copies("sm_90"), copies("sm_80"), copies("interpreter")
    (True, False, False)
    """
    return arch != "interpreter" and family(arch) in _POINTERS


def fuses(arch: str) -> bool:
    """Return whether the table has tiles of the fused backward pass for ``arch``; other architectures use the
    tiles of dK/dV.

    >>> fuses("sm_90"), fuses("sm_80")
    (True, False)
    """
    return "fused" in _RULES[family(arch)]


def widest_route(arch: str, route: str) -> int:
    """Return the max head dim for which a forward route other than loops has tiles on ``arch``, 0 if there is
    none.

    >>> widest_route("sm_90", "gluon"), widest_route("sm_80", "gluon")
    (128, 0)
    """
    return max(_RULES[family(arch)].get(route, {}), default=0)


def weight(kind: str, loads: int, learns: bool) -> str:
    """Classify a score_mod by the registers that it takes per score, to choose tiles. "heavy": every score
    loads another value (``loads`` is 2) and, in dQ, adds to its gradient; "scored": all other cases.

    >>> weight("forward", 2, False), weight("dq", 2, False), weight("dq", 2, True)
    ('heavy', 'scored', 'heavy')
    """
    return "heavy" if loads == 2 and (learns or kind != "dq") else "scored"


def default(
    kind: str, arch: str, head_dim: int, dtype: torch.dtype, tma: bool = True, score: str = ""
) -> Config:
    """Return the default config of pass ``kind`` on ``arch``.

    kind:  "forward", "dq", "dkdv", "fused" (dQ and dK/dV in one), "few" (forward of at most FEW rows)
    arch:  "interpreter", "sm_90", "gfx942"
    tma:   whether the tensors can be copied by descriptor
    score: see :func:`weight`
    """
    if arch == "interpreter":
        return Config(128, 128)
    is_wide, tma = dtype.itemsize > 2, tma and copies(arch)
    tables = [_WIDE] if is_wide else [_RULES[family(arch)]]
    if not is_wide and not tma:
        tables.append(_POINTERS.get(family(arch), {}))
    rows: dict[int, Config] = {}
    for name in (kind if kind in tables[0] else "dkdv", f"{kind}, {score}"):
        for table in tables:
            rows |= table.get(name, {})
    config = replace(rows[min(dim for dim in rows if head_dim <= dim)], USE_TMA=tma and not is_wide)
    if arch.startswith("gfx"):
        config = replace(config, maxnreg=None)  # only NVIDIA's compiler has this option
    if config.FLIP and not multiplies_transposed(arch):
        return replace(config, BLOCK_M=64, BLOCK_N=64, FLIP=False)  # 1.5 times the products
    return config


def architecture(device: torch.device) -> str:
    """Return the name of a device's architecture: "sm_90", "gfx942"; for the CPU the executed
    architecture, or "interpreter"."""
    if device.type == "cpu":
        return cpu_target() or "interpreter"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"

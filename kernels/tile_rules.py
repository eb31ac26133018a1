"""Default tile shapes: BLOCK_M, BLOCK_N, warps and stages of each kernel by architecture and head dim.

Every default compiles without a spilled byte and within shared memory (``tests/kernels/test_offline.py``).
Measured tiles and the user's options go before the defaults, see :mod:`tritoncp.kernels.options`.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from tritoncp.core.cpu_target import cpu_target
from tritoncp.kernels.toolchain import multiplies_transposed

PASSES = ("forward", "dq", "dkdv")
KINDS = (*PASSES, "few", "fused", "gluon")  # of tiles


@dataclass(frozen=True)
class Config:
    """Tile shape of one launch: BLOCK_M query rows by BLOCK_N key rows.

    HOIST keeps values that all tiles share, mainly offsets inside a tile, in registers throughout a loop: up
    to a tenth fewer instructions if registers are free.  USE_TMA copies tiles by tensor
    descriptor, where strides allow: fewer instructions and no addresses in registers.  FLIP computes the
    scores of a backward pass transposed: wgmma takes 64 rows a group of four warps, so that eight warps need
    128 rows, of queries in dK/dV.  maxnreg is Triton's limit of registers a thread: with it two programs fit
    a multiprocessor where a few more registers would leave room for one.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int = 4
    num_stages: int = 2
    HOIST: bool = True
    USE_TMA: bool = False
    FLIP: bool = False
    maxnreg: int | None = None

    def compiler(self) -> dict[str, Any]:
        """Compiler options of a launch, besides the constants of the kernel.

        >>> Config(128, 64, num_warps=8, num_stages=3).compiler()
        {'num_warps': 8, 'num_stages': 3, 'enable_fp_fusion': True}
        """
        options: dict[str, Any] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        # Fuses the scaling of scores into exp2's argument, which Triton from 3.10 on does not do by default.
        options["enable_fp_fusion"] = True
        return options | ({"maxnreg": self.maxnreg} if self.maxnreg else {})


def pieces(dim: int, widest: int = 128) -> tuple[int, int]:
    """Split a head dim into at most two powers of two, from 16 on, that sum to at least ``dim``; none is
    wider than ``widest`` where two suffice.

    Two pieces of 128 need fewer registers than one of 256, whose loads are all in flight at once.

    >>> [pieces(d) for d in (16, 40, 64, 80, 96, 128, 192, 256)]
    [(16, 0), (32, 16), (64, 0), (64, 16), (64, 32), (128, 0), (128, 64), (128, 128)]
    >>> [pieces(d, widest=64) for d in (96, 128, 192)]
    [(64, 32), (64, 64), (128, 64)]
    """
    widest = widest if dim <= 2 * widest else 128
    first = min(widest, max(16, 1 << (dim.bit_length() - 1)))
    if first >= dim:
        return first, 0
    rest = max(16, 1 << (dim - first - 1).bit_length())
    return (first * 2, 0) if rest == first < widest else (first, rest)


def widest_piece(arch: str, dim: int, tile: Config) -> int:
    """The widest piece of ``dim`` channels in forward and dQ: half of them for mma.sync (sm_80, sm_86), where
    each warp has 16 rows or more.

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


def fit(tile: int, block: int) -> int:
    """Fit a tile size to a mask block: the largest power of two that divides the block and is at most
    ``tile``; a block with none >= 16 (say 100 or 8) is covered with ragged tiles instead.

    >>> fit(128, 128), fit(128, 64), fit(64, 96), fit(128, 100), fit(64, 8)
    (128, 64, 32, 128, 16)
    """
    even = min(block & -block, tile)
    return even if even >= 16 else max(16, min(tile, 1 << (block - 1).bit_length()))


def gqa_pack_factor(rows: int, group: int, tile: int) -> int:
    """Choose how many of a group's query heads share a tile of ``tile`` rows, where each has ``rows`` of its
    own: all that fit, if that takes at least a tenth fewer tiles; else 1.  (FlashAttention-3 packs by this
    rule.)

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


_Fields = dict[str, Any]  # of Config
_Rule = tuple[str, int, Config]  # kernel, largest head dim, tiles


def _tile(kernel: str, dim: int, m: int, n: int, warps: int, stages: int, **fields: Any) -> _Rule:
    """Make a rule: tiles of m queries by n keys, up to head dim ``dim``; ``fields``: the others of Config."""
    return kernel, dim, Config(m, n, warps, stages, **fields)


def _by_kernel(*rules: _Rule) -> dict[str, dict[int, Config]]:
    """Sort rules by kernel, then by largest head dim."""
    kernels = dict.fromkeys(kernel for kernel, _, _ in rules)
    return {name: {dim: config for kernel, dim, config in rules if kernel == name} for name in kernels}


NO_HOIST: _Fields = {"HOIST": False}
COPY: _Fields = {"USE_TMA": True}
TMA: _Fields = COPY | NO_HOIST  # there are no addresses to hoist
FLIP: _Fields = {"FLIP": True}
R128: _Fields = {"maxnreg": 128}  # registers a thread: two programs of eight warps fit a multiprocessor
R256: _Fields = {"maxnreg": 256}  # without it the compiler spills sooner than it takes more than 128, or 168
FEW = 64  # rows of all heads in a tile, up to which the tiles "few" are used
# Family -> pass -> largest head dim -> tiles of 16-bit inputs (registers: configs/resources.json).  Those of
# sm_80 and sm_90 are compared with torch's by executed counts (perf/NOTES.md).
# sm_86 covers all GPUs with 99 KiB of shared memory, gfx942 all AMD GPUs (64 KiB).
# "pointers": tensors whose strides rule out descriptors; addresses take registers.
# Small tiles let two programs share a multiprocessor: one multiplies while the other computes its softmax.
# Tiles of four warps on sm_90 are those of torch's flex_attention for the same head dims.
# "heavy", "learns", "scored": classes of score_mod, see `weight`. Tiles of "heavy" avoid spills in the loops,
# those of "scored" let a second program fill the time of the score_mod's instructions.
_RULES: dict[str, dict[str, dict[int, Config]]] = {
    "sm_80": _by_kernel(
        _tile("forward", dim=64, m=128, n=64, warps=4, stages=2),
        _tile("forward", dim=128, m=128, n=64, warps=8, stages=2),
        _tile("forward", dim=192, m=64, n=32, warps=4, stages=1, **NO_HOIST),
        _tile("forward", dim=256, m=64, n=32, warps=4, stages=2, **NO_HOIST),
        _tile("forward, heavy", dim=64, m=64, n=64, warps=4, stages=2, **NO_HOIST),
        _tile("forward, heavy", dim=128, m=64, n=64, warps=4, stages=2),
        _tile("forward, heavy", dim=192, m=64, n=32, warps=4, stages=1, **NO_HOIST),
        _tile("forward, heavy", dim=256, m=64, n=32, warps=4, stages=2, **NO_HOIST),
        _tile("few", dim=64, m=64, n=64, warps=4, stages=3),
        _tile("few", dim=128, m=64, n=64, warps=4, stages=2),
        _tile("few", dim=256, m=64, n=64, warps=8, stages=2),
        _tile("dq", dim=64, m=64, n=64, warps=4, stages=2, **NO_HOIST, **R256),
        _tile("dq", dim=128, m=128, n=64, warps=8, stages=2, **NO_HOIST),
        _tile("dq", dim=256, m=32, n=32, warps=4, stages=2, **NO_HOIST, **R256),
        _tile("dq, heavy", dim=64, m=64, n=64, warps=4, stages=2, **NO_HOIST, **R256),
        _tile("dq, heavy", dim=128, m=64, n=32, warps=4, stages=2, **NO_HOIST, **R256),
        _tile("dq, heavy", dim=256, m=32, n=32, warps=4, stages=2, **NO_HOIST, **R256),
        _tile("dkdv", dim=64, m=64, n=64, warps=4, stages=2, **NO_HOIST),
        _tile("dkdv", dim=128, m=32, n=128, warps=8, stages=2, **NO_HOIST),
        _tile("dkdv", dim=192, m=32, n=32, warps=4, stages=2),
        _tile("dkdv", dim=256, m=64, n=64, warps=8, stages=1, **NO_HOIST, **FLIP),
    ),
    "sm_86": _by_kernel(
        _tile("forward", dim=64, m=128, n=64, warps=8, stages=3),
        _tile("forward", dim=128, m=128, n=32, warps=8, stages=2),
        _tile("forward", dim=256, m=64, n=32, warps=8, stages=1),
        _tile("few", dim=64, m=64, n=64, warps=4, stages=2),
        _tile("few", dim=128, m=64, n=32, warps=8, stages=2),
        _tile("few", dim=256, m=64, n=32, warps=8, stages=1),
        _tile("dq", dim=64, m=128, n=64, warps=8, stages=2),
        _tile("dq", dim=128, m=64, n=32, warps=8, stages=2),
        _tile("dq", dim=256, m=32, n=32, warps=8, stages=1),
        _tile("dkdv", dim=64, m=64, n=128, warps=8, stages=2),
        _tile("dkdv", dim=128, m=32, n=64, warps=8, stages=1),
        _tile("dkdv", dim=256, m=32, n=32, warps=8, stages=1),
    ),
    "sm_90": _by_kernel(
        _tile("forward", dim=64, m=128, n=64, warps=4, stages=2, **TMA),
        _tile("forward", dim=128, m=128, n=128, warps=8, stages=2, **COPY),
        _tile("forward", dim=256, m=128, n=64, warps=8, stages=2, **TMA),
        _tile("forward, heavy", dim=64, m=128, n=64, warps=4, stages=2, **TMA),
        _tile("forward, heavy", dim=128, m=128, n=128, warps=8, stages=2, **COPY),
        _tile("forward, heavy", dim=256, m=128, n=32, warps=8, stages=2, **TMA),
        _tile("few", dim=64, m=64, n=64, warps=4, stages=4, **TMA),
        _tile("few", dim=128, m=64, n=64, warps=4, stages=3, **TMA),
        _tile("few", dim=256, m=64, n=64, warps=4, stages=2, **TMA),
        _tile("dq", dim=64, m=128, n=32, warps=8, stages=2, **TMA, **R128),
        _tile("dq", dim=128, m=128, n=128, warps=8, stages=2, **TMA),
        _tile("dq", dim=192, m=128, n=64, warps=8, stages=2, **TMA),
        _tile("dq", dim=256, m=64, n=64, warps=4, stages=2, **TMA),
        _tile("dq, heavy", dim=256, m=128, n=32, warps=8, stages=2, **TMA),
        _tile("dq, learns", dim=128, m=128, n=32, warps=8, stages=2, **TMA, **R128),
        _tile("dq, learns", dim=192, m=128, n=64, warps=8, stages=2, **TMA),
        _tile("dq, learns", dim=256, m=64, n=64, warps=4, stages=2, **TMA),
        _tile("dq, scored", dim=128, m=128, n=32, warps=8, stages=2, **TMA, **R128),
        _tile("dq, scored", dim=192, m=128, n=64, warps=8, stages=2, **TMA),
        _tile("dq, scored", dim=256, m=64, n=64, warps=4, stages=2, **TMA),
        _tile("dkdv", dim=96, m=64, n=128, warps=8, stages=2),
        _tile("dkdv", dim=128, m=64, n=128, warps=8, stages=2, **TMA),
        _tile("dkdv", dim=256, m=128, n=64, warps=8, stages=1, **TMA, **FLIP),
        _tile("dkdv, heavy", dim=96, m=64, n=128, warps=8, stages=2),
        _tile("dkdv, heavy", dim=128, m=64, n=128, warps=8, stages=2, **TMA),
        _tile("dkdv, heavy", dim=256, m=64, n=64, warps=8, stages=1, **TMA),
        _tile("fused", dim=64, m=64, n=128, warps=8, stages=2, **COPY),
        _tile("fused", dim=128, m=64, n=128, warps=8, stages=1, **TMA),
        _tile("fused", dim=256, m=128, n=64, warps=8, stages=1, **TMA, **FLIP),
        _tile("gluon", dim=64, m=128, n=128, warps=4, stages=4, **TMA),
        _tile("gluon", dim=128, m=128, n=128, warps=4, stages=3, **TMA),
    ),
    "sm_90, pointers": _by_kernel(
        _tile("forward", dim=64, m=128, n=64, warps=4, stages=2),
        _tile("forward", dim=128, m=128, n=64, warps=8, stages=2),
        _tile("forward", dim=256, m=128, n=64, warps=8, stages=2),
        _tile("few", dim=64, m=64, n=64, warps=4, stages=4),
        _tile("few", dim=128, m=64, n=64, warps=4, stages=3),
        _tile("few", dim=256, m=64, n=64, warps=8, stages=2),
        _tile("dq", dim=64, m=128, n=32, warps=8, stages=2, **R128),
        _tile("dq", dim=96, m=128, n=32, warps=8, stages=2, **NO_HOIST, **R128),
        _tile("dq", dim=128, m=128, n=64, warps=8, stages=2),
        _tile("dq", dim=256, m=64, n=64, warps=4, stages=2, **NO_HOIST),
        _tile("dkdv", dim=64, m=64, n=128, warps=8, stages=2),
        _tile("dkdv", dim=128, m=64, n=128, warps=8, stages=2),
        _tile("dkdv", dim=256, m=128, n=64, warps=8, stages=1, **NO_HOIST, **FLIP),
        _tile("fused", dim=64, m=64, n=128, warps=8, stages=2),
        _tile("fused", dim=128, m=64, n=128, warps=8, stages=1, **NO_HOIST),
        _tile("fused", dim=256, m=64, n=64, warps=8, stages=1, **NO_HOIST),
    ),
    "sm_100": _by_kernel(
        _tile("forward", dim=96, m=128, n=64, warps=4, stages=2, **TMA),
        _tile("forward", dim=128, m=128, n=64, warps=4, stages=1, **TMA),
        _tile("forward", dim=256, m=64, n=128, warps=4, stages=1, **TMA, **R256),
        _tile("dq", dim=128, m=128, n=64, warps=4, stages=2, **TMA, **R256),
        _tile("dq", dim=256, m=64, n=64, warps=4, stages=1, **TMA, **R256),
        _tile("forward, heavy", dim=96, m=128, n=64, warps=4, stages=2, **TMA),
        _tile("forward, heavy", dim=128, m=128, n=32, warps=4, stages=2, **TMA),
        _tile("forward, heavy", dim=256, m=64, n=128, warps=4, stages=1, **TMA, **R256),
        _tile("dq, heavy", dim=128, m=128, n=32, warps=4, stages=2, **TMA, **R256),
        _tile("dq, heavy", dim=256, m=64, n=32, warps=4, stages=1, **TMA, **R256),
        _tile("dq, learns", dim=128, m=128, n=32, warps=4, stages=2, **TMA, **R256),
        _tile("dq, learns", dim=256, m=64, n=64, warps=4, stages=1, **TMA, **R256),
        _tile("dkdv, heavy", dim=96, m=64, n=64, warps=4, stages=1, **TMA),
        _tile("dkdv, heavy", dim=256, m=64, n=64, warps=8, stages=1, **NO_HOIST, **R256),
        _tile("dkdv", dim=96, m=64, n=64, warps=4, stages=1, **TMA),
        _tile("dkdv", dim=128, m=64, n=64, warps=8, stages=1, **NO_HOIST),
        _tile("dkdv", dim=192, m=64, n=64, warps=8, stages=1, **TMA, **R256),
        _tile("dkdv", dim=256, m=64, n=64, warps=8, stages=1, **NO_HOIST),
        _tile("few", dim=64, m=64, n=64, warps=4, stages=4, **TMA),
        _tile("few", dim=128, m=64, n=64, warps=4, stages=3, **TMA),
        _tile("few", dim=256, m=64, n=64, warps=8, stages=2, **TMA),
    ),
    "sm_100, pointers": _by_kernel(
        _tile("forward", dim=64, m=128, n=64, warps=4, stages=3),
        _tile("forward", dim=128, m=128, n=64, warps=4, stages=1, **NO_HOIST),
        _tile("forward", dim=256, m=64, n=64, warps=4, stages=1, **NO_HOIST),
        _tile("few", dim=64, m=64, n=64, warps=4, stages=4),
        _tile("few", dim=128, m=64, n=64, warps=4, stages=3),
        _tile("few", dim=256, m=64, n=64, warps=8, stages=1),
        _tile("dq", dim=64, m=128, n=64, warps=4, stages=2, **NO_HOIST),
        _tile("dq", dim=128, m=128, n=64, warps=8, stages=1),
        _tile("dq", dim=256, m=64, n=64, warps=8, stages=1),
        _tile("dkdv", dim=64, m=64, n=64, warps=4, stages=1, **NO_HOIST),
        _tile("dkdv", dim=128, m=64, n=64, warps=8, stages=1, **NO_HOIST),
        _tile("dkdv", dim=256, m=64, n=64, warps=8, stages=1, **NO_HOIST),
    ),
    "gfx942": _by_kernel(
        _tile("forward", dim=64, m=128, n=64, warps=4, stages=2),
        _tile("forward", dim=128, m=128, n=32, warps=4, stages=1),
        _tile("forward", dim=256, m=128, n=32, warps=4, stages=1, **NO_HOIST),
        _tile("few", dim=64, m=64, n=64, warps=4, stages=2),
        _tile("few", dim=128, m=64, n=64, warps=4, stages=1),
        _tile("few", dim=256, m=64, n=32, warps=4, stages=1),
        _tile("dq", dim=96, m=128, n=32, warps=4, stages=1),
        _tile("dq", dim=128, m=64, n=16, warps=4, stages=1),
        _tile("dq", dim=256, m=64, n=16, warps=4, stages=1),
        _tile("dkdv", dim=96, m=16, n=128, warps=4, stages=1),
        _tile("dkdv", dim=128, m=16, n=64, warps=4, stages=1),
        _tile("dkdv", dim=256, m=16, n=64, warps=4, stages=1),
        _tile("fused", dim=64, m=16, n=128, warps=4, stages=1),
        _tile("fused", dim=128, m=16, n=64, warps=4, stages=1),
        _tile("fused", dim=256, m=16, n=64, warps=4, stages=1),
    ),
}
# Tiles of float32 and float64 inputs, which the FMA units multiply: all operands lie in registers.
_WIDE = _by_kernel(
    _tile("forward", dim=64, m=32, n=16, warps=8, stages=1),
    _tile("forward", dim=128, m=16, n=16, warps=8, stages=1),
    _tile("forward", dim=256, m=16, n=16, warps=8, stages=1),
    _tile("few", dim=64, m=16, n=32, warps=4, stages=1),
    _tile("few", dim=128, m=16, n=16, warps=4, stages=1),
    _tile("few", dim=256, m=16, n=16, warps=8, stages=1),
    _tile("dq", dim=64, m=32, n=32, warps=8, stages=1),
    _tile("dq", dim=128, m=16, n=16, warps=8, stages=1),
    _tile("dq", dim=256, m=16, n=16, warps=8, stages=1, **NO_HOIST),
    _tile("dkdv", dim=64, m=32, n=32, warps=8, stages=1),
    _tile("dkdv", dim=128, m=16, n=32, warps=8, stages=1),
    _tile("dkdv", dim=256, m=16, n=16, warps=4, stages=1, **NO_HOIST),
)


def family(arch: str) -> str:
    """The architecture whose tiles ``arch`` uses.

    >>> [family(arch) for arch in ("sm_90", "sm_89", "sm_103", "sm_120", "gfx950")]
    ['sm_90', 'sm_86', 'sm_100', 'sm_86', 'gfx942']
    """
    if arch in _RULES:
        return arch
    if arch.startswith("gfx"):
        return "gfx942"
    if not arch.removeprefix("sm_").isdecimal():
        raise ValueError(f"architecture {arch!r}; a name like sm_90 or gfx942 is needed")
    return "sm_100" if 100 <= int(arch.removeprefix("sm_")) < 120 else "sm_86"


def copies(arch: str) -> bool:
    """Whether tiles are copied by tensor descriptor on ``arch``, where strides allow.

    >>> copies("sm_90"), copies("sm_80"), copies("interpreter")
    (True, False, False)
    """
    return arch != "interpreter" and f"{family(arch)}, pointers" in _RULES


def fuses(arch: str) -> bool:
    """Whether the table has tiles of the fused backward pass for ``arch``; other architectures use those of
    dK/dV.

    >>> fuses("sm_90"), fuses("sm_80")
    (True, False)
    """
    return "fused" in _RULES[family(arch)]


def widest_route(arch: str, route: str) -> int:
    """The largest head dim that has tiles of a forward route other than loops on ``arch``, 0 if none has.

    >>> widest_route("sm_90", "gluon"), widest_route("sm_80", "gluon")
    (128, 0)
    """
    return max(_RULES[family(arch)].get(route, {}), default=0)


def weight(kind: str, loads: int, learns: bool) -> str:
    """Classify a score_mod by the registers that it takes per score, to choose tiles. "heavy": every score
    loads its own value (``loads`` is 2) and, in dQ, adds to its gradient; "learns": dQ adds to gradients of
    values that rows, columns or tiles share; "scored": all other cases.

    >>> weight("forward", 2, False), weight("dq", 2, False), weight("dq", 1, True)
    ('heavy', 'scored', 'learns')
    """
    if kind == "dq":
        return ("heavy" if loads == 2 else "learns") if learns else "scored"
    return "heavy" if loads == 2 else "scored"


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
    tiles = _RULES[family(arch)] if tma else _RULES.get(f"{family(arch)}, pointers", _RULES[family(arch)])
    kinds = _WIDE if dtype.itemsize > 2 else tiles
    rules = kinds.get(kind, kinds["dkdv"])
    rules = kinds.get(f"{kind}, {score}", rules)
    config = next(config for dim, config in rules.items() if head_dim <= dim)
    if config.FLIP and not multiplies_transposed(arch):
        return replace(config, BLOCK_M=64, BLOCK_N=64, FLIP=False)  # 1.5 times the products
    return config


def architecture(device: torch.device) -> str:
    """Return the name of a device's architecture: "sm_90", "gfx942"; for the CPU that which is executed, or
    "interpreter"."""
    if device.type == "cpu":
        return cpu_target() or "interpreter"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"

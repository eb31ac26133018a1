"""Default tile shapes: BLOCK_M, BLOCK_N, warps and stages of each kernel by architecture and head dim.

Every default compiles without a spilled byte and within shared memory (``tests/kernels/test_offline.py``).
Measured tiles and the user's options go before the defaults, see :mod:`tritoncp.kernels.options`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from tritoncp.kernels.toolchain import multiplies_transposed

PASSES = ("forward", "dq", "dkdv")
KINDS = (*PASSES, "few", "fused", "specialised", "gluon")  # of tiles


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


@triton.constexpr_function
def pieces(dim: int) -> tuple[int, int]:
    """Split a head dim into at most two powers of two, 16 to 128, that sum to at least ``dim``.

    Two pieces of 128 need fewer registers than one of 256, whose loads are all in flight at once.

    >>> [pieces(d) for d in (16, 40, 64, 80, 96, 128, 192, 256)]
    [(16, 0), (32, 16), (64, 0), (64, 16), (64, 32), (128, 0), (128, 64), (128, 128)]
    """
    first = min(128, max(16, 1 << (dim.bit_length() - 1)))
    if first >= dim:
        return first, 0
    rest = max(16, 1 << (dim - first - 1).bit_length())
    return (first * 2, 0) if rest == first < 128 else (first, rest)


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


def _dims(*tiles: tuple[Any, ...], dims: tuple[int, ...] = (64, 128, 256)) -> dict[int, Config]:
    """Make the configs of a kernel by largest head dim. tiles: for each of ``dims`` (BLOCK_M, BLOCK_N, warps,
    stages), then dicts of other fields."""
    sizes = (
        Config(*tile[:4], **{name: x for more in tile[4:] for name, x in more.items()}) for tile in tiles
    )
    return dict(zip(dims, sizes, strict=True))


NO_HOIST = {"HOIST": False}
COPY = {"USE_TMA": True}
TMA = COPY | NO_HOIST  # there are no addresses to hoist
FLIP = {"FLIP": True}
R128 = {"maxnreg": 128}  # registers a thread: two programs of eight warps fit a multiprocessor
R256 = {"maxnreg": 256}  # without it the compiler spills sooner than it takes more than 128, or 168
FEW = 64  # rows of all heads in a tile, up to which the tiles "few" are used
# Family -> pass -> largest head dim -> tiles of 16-bit inputs. Criterion: the highest predicted throughput
# without spills or wasted products, with window, interval and full masks, with and without state.
# sm_86 covers all GPUs with 99 KiB of shared memory, gfx942 all AMD GPUs (64 KiB).
# "pointers": tensors whose strides rule out descriptors; addresses take registers.
# Small tiles let two programs share a multiprocessor: one multiplies while the other computes its softmax.
# Tiles of four warps on sm_90 are those of torch's flex_attention for the same head dims.
# "heavy", "learns", "scored": classes of score_mod, see `weight`. Tiles of "heavy" avoid spills in the loops,
# those of "scored" let a second program fill the time of the score_mod's instructions.
_SCORED = _dims((128, 32, 8, 2, TMA, R128), (128, 64, 8, 2, TMA), (64, 64, 4, 2, TMA), dims=(128, 192, 256))
_RULES: dict[str, dict[str, dict[int, Config]]] = {
    "sm_80": {
        "forward": _dims(
            (64, 64, 4, 2, NO_HOIST),
            (64, 64, 4, 2),
            (64, 32, 4, 1, NO_HOIST),
            (64, 32, 4, 2, NO_HOIST),
            dims=(64, 128, 192, 256),
        ),
        "few": _dims((64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 8, 2)),
        "dq": _dims((64, 64, 4, 2, NO_HOIST, R256), (32, 32, 4, 2, NO_HOIST, R256), dims=(128, 256)),
        "dq, heavy": _dims(
            (64, 64, 4, 2, NO_HOIST, R256), (64, 32, 4, 2, NO_HOIST, R256), (32, 32, 4, 2, NO_HOIST, R256)
        ),
        "dkdv": _dims(
            (64, 64, 4, 2, NO_HOIST),
            (32, 128, 8, 2, NO_HOIST),
            (64, 64, 8, 2),
            (32, 32, 4, 2),
            (64, 64, 8, 1, NO_HOIST, FLIP),
            dims=(64, 96, 128, 192, 256),
        ),
    },
    "sm_86": {
        "forward": _dims((128, 64, 8, 3), (128, 32, 8, 2), (64, 32, 8, 1)),
        "few": _dims((64, 64, 4, 2), (64, 32, 8, 2), (64, 32, 8, 1)),
        "dq": _dims((128, 64, 8, 2), (64, 32, 8, 2), (32, 32, 8, 1)),
        "dkdv": _dims((64, 128, 8, 2), (32, 64, 8, 1), (32, 32, 8, 1)),
    },
    "sm_90": {
        "forward": _dims((128, 64, 4, 2, TMA), (128, 128, 8, 2, COPY), (128, 64, 8, 2, TMA)),
        "forward, heavy": _dims((128, 64, 4, 2, TMA), (128, 128, 8, 2, COPY), (128, 32, 8, 2, TMA)),
        "few": _dims((64, 64, 4, 4, TMA), (64, 64, 4, 3, TMA), (64, 64, 4, 2, TMA)),
        "dq": _dims(
            (128, 32, 8, 2, TMA, R128),
            (128, 128, 8, 2, TMA),
            (128, 64, 8, 2, TMA),
            (64, 64, 4, 2, TMA),
            dims=(64, 128, 192, 256),
        ),
        "dq, heavy": _dims((128, 32, 8, 2, TMA), dims=(256,)),
        "dq, learns": _SCORED,
        "dq, scored": _SCORED,
        "dkdv": _dims((64, 128, 8, 2), (64, 128, 8, 2, TMA), (128, 64, 8, 1, TMA, FLIP), dims=(96, 128, 256)),
        "dkdv, heavy": _dims((64, 128, 8, 2), (64, 128, 8, 2, TMA), (64, 64, 8, 1, TMA), dims=(96, 128, 256)),
        "fused": _dims((64, 128, 8, 2, COPY), (64, 128, 8, 1, TMA), (128, 64, 8, 1, TMA, FLIP)),
        "specialised": _dims(
            (128, 128, 4, 4, TMA),
            (128, 128, 4, 2, TMA),
            (128, 64, 4, 2, TMA),
            dims=(64, 128, 192),
        ),
        "gluon": _dims((128, 128, 4, 4, TMA), (128, 128, 4, 3, TMA), dims=(64, 128)),  # warps of a group
    },
    "sm_90, pointers": {
        "forward": _dims((128, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 2)),
        "few": _dims((64, 64, 4, 4), (64, 64, 4, 3), (64, 64, 8, 2)),
        "dq": _dims(
            (128, 32, 8, 2, R128),
            (128, 32, 8, 2, NO_HOIST, R128),
            (128, 64, 8, 2),
            (64, 64, 4, 2, NO_HOIST),
            dims=(64, 96, 128, 256),
        ),
        "dkdv": _dims((64, 128, 8, 2), (64, 128, 8, 2), (128, 64, 8, 1, NO_HOIST, FLIP)),
        "fused": _dims((64, 128, 8, 2), (64, 128, 8, 1, NO_HOIST), (64, 64, 8, 1, NO_HOIST)),
    },
    "sm_100": {
        "forward": _dims(
            (128, 64, 4, 2, TMA), (128, 64, 4, 1, TMA), (64, 128, 4, 1, TMA, R256), dims=(96, 128, 256)
        ),
        "dq": _dims((128, 64, 4, 2, TMA, R256), (64, 64, 4, 1, TMA, R256), dims=(128, 256)),
        "forward, heavy": _dims(
            (128, 64, 4, 2, TMA), (128, 32, 4, 2, TMA), (64, 128, 4, 1, TMA, R256), dims=(96, 128, 256)
        ),
        "dq, heavy": _dims((128, 32, 4, 2, TMA, R256), (64, 32, 4, 1, TMA, R256), dims=(128, 256)),
        "dq, learns": _dims((128, 32, 4, 2, TMA, R256), (64, 64, 4, 1, TMA, R256), dims=(128, 256)),
        "dkdv, heavy": _dims((64, 64, 4, 1, TMA), (64, 64, 8, 1, NO_HOIST, R256), dims=(96, 256)),
        "dkdv": _dims(
            (64, 64, 4, 1, TMA),
            (64, 64, 8, 1, NO_HOIST),
            (64, 64, 8, 1, TMA, R256),
            (64, 64, 8, 1, NO_HOIST),
            dims=(96, 128, 192, 256),
        ),
        "few": _dims((64, 64, 4, 4, TMA), (64, 64, 4, 3, TMA), (64, 64, 8, 2, TMA)),
        "specialised": _dims((128, 128, 4, 4, COPY), (128, 128, 4, 3, TMA), dims=(64, 128)),
    },
    "sm_100, pointers": {
        "forward": _dims((128, 64, 4, 3), (128, 64, 4, 1, NO_HOIST), (64, 64, 4, 1, NO_HOIST)),
        "few": _dims((64, 64, 4, 4), (64, 64, 4, 3), (64, 64, 8, 1)),
        "dq": _dims((128, 64, 4, 2, NO_HOIST), (128, 64, 8, 1), (64, 64, 8, 1)),
        "dkdv": _dims((64, 64, 4, 1, NO_HOIST), (64, 64, 8, 1, NO_HOIST), (64, 64, 8, 1, NO_HOIST)),
    },
    "gfx942": {
        "forward": _dims((128, 64, 4, 2), (128, 32, 4, 1), (128, 32, 4, 1, NO_HOIST)),
        "few": _dims((64, 64, 4, 2), (64, 64, 4, 1), (64, 32, 4, 1)),
        "dq": _dims((128, 32, 4, 1), (64, 16, 4, 1), (64, 16, 4, 1), dims=(96, 128, 256)),
        "dkdv": _dims((16, 128, 4, 1), (16, 64, 4, 1), (16, 64, 4, 1), dims=(96, 128, 256)),
        "fused": _dims((16, 128, 4, 1), (16, 64, 4, 1), (16, 64, 4, 1)),
    },
}
# Tiles of float32 and float64 inputs, which the FMA units multiply: all operands lie in registers.
_WIDE: dict[str, dict[int, Config]] = {
    "forward": _dims((32, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    "few": _dims((16, 32, 4, 1), (16, 16, 4, 1), (16, 16, 8, 1)),
    "dq": _dims((32, 32, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1, NO_HOIST)),
    "dkdv": _dims((32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 4, 1, NO_HOIST)),
}


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


def specialises(arch: str, kind: str = "specialised") -> int:
    """The largest head dim of a forward route with specialised warps on ``arch``, 0 if there is none: see
    :mod:`tritoncp.kernels.forward_specialised`, or for "gluon" :mod:`tritoncp.kernels.forward_gluon`.

    >>> specialises("sm_90"), specialises("sm_90", "gluon"), specialises("sm_100"), specialises("sm_80")
    (192, 128, 128, 0)
    """
    return max(_RULES[family(arch)].get(kind, {}), default=0)


def merges(arch: str) -> bool:
    """Whether the compiler specialises the warps of a loop that masks some of its tiles, on ``arch``. One
    launch then computes masked and full blocks.

    >>> merges("sm_100"), merges("sm_90"), merges("interpreter")
    (True, False, False)
    """
    return arch != "interpreter" and family(arch) == "sm_100"


def tile_obstacles(config: Config) -> Iterator[str]:
    """Reasons why a config does not suit a route with specialised warps. Such a route has two groups of four
    warps with 64 rows each (sm_100: one for the softmax, one that rescales), and copies tiles ahead."""
    if (config.BLOCK_M, config.num_warps) != (128, 4) or config.num_stages < 2:
        yield f"it takes BLOCK_M=128, num_warps=4, num_stages of 2 or more; these are {config}"


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
    """Return the name of a device's architecture: "sm_90", "gfx942", or "interpreter" for the CPU."""
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"

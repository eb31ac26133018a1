"""Kernel options: names, valid values, checks, and the choice of a launch's config from them."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

from tritoncp.core.caller import warn_caller
from tritoncp.core.environment import UNSAFE_FUSED
from tritoncp.core.log_lines import area_logger, log_decision
from tritoncp.core.suggestions import suggest
from tritoncp.kernels.tile_rules import KINDS, PASSES, Config, copies, default, fit, flipped_rows
from tritoncp.kernels.toolchain import (
    fences_async_copies,
    flips_right,
    fused_fault,
    multiplies_transposed,
    transposed_fault,
)

tiles_log = area_logger("tiles")
_ALLOWED: dict[str, Any] = {
    "BLOCK": (16, 32, 64, 128, 256),
    "num_warps": (1, 2, 4, 8, 16),
    "num_stages": range(1, 9),
    "maxnreg": (None, *range(32, 257, 8)),
}
_SWITCH = (False, True)  # valid values of all other fields of Config
# Options that are neither in torch nor fields of Config. (SPLIT_KV is in torch, but has another effect here.)
# "deterministic" chooses the score_mod's gradient before a launch is made.
OWN = ("FUSED_BACKWARD", "PACK_GQA", "PRECISION", "ROUTE", "SPLIT_KV", "deterministic", "invariant")
# Values of options under "invariant", with which the sums of a row depend only on its keys.
PINNED = {"FUSED_BACKWARD": False, "PACK_GQA": False, "ROUTE": "loops", "SPLIT_KV": 1, "USE_TMA": False}
PRECISIONS = ("ieee", "tf32", "tf32x3")
WRONG_ROUTE = "its results are not those of 'loops'"  # result of `route_check.verify_route`
ROUTES = ("loops", "gluon", "specialized")  # of the forward pass; the first is the default
# Options of torch's kernels that have no effect here: (torch's default, which is accepted silently, or None;
# the values that torch accepts, or () for whole numbers).
LEFT_OUT: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "BACKEND": ("AUTO", ("AUTO", "TRITON", "TRITON_DECODE", "FLASH")),
    "BLOCKS_ARE_CONTIGUOUS": (False, _SWITCH),
    "FORCE_USE_FLEX_ATTENTION": (False, _SWITCH),
    "OUTPUT_LOGSUMEXP": (None, _SWITCH),
    "OUTPUT_MAX": (None, _SWITCH),
    "PRESCALE_QK": (False, _SWITCH),
    "ROWS_GUARANTEED_SAFE": (False, _SWITCH),
    "WRITE_DQ": (True, _SWITCH),
    "kpack": (None, ()),
    "matrix_instr_nonkdim": (None, ()),
    "waves_per_eu": (None, ()),
}
_warned: set[tuple[str, Any]] = set()


@cache
def option_names(kind: str) -> dict[str, tuple[str, str]]:
    """Map fields of Config to the two options that set them in pass ``kind``; the second wins.

    >>> option_names("dkdv")["BLOCK_M"]
    ('BLOCK_M1', 'bwd_BLOCK_M1')
    """
    ends = {"dq": ("bwd_", "2"), "dkdv": ("bwd_", "1"), "fused": ("bwd_", "1")}
    prefix, suffix = ends.get(kind, ("fwd_", ""))
    plain = {
        name: name + suffix if name.startswith("BLOCK") else name for name in Config.__dataclass_fields__
    }
    return {name: (option, prefix + option) for name, option in plain.items()}


# Fields of Config by option. (Dynamo traces `check_options`, and would warn about a cached function.)
_FIELDS = {option: name for kind in PASSES for name, both in option_names(kind).items() for option in both}


def check_options(options: dict[str, Any], arch: str | None = None) -> None:
    """Refuse unknown options and invalid values; with ``arch``, also options for kernels that this Triton
    miscompiles for it. Raises ValueError, and TypeError unless options are a mapping from names."""
    if not isinstance(options, Mapping) or not all(isinstance(option, str) for option in options):
        raise TypeError(
            f"kernel_options is {options!r}; a dict of names and values is needed, as {{'BLOCK_M': 64}}"
        )
    if not options:
        return
    fields = _FIELDS
    for option, value in options.items():
        if option == "CONFIGS":
            for kind, config in value:
                if kind == "route":
                    check_options(dict(config))
                    continue
                if kind not in KINDS:
                    raise ValueError(
                        f"kernel option CONFIGS has tiles of {kind!r}; pass one of {', '.join(KINDS)}"
                    )
                names = {name: both[0] for name, both in option_names(kind).items()}
                check_options({names[name]: setting for name, setting in config})
            continue
        if (name := fields.get(option)) is None:
            if option not in OWN:
                _check_left_out(option, value, {*fields, *LEFT_OUT, *OWN})
            continue
        allowed = _ALLOWED.get("BLOCK" if name.startswith("BLOCK") else name, _SWITCH)
        is_whole = type(value) in ((bool,) if allowed is _SWITCH else (int, type(None)))
        if not is_whole or value not in allowed:
            raise ValueError(
                f"kernel option {option}={value!r}; one of {', '.join(map(str, allowed))} is needed"
            )
    for option in ("FUSED_BACKWARD", "PACK_GQA", "deterministic", "invariant"):
        if option in options and not isinstance(options[option], bool):
            raise ValueError(f"kernel option {option}={options[option]!r}; True or False is needed")
    splits = options.get("SPLIT_KV", 1)
    if isinstance(splits, bool) or not isinstance(splits, int) or splits < 1:
        raise ValueError(f"kernel option SPLIT_KV={splits!r}; a number of programs, 1 or more, is needed")
    if (precision := options.get("PRECISION", "ieee")) not in PRECISIONS:
        raise ValueError(f"kernel option PRECISION={precision!r}; one of {', '.join(PRECISIONS)} is needed")
    if (route := options.get("ROUTE", "loops")) not in ROUTES:
        raise ValueError(f"kernel option ROUTE={route!r}; one of {', '.join(ROUTES)} is needed")
    if options.get("invariant"):
        _check_pinned(options)
    if arch is not None:
        _check_transposed(options, arch)


def _check_left_out(option: str, value: Any, known: Iterable[str]) -> None:
    """Refuse an option that torch does not have either, and values that torch does not accept."""
    name = _plain_name(option)
    if name not in LEFT_OUT:
        raise ValueError(
            f"unknown kernel option {option!r}{suggest(option, known)}; known: {', '.join(sorted(known))}"
        )
    _, allowed = LEFT_OUT[name]
    if type(value) is not type(allowed[0] if allowed else 0) or (allowed and value not in allowed):
        needed = f"one of {', '.join(map(str, allowed))}" if allowed else "a whole number"
        raise ValueError(f"kernel option {option}={value!r}; {needed} is needed")


def warn_left_out(options: Iterable[tuple[str, Any]]) -> None:
    """Warn, once for each option and value, about options of torch's kernels that have no effect here."""
    for option, value in options:
        default, _ = LEFT_OUT.get(_plain_name(option), (value, None))
        if value != default and (option, value) not in _warned:
            _warned.add((option, value))
            warn_caller(
                f"kernel option {option}={value!r} has no effect: it is for torch's own kernels, and "
                "tritoncp has others; leave it out"
            )


def _plain_name(option: str) -> str:
    return option.removeprefix("fwd_").removeprefix("bwd_")


def _check_pinned(options: dict[str, Any]) -> None:
    """Refuse options that "invariant" sets to another value."""
    for option, value in options.items():
        pinned = PINNED.get(_plain_name(option), value)
        if value != pinned:
            raise ValueError(
                f"kernel option invariant=True with {option}={value!r}: the bits of a row would depend on "
                f"more than its keys; leave {option} out"
            )


def _check_transposed(options: dict[str, Any], arch: str) -> None:
    """Refuse options for kernels that this Triton miscompiles for ``arch``."""
    if options.get("FUSED_BACKWARD") and (why := fused_fault(arch)):
        raise ValueError(
            f"kernel option FUSED_BACKWARD=True: {why}, or leave the option out; "
            f"{UNSAFE_FUSED.name}=1 runs it"
        )
    flips = [option for option in option_names("dq")["FLIP"] if option in options]
    if flips and options[flips[-1]] and (why := transposed_fault(arch)):
        raise ValueError(f"kernel option {flips[-1]}=True: {why}, or leave the option out")


class TileRequest(NamedTuple):
    """The properties of a launch that decide its default config.

    kind:     kind of the kernel, see :data:`tritoncp.kernels.tile_rules.KINDS`
    head_dim: max of the head dims of q, k and of v
    q_block, kv_block: max size of a tile
    tma:      whether the tensors allow tensor descriptors
    score:    weight of the score_mod, see :func:`tritoncp.kernels.tile_rules.weight`
    """

    kind: str
    arch: str
    head_dim: int
    dtype: torch.dtype
    q_block: int
    kv_block: int
    tma: bool = True
    score: str = ""


def choose(request: TileRequest, options: dict[str, Any]) -> Config:
    """Choose the config of a launch: the default, overridden by measured tiles (the option CONFIGS), then by
    the user's ``kernel_options``, fitted to the mask's blocks and the tensors. CONFIGS has (pass, ((field of
    Config, value), ...)) for some passes. Measured tiles that need descriptors are dropped if tensors have
    none, and tiles with FLIP on GPUs that are reported to compute it wrong. CONFIGS may also have ("route",
    (("ROUTE", name),)), the default route.

    Options have torch's names: BLOCK_M, BLOCK_N, num_warps, num_stages with optional ``fwd_``/``bwd_``
    prefix; BLOCK_M1/BLOCK_N1 (dK/dV) and BLOCK_M2/BLOCK_N2 (dQ) for the backward pass; USE_TMA to copy tiles
    by tensor descriptor or not. A tile larger than the mask's block becomes the block; without ``tma`` no
    tile is copied by descriptor, in spite of the options. ROUTE selects the forward kernels: "loops" (the
    default) is one launch with a loop over masked and one over full blocks; "gluon" is one launch whose
    groups of warps take turns; "specialized" is "loops" with roles for warps. If a route is not available, a
    warning names the reason, and "loops" runs.
    (PACK_GQA and SPLIT_KV: see ``TritonEngine.loops``.)
    """
    transposes = multiplies_transposed(request.arch)
    if not transposes:
        _check_transposed(options | {"FUSED_BACKWARD": request.kind == "fused"}, request.arch)
    fences = not copies(request.arch) or fences_async_copies()
    return _choose(request, tuple(options.items()), transposes, fences)


@lru_cache(1024)
def _choose(
    request: TileRequest, options: tuple[tuple[str, Any], ...], transposes: bool, fences: bool
) -> Config:
    """Do :func:`choose`, with a cache.

    transposes: whether tiles of CONFIGS may have FLIP
    fences:     whether tiles that are not copied by descriptor may have several stages
    """
    kind, arch, head_dim, dtype, q_block, kv_block, tma, score = request
    by_option, names = dict(options), option_names(kind).items()
    settings: dict[str, Any] = {
        name: by_option[option] for name, both in names for option in both if option in by_option
    }
    tma = tma and settings.get("USE_TMA", True)
    measured = dict(dict(by_option.get("CONFIGS", ())).get(kind, ()))
    if (measured.get("USE_TMA") and not tma) or (measured.get("FLIP") and not transposes):
        measured = {}
    is_explicit, settings = bool(settings), measured | settings
    if settings.keys() & {"BLOCK_M", "BLOCK_N", "num_warps"}:  # these fit only the default tiles
        settings = {"FLIP": False, "maxnreg": None} | settings
    config = replace(default(kind, arch, head_dim, dtype, tma, score), **settings)
    fitted = replace(
        config,
        BLOCK_M=fit(config.BLOCK_M, q_block),
        BLOCK_N=fit(config.BLOCK_N, kv_block),
        USE_TMA=config.USE_TMA and tma,
        num_stages=config.num_stages if fences or (config.USE_TMA and tma) else 1,
    )
    if fitted.FLIP and not flips_right(arch, flipped_rows(kind, fitted)):
        fitted = replace(fitted, FLIP=False)
    origin = "measured" if measured else "rule"
    origin = f"kernel_options over {origin}" if is_explicit else origin
    line = "%s kernel on %s, head dim %d: %s (%s)"
    log_decision(tiles_log, line, kind, arch, head_dim, str(fitted), origin)
    return fitted


def does_not_fit(kind: str, config: Config, what: str, needed: int, available: int) -> str:
    """Return the error message for a config that needs more resources than the GPU has."""
    by_rule = kind.startswith("selected_")  # by rules alone: kernel options have no effect
    is_smallest = (config.BLOCK_M, config.BLOCK_N, config.num_stages) == (16, 16, 1)
    names = {name: name if by_rule else both[1] for name, both in option_names(kind).items()}
    settings = ", ".join(f"{option}={getattr(config, name)}" for name, option in names.items())
    remedy = "tensors of 16 bits, or with fewer channels" if by_rule or is_smallest else ""
    return (
        f"the {kind} kernel with {settings} needs {needed} bytes of {what} and this GPU has {available}; "
        f"pass {remedy or 'smaller ones in kernel_options'}"
    )

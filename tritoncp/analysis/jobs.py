"""Compilation jobs: a kernel, a GPU architecture and a call, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from tritoncp.kernels.options import ROUTES
from tritoncp.kernels.tile_rules import Config
from tritoncp.masks.closed_forms import causal, document, sliding_window
from tritoncp.masks.mask import Mask, create_block_mask, full_mask
from tritoncp.masks.mask_mod import and_masks

S, HEADS, KV_HEADS = 1024, 8, 2


class Variant(NamedTuple):
    """A mask, whether a launch goes on from a state (adds to gradients) and leaves one; kernel options; how
    many queries there are at most."""

    mask: str
    world_size: int = 1
    load: bool = False
    store: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    queries: int = S


VARIANTS = {
    "full": Variant("full"),
    "causal": Variant("causal"),  # closed form: positions alone
    "window": Variant("window", load=True),
    "documents": Variant("documents"),  # tables and row intervals
    "state": Variant("documents", 4, load=True, store=True),  # the same over gathered keys, step by step
    "mask_mod": Variant("dilated", 4),
    "mask_mod_local": Variant("dilated"),  # one buffer of keys, as torch's templates have it
    "pointers": Variant("documents", 4, load=True, store=True, options=(("USE_TMA", False),)),
    "few": Variant("documents", load=True, options=(("SPLIT_KV", 4),), queries=16),  # a tile of 4 heads
    "short": Variant("documents", load=True, options=(("SPLIT_KV", 4),), queries=64),  # two such tiles
    "decode": Variant("causal", options=(("SPLIT_KV", 4),), queries=1),
    "single": Variant("single"),  # everything that can be 1 is: Triton makes constants of those
    "pair": Variant("pair"),  # the same, without a window
}
KERNELS = ("forward", "delta", "dq", "dkdv")


class Call(NamedTuple):
    """A call on one device, without ranks: a mask of perf/suite/cases.py, query and key heads, tokens;
    queries, if their number differs, which only the mask "full" allows."""

    mask: str
    heads: int
    kv_heads: int
    length: int
    queries: int = 0


@dataclass(frozen=True)
class Job:
    """One kernel to compile: a variant of VARIANTS with heads of ``head_dim`` channels.

    kernel: one of KERNELS; "fused": dK/dV that adds up dQ too; "masked" and "specialised": the two launches
        of the specialised route, where the second starts from a state if there are masked blocks (on sm_100
        there is only the second, which handles masked blocks too); "few": forward with tiles for few rows
        (variant "few" or "decode"); "combine": the launch after it, where several programs share its keys;
        "gluon": the launch of that route
    config: the tiles; None = those of the rule
    v_head_dim: channels of values; None = head_dim
    score:  a score_mod, as tritoncp/masks/expressions.py reads it
    call:   replaces the variant: the exact launch that this call makes
    source: origin of the config, unless it is the rule
    """

    kernel: str
    arch: str
    head_dim: int
    dtype: str = "bfloat16"
    variant: str = "state"
    config: Config | None = None
    v_head_dim: int | None = None
    score: str = ""
    call: Call | None = None
    source: str = ""

    @property
    def dims(self) -> tuple[int, int]:
        """Channels of queries and keys, and of values."""
        return self.head_dim, self.v_head_dim or self.head_dim

    @property
    def name(self) -> str:
        """The job in words.

        >>> Job("dq", "sm_90", 128).name
        'dq sm_90 d128 bfloat16 state'
        """
        return f"{self.kernel} {self.arch} d{self.head_dim} {self.dtype} {self.variant}"

    @classmethod
    def of(cls, raw: dict[str, Any]) -> Job:
        """The job of a dict from ``asdict``."""
        config, call = raw["config"], raw["call"]
        return cls(**raw | {"config": config and Config(**config), "call": call and Call(*call)})


@dataclass(frozen=True)
class Routed(Config):
    """A route of the forward pass, and its tiles."""

    ROUTE: str = ROUTES[0]

    @property
    def kernel(self) -> str:
        return self.ROUTE if self.ROUTE in ROUTES[1:] else "forward"

    @property
    def tiles(self) -> Config:
        return Config(**{name: getattr(self, name) for name in Config.__dataclass_fields__})


def kernel_of(kernel: str, config: Config | None) -> tuple[str, Config | None]:
    """The kernel and tiles that are launched for a config of a target's kernel."""
    return (config.kernel, config.tiles) if isinstance(config, Routed) else (kernel, config)


def options_of(kernel: str, config: Config | None) -> dict[str, Any]:
    """The engine options that select this config for a kernel; empty for None, the rule's config."""
    kind = "forward" if kernel == "masked" else kernel
    return {"CONFIGS": ((kind, tuple(asdict(config).items())),)} if config else {}


def mask_of(name: str, queries: int = S) -> Mask:
    if name == "full":
        return full_mask(queries, S)
    documents = document(lengths=[300, 424, 300])
    forms: dict[str, tuple[Callable[..., Any], int]] = {
        "causal": (causal(), S),
        "window": (sliding_window(200, 10), S),
        "single": (sliding_window(1, 1), 1),
        "pair": (causal(), 1),
        "documents": (and_masks(causal(), documents), S),
        "dilated": (_dilated, S),
    }
    mod, length = forms[name]
    return create_block_mask(mod, 1, 1, min(queries, length), length)


def _dilated(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q - kv) % 3 == 0

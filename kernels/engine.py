"""The Triton engine: one object that launches forward, delta, dQ and dK/dV for one attention call.

It handles tensors, tables and jit functions; masks, meshes and ranks belong to the callers.
"""

import warnings
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module
from typing import Any

import torch
import triton
from torch import Tensor

from tritoncp.core.opaque_integers import opaque
from tritoncp.kernels.backward import delta_kernel, dkdv_kernel, dq_kernel
from tritoncp.kernels.forward import combine_kernel, forward_kernel
from tritoncp.kernels.launch import Launch, Launches, Recipe, State, layouts_of, prepare_launch
from tritoncp.kernels.operands import (
    Mods,
    Tiling,
    count_tiles,
    descriptor_entries,
    side_layout,
    step_tables,
    streamed_tensors,
)
from tritoncp.kernels.options import ROUTES, TileRequest, check_options, choose, option_names
from tritoncp.kernels.program_order import SHARED_HEADS, arrange_programs, check_grid, section_heads
from tritoncp.kernels.routes.route_check import verify_route
from tritoncp.kernels.scores import Closure, Origin
from tritoncp.kernels.tile_rules import (
    FEW,
    RESCALED_CHANNELS,
    Config,
    architecture,
    copies,
    gqa_pack_factor,
    num_kv_splits,
    sum_parts,
    weight,
    widest_piece,
)
from tritoncp.kernels.tile_runs import MaskRule
from tritoncp.kernels.tiles import INTERPRETED, channel_range, channels, copyable, view

MAX_PARTIAL_BYTES = 256 << 20  # max bytes of partial sums: dK/dV of a GQA group, states of a row's keys
FULL_TILE_ROWS = 128  # number of rows that fill a tile on every architecture
FUSED_CHANNELS = 256  # max head dim for which one program sums dK and dV


class RequestedRouteWarning(UserWarning):
    """Warns that a step takes another route than its kernel options request."""


@dataclass(frozen=True)
class TritonEngine:
    """The Triton engine: launches the kernels of one attention call.

    scale:    multiplies q k^T before score_mod
    options:  torch-style kernel options, see :func:`tritoncp.kernels.options.choose`
    arch:     architecture whose tile shapes are used; by default the architecture of the tensors' device
    first_row: index in the whole batch of the tensors' batch row 0, for masks and mods
    first_head: index in the layer of the tensors' first query head, for masks and mods
    launches: cache of launches. All steps of an engine with the same tables, first head
              and flags have tensors of the same layouts, so that a look-up need not inspect them
    is_new:   whether this is the first pass of the engine
    """

    mods: Mods
    scale: float
    options: dict[str, Any] = field(default_factory=dict)
    arch: str | None = None
    first_row: int = 0
    first_head: int = 0
    launches: Any = field(default_factory=dict, repr=False)
    is_new: bool = False
    v_head_dim = None  # the head dim of values
    selected = None  # the mask alone decides

    def __post_init__(self) -> None:
        check_options(self.options, self.arch)

    def with_captures(self, caps: tuple[Any, ...], dcaps: tuple[Any, ...]) -> "TritonEngine":
        """Copy an engine and give its score_mod captures, see :class:`tritoncp.mods.Mod`."""
        (mask, score, grad, *rest), new = self.mods, tuple.__new__
        if dcaps:
            grad = new(Closure, (grad.fn, dcaps))  # as Closure(...), in half the time
        return self._copy(mods=new(Mods, (mask, new(Closure, (score.fn, caps)), grad, *rest)))

    def from_head(self, first: int) -> "TritonEngine":
        """Copy an engine for tensors that begin with another query head of the layer."""
        return self._copy(first_head=first)

    def _copy(self, **fields: Any) -> "TritonEngine":
        """Copy the engine with other fields, without checks of its options."""
        copy = object.__new__(TritonEngine)
        copy.__dict__.update(self.__dict__, **fields)
        return copy

    @cached_property
    def kernel_set(self) -> tuple[Any, ...]:
        """Key of the kernels that the engine launches; engines with equal keys launch the same kernels."""
        functions = [closure.fn for closure in self.mods[:4]]
        return *functions, self.scale, self.arch, *self.options.items()

    @property
    def fused(self) -> bool:
        """Whether the loop of dK/dV also computes dQ: only if requested, and never if results must be
        deterministic."""
        deterministic = self.options.get("deterministic", torch.are_deterministic_algorithms_enabled())
        return bool(self.options.get("FUSED_BACKWARD")) and not deterministic

    def _fuses(self, step: Any) -> bool:
        """Whether a backward step computes dQ in the loop of dK/dV."""
        return self.fused and _is_narrow(step)

    def forward(self, step: Any) -> Launch | Launches:
        """Prepare one step of attention by the requested route, or by the fastest measured one.

        step: :class:`tritoncp.planning.step_tables.ForwardStep`
        """
        name = self.route
        if name == ROUTES[0] or ("ROUTE" not in self.options and step.q.shape[2] < FULL_TILE_ROWS):
            return self.loops(step)
        route, is_explicit = route_of(name), "ROUTE" in self.options
        obstacle = next(route.obstacles(self, step), None)
        why = obstacle or verify_route(self, route.launch, step)
        if why is None:
            return route.launch(self, step)
        if is_explicit or not obstacle:
            origin = "requested" if is_explicit else "in the table of measured tiles"
            category = RequestedRouteWarning if is_explicit else UserWarning
            message = f"ROUTE={name!r} is {origin}; this step goes by 'loops': {why}"
            warnings.warn(message, category, stacklevel=2)
        return self.loops(step)

    @cached_property
    def route(self) -> str:
        """The requested route, or the measured one (which has separate tiles, and needs whole tiles of rows
        and one program per tile)."""
        entry, options = dict(self.options.get("CONFIGS", ())).get("route"), self.options
        if options.get("ROUTE"):
            return str(options["ROUTE"])
        tiles = {option for both in option_names("forward").values() for option in both}
        other = options.get("PACK_GQA") or options.get("SPLIT_KV", 1) > 1 or options.keys() & tiles
        return dict(entry)["ROUTE"] if entry and not other else "loops"

    def loops(self, step: Any, kind: str = "forward") -> Launch | Launches:
        """Prepare a step of attention: one launch with a loop over masked blocks and one over full ones.

        For few rows, a tile has the rows of all query heads that share a KV head (the option PACK_GQA forces
        or forbids it; tables per head rule it out), and several programs share the keys (SPLIT_KV sets their
        number). A second kernel combines their states in the order of the keys: equal calls give equal bits,
        but another number of programs gives other bits.
        """
        q, k, v, tables, out, lse, max_scores, state, load_state, store_state = step
        tensors: dict[str, Any] = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "max_scores": max_scores}
        tensors["state"] = state and tuple.__new__(State, state)
        flags = {"LOAD_STATE": load_state, "STORE_STATE": store_state}
        parts = self._parts(q, v)
        launches = [self.launch(forward_kernel, kind, tensors, tables, flags, part=part) for part in parts]
        if launches[0].values[_SPLITS] is None:
            return _in_order(launches)
        key = "combine", self.first_head, tables, max_scores is None, *flags.values()
        return _share_keys(self.launches, key, launches, tensors, tables)

    def _parts(self, q: Tensor, summed: Tensor) -> list[tuple[int, int]]:
        """List the parts (part, number of parts) of the channels of a sum, which are separate launches."""
        if summed.shape[3] <= FUSED_CHANNELS:  # no look-up of the device in most calls
            return [(0, 1)]
        parts = sum_parts(self.arch or architecture(q.device), summed.shape[3])
        return [(part, parts) for part in range(parts)]

    def streams(self, k: Tensor, v: Tensor, tables: Any) -> bool:
        """Whether descriptors may copy tiles of these keys and values."""
        return streamed_tensors(tables, {"k": k, "v": v}, by_keys=False).copyable()

    def delta(self, out: Tensor, dout: Tensor, dlse: Tensor | None, delta: Tensor) -> Launch:
        """Prepare delta [B, H, S] = rowsum(out * dout) - dlse."""
        b, h, s, e = out.shape

        def recipe() -> Recipe:
            rows = 64 if e <= FUSED_CHANNELS else 16
            args = {"n_s": s, "E": e, "BLOCK_M": rows, "BLOCK_E": triton.next_power_of_2(e)}
            # If two threads add their products, fma rounds one product in each thread, and not the same one:
            # the copies of a row's sum would differ in their last bits.
            unfused = {"enable_fp_fusion": False}
            return Recipe(check_grid(-(-s // rows), h, b), args, Config(rows, 0, 4, 1), options=unfused)

        tensors = {"out": out, "dout": dout, "dlse": dlse, "delta": delta}
        key = (
            "delta",
            *layouts_of(tensors, {}),
        )  # there are no tables, and ranks of one process share an engine
        return prepare_launch(self.launches, key, delta_kernel, tensors, {}, recipe)

    def dq(self, step: Any, dq: Tensor, *, add: bool = False) -> Launch | Launches:
        """Prepare dQ of one step, and the gradients of score_mod's captures; ``add`` accumulates into dq.

        step: :class:`tritoncp.planning.step_tables.BackwardStep`
        """
        if self._fuses(step):
            return Launches(() if add else (dq.zero_,))
        tensors, flags = _backward_tensors(step, dq=dq), {"ADD": add}
        grads = self.mods.score_grad, self.mods.score_back  # the first launch adds the captures' gradients
        return _in_order(
            [
                self.launch(dq_kernel, "dq", tensors, step.tables, flags, grads[part[0] > 0], part)
                for part in self._parts(step.q, step.q)
            ]
        )

    def dkdv(
        self, step: Any, dk: Tensor, dv: Tensor, dq: Tensor | None = None, *, add: bool = False,
        split: int = 1,
    ) -> Launch | Launches:  # fmt: skip
        """Prepare dK and dV of a :class:`tritoncp.planning.step_tables.BackwardStep`. With ``split`` > 1, dk
        and dv have ``Hkv * split`` heads of partial sums.

        A fused engine adds dQ to the float32 ``dq``, and the gradients of captures to their buffers. Above
        FUSED_CHANNELS channels, whose sums do not fit the registers, dV and dK are two launches, and the
        scores are computed once more.
        """
        fused = self._fuses(step)
        tensors = _backward_tensors(step, dk=dk, dv=dv, dq=dq if fused else None)
        flags, kind = {"ADD": add, "SPLIT": split}, "fused" if fused else "dkdv"
        score_grad = self.mods.score_grad if fused else self.mods.score_back
        results = [("dk dv", (0, 1))]
        if not _is_narrow(step):
            results = [("dv", part) for part in self._parts(step.q, step.v)]
            results += [("dk", part) for part in self._parts(step.q, step.q)]
        return _in_order(
            [
                self.launch(
                    dkdv_kernel, kind, tensors, step.tables, flags | {"RESULTS": name}, score_grad, part
                )
                for name, part in results
            ]
        )

    def split(self, q: Tensor, k: Tensor, tables: Any) -> int:
        """Choose the number of programs that share a KV head's query heads: more than one only if there are
        too few programs to fill the device, and the float32 partial sums stay small."""
        group = q.shape[1] // k.shape[1]
        if q.device.type == "cpu" or group == 1 or self.options.get("invariant"):
            return 1
        config = self.config("dkdv", q, k, tables)
        programs = count_tiles(tables, "kv", config.BLOCK_N) * k.shape[1] * q.shape[0]
        partials = 2 * group * k.shape[0] * k.shape[1] * k.shape[2] * k.shape[3] * 4
        crowded = programs >= 2 * torch.cuda.get_device_properties(q.device).multi_processor_count
        return 1 if crowded or partials > MAX_PARTIAL_BYTES else group

    def config(
        self, kind: str, q: Tensor, v: Tensor, tables: Any, tma: bool = True, q_block: int | None = None
    ) -> Config:
        """Choose the config of a kernel. q_block: max number of rows of a tile, by default the mask's Q
        block"""
        arch, block = self.arch or architecture(q.device), q_block or tables.q_block
        dim = max(q.shape[3], v.shape[3])
        learns = bool(self.mods.score_grad.captured)
        score = weight(kind, self.mods.score_loads, learns) if self.mods.score.fn else ""
        return choose(TileRequest(kind, arch, dim, q.dtype, block, tables.kv_block, tma, score), self.options)

    def _forward_tiling(self, q: Tensor, k: Tensor, v: Tensor, tables: Any, tma: bool) -> Tiling:
        """Choose tiles that few rows fill, and enough programs to fill the device, or follow PACK_GQA and
        SPLIT_KV.  Interpreted kernels only follow the options."""
        rows, options = min(q.shape[2], tables.q_block), self.options
        is_explicit = options.get("PACK_GQA") or options.get("SPLIT_KV", 1) > 1
        arch, group = self.arch or architecture(q.device), q.shape[1] // k.shape[1]
        few = rows < FULL_TILE_ROWS and arch != "interpreter" and not options.get("invariant")
        if not few and not is_explicit:
            return Tiling(self.config("forward", q, v, tables, tma), tables.q_block)
        config = partial(self.config, q=q, v=v, tables=tables, tma=tma)
        same_tables = all(t is None or t.shape[1] == 1 for t in (tables.row_ptr, tables.lo))  # for all heads
        widest = config("forward", q_block=1 << 16).BLOCK_M
        pack = gqa_pack_factor(rows, group, widest) if few else 1
        pack = min(group, widest) if options.get("PACK_GQA") else pack
        pack = pack if same_tables and options.get("PACK_GQA", True) else 1
        alone = few and q.shape[2] * pack <= FEW
        block = tables.q_block
        if alone or pack > 1:  # wgmma and tcgen05 take at least 64 rows
            least = 64 if copies(arch) else 16
            block = triton.next_power_of_2(max(least, rows * pack))
        tile = config("few" if alone else "forward", q_block=block)
        longest = min(tables.q_block, triton.next_power_of_2(max(1, q.shape[2])))
        tiling = Tiling(tile, longest, min(pack, tile.BLOCK_M))
        return tiling._replace(splits=options.get("SPLIT_KV") or self._splits(q, k, v, tables, tiling))

    def _splits(self, q: Tensor, k: Tensor, v: Tensor, tables: Any, tiling: Tiling) -> int:
        """Choose the number of programs that share the keys of a tile: more than one only if rows are too few
        to fill the device with programs, and the states of the programs stay small."""
        if q.device.type == "cpu" or not 0 < q.shape[2] < FULL_TILE_ROWS:
            return 1
        programs = tiling.count_tiles(tables) * tiling.count_heads(q, k) * q.shape[0]
        first, end = tables.kv_first, tables.kv_first + tables.kv_rows
        if tables.window:
            left, right = tables.window
            first = first if left is None else max(first, tables.q_first - left)
            end = end if right is None else min(end, tables.q_first + tables.q_rows + right)
        tiles = triton.cdiv(end - first, tiling.config.BLOCK_N)
        state = 4 * (v.shape[3] + 2) * q.numel() // q.shape[3]
        sms = torch.cuda.get_device_properties(q.device).multi_processor_count
        return max(1, min(MAX_PARTIAL_BYTES // max(1, state), num_kv_splits(programs, tiles, sms)))

    def launch(
        self, kernel: Any, kind: str, tensors: dict[str, Any], tables: Any, flags: dict[str, Any],
        score_grad: Closure | None = None, part: tuple[int, int] = (0, 1),
    ) -> Launch:  # fmt: skip
        """Prepare a launch for a ``part`` of the channels of its sum. ``tensors`` change at every call, but
        usually keep their layouts, so what depends only on layouts and ``flags`` is cached."""
        closures = {"score_mod": self.mods.score}
        if score_grad is not None:
            closures["score_grad"] = score_grad
        key = kind, self.first_head, tables, tensors.get("max_scores") is None, part, *flags.values()

        def recipe() -> Recipe:
            return self._recipe(kind, tensors, tables, flags, part)

        return prepare_launch(self.launches, key, kernel, tensors, closures, recipe)

    def _recipe(
        self, kind: str, tensors: dict[str, Any], tables: Any, flags: dict[str, Any], part: tuple[int, int]
    ) -> Recipe:
        """Build the parts of a launch that depend only on layouts, ``flags`` and ``part``."""
        q, k, v = (tensors[name] for name in "qkv")
        by_keys = kind in ("dkdv", "fused")  # each program computes a tile of keys, and queries are streamed
        streamed = streamed_tensors(tables, tensors, by_keys)
        arch, kv_heads = self.arch or architecture(q.device), k.shape[1]
        section = section_heads(kv_heads, streamed.count_bytes() // kv_heads, arch)
        if kind == "forward":
            tiling = self._forward_tiling(q, k, v, tables, streamed.copyable())
        else:
            tiling = Tiling(self.config(kind, q, v, tables, streamed.copyable()), tables.q_block)
        config = tiling.config
        tile = config.BLOCK_M if by_keys else config.BLOCK_N
        widest = 128 if by_keys else widest_piece(arch, max(q.shape[3], v.shape[3]), config)
        qk = channels(q.shape[3], widest)
        vo = channels(v.shape[3], RESCALED_CHANNELS if kind == "specialized" else widest)
        sums_values = kind == "forward" or flags.get("RESULTS") == "dv"
        ragged = streamed.ragged(tile, bool(tables.window))
        args = (
            flags
            | tiling.args(tables)
            | {
                "tables": step_tables(tables, self.mods.mask, by_keys),
                "origin": Origin(opaque(self.first_row), opaque(self.first_head)),
                "SCALE": self.scale,
                "GROUP": q.shape[1] // kv_heads,
                "QK": qk,
                "VO": channel_range(vo, *part) if sums_values else vo,
                "SUM": qk if sums_values else channel_range(qk, *part),
                "RULE": MaskRule(tables.has_masked, tables.bounded, ragged),
                "PRECISION": self.options.get("PRECISION", "ieee"),
                "SPECIALIZE": kind == "specialized",
            }
        )
        if by_keys:
            tiles, heads = count_tiles(tables, "kv", config.BLOCK_N), kv_heads * flags["SPLIT"]
        else:
            tiles, heads = tiling.count_tiles(tables) * tiling.splits, tiling.count_heads(q, k)
        slots = tables.col_order if by_keys else tables.row_order
        args["order"], grid = arrange_programs(
            slots, tiles, heads, heads // kv_heads * section, q.shape[0],
            has_sections=kv_heads > SHARED_HEADS,
        )  # fmt: skip
        entries = streamed.descriptors(tile, qk, vo) if config.USE_TMA else []
        if kind == "fused" and config.USE_TMA and not INTERPRETED and copyable(tensors["dq"]):
            entries += descriptor_entries("dq", tensors["dq"], tile, qk)
        return Recipe(grid, args, config, entries)


def route_of(name: str) -> Any:
    """Import the module of a route of the forward pass other than "loops". Its ``launch`` takes an engine and
    the arguments of :meth:`TritonEngine.loops`; its ``obstacles`` yield reasons why a step cannot use it.
    """
    return import_module(f"tritoncp.kernels.routes.forward_{name}")


def _backward_tensors(step: Any, **grads: Tensor | None) -> dict[str, Any]:
    """Name the tensors of a backward step and of its results as the kernels do."""
    tensors = step._asdict() | grads
    del tensors["tables"]
    return tensors


def _in_order(launches: list[Launch]) -> Launch | Launches:
    """Make one launch of several."""
    return launches[0] if len(launches) == 1 else Launches(tuple(launches))


def _is_narrow(step: Any) -> bool:
    """Whether one program sums dK and dV of a tile."""
    return max(step.q.shape[3], step.v.shape[3]) <= FUSED_CHANNELS


_COMBINE = Config(1, 16, 4, 1)
_SPLITS = forward_kernel.arg_names.index("splits")


def _share_keys(
    cache: Any, key: Any, launches: list[Launch], tensors: dict[str, Any], tables: Any
) -> Launches:
    """Make the launches of a step in which several programs share the keys of a tile. In ``launches`` each
    program stores a state under a separate head index; the last, cached by ``key``, combines the states."""
    args, (b, h, s, _), e = launches[0].args, tensors["q"].shape, tensors["v"].shape[3]
    splits, dtype, device = (
        args["splits"],
        torch.promote_types(tensors["q"].dtype, torch.float32),
        tensors["q"].device,
    )
    m, l = torch.empty(2, b, h * splits, s, dtype=dtype, device=device).unbind()
    parts = State(torch.empty(b, h * splits, s, e, dtype=dtype, device=device), m, l)
    block = args["Q_LAYOUT"].BLOCK

    def recipe() -> Recipe:
        combined = {name: args[name] for name in ("splits", "LOAD_STATE", "STORE_STATE")} | {
            "q_slots": args["tables"].q_slots,
            "E": e,
            "BLOCK_E": triton.next_power_of_2(e),
            "PARTS": 16,
            "Q_LAYOUT": side_layout(block, 1, bool(tables.window), tables.dense_q),
        }
        grid = check_grid(count_tiles(tables, "q", 1, block), h, b)
        return Recipe(grid, combined, _COMBINE)

    results = {name: tensors[name] for name in ("out", "lse", "max_scores", "state")}
    combine = prepare_launch(cache, key, combine_kernel, results | {"parts": parts}, {}, recipe)
    states = State._make(map(view, parts))
    apart = [launch.with_args(state=states, LOAD_STATE=False, STORE_STATE=True) for launch in launches]
    return Launches((*apart, combine))

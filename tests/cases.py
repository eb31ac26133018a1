"""Whole calls as data: run by tritoncp, and compared with dense attention in float64."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

import tritoncp
from tests import zoo
from tests.compat import torch_mods
from tests.device import ON_GPU, generator, rounding
from tests.zoo import Rule, ScoreMod, Sizes
from tritoncp.reference.dense import dense_attention

AUX = AuxRequest(lse=True, max_scores=True)
SIDES = ("q", "kv", "kv")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("dense", "heads inside", "slice", "channels apart", "one channel", "rows alike", "one row of keys")
PASSES = ("forward", "out", "lse", "out and lse", "out of some rows")  # outputs on which the loss depends
MASKS, SCORES = zoo.MASKS | torch_mods.MASKS, zoo.SCORES | torch_mods.SCORES
Expression = tuple[Any, ...]  # ("window", 7), ("not", a), ("and", a, b), ("or", a, b)
Answers = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One call.

    batch:     rows of the mask; the tensors are its rows from ``first_row`` on
    heads:     of keys and values; ``group`` query heads read each
    dims:      channels of q and k, of v
    mask:      of :data:`MASKS`, by name and number, or combined
    own_lists: whether batch rows and heads have separate block lists, although one list would do
    form:      of the mask in a call without a plan: "compact", "torch's" BlockMask, "without lists"
    size:      of q and k
    world:     ranks, 1 with balancer None: the call without ranks
    balancer:  a name, or "any pieces": shards of any length, passed with the mask in place of a plan
    seed:      of the numbers in tensors
    options:   kernel_options
    compiled:  whether a call without ranks runs under torch.compile, as one graph
    """

    mask: Expression = ("causal", 0)
    score: str = "none"
    schedule: str = "auto"
    world: int = 1
    balancer: str | None = None
    batch: int = 1
    first_row: int = 0
    heads: int = 2
    group: int = 1
    length: int = 40
    kv_length: int = 40
    dims: tuple[int, int] = (8, 8)
    dtype: torch.dtype = torch.float64
    own_lists: tuple[bool, bool] = (False, False)
    form: str = "compact"
    block: Any = 16
    sinks: bool = False
    scale: float | None = None
    layout: str = "dense"
    loss: str = "out and lse"
    size: float = 1.0
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    compiled: bool = False

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.batch, self.heads * self.group, self.length, self.kv_length)

    @property
    def rows(self) -> int:
        """Batch rows of the tensors."""
        return self.batch - self.first_row

    @property
    def rule(self) -> Rule:
        return combined(self.mask, self.sizes)

    def score_mod(self, learned: Tensor | None) -> ScoreMod | None:
        return SCORES[self.score].bind(self.sizes, self.rule.visible, learned)

    def block_mask(self) -> tritoncp.Mask:
        rule, sizes = self.rule, self.sizes
        batch = sizes.batch if rule.by_row or self.own_lists[0] else 1
        heads = sizes.heads if rule.by_head or self.own_lists[1] else 1
        return tritoncp.create_block_mask(rule.mod, batch, heads, *sizes[2:], BLOCK_SIZE=self.block)

    def raw_mask(self) -> Any:
        """Return the mask of a call without a plan."""
        if self.form == "without lists":
            return tritoncp.and_masks(tritoncp.sliding_window(-1, -1), self.rule.mod)
        mask = self.block_mask()
        return mask if self.form == "compact" else mask.to_block_mask()

    def visible(self) -> Tensor:
        """Return the visible pairs: bool [rows, heads, length, kv_length]."""
        index = torch.meshgrid(*map(torch.arange, self.sizes), indexing="ij")
        return self.rule.visible(*index).expand(self.sizes)[self.first_row :]


def combined(mask: Expression, sizes: Sizes) -> Rule:
    """Return the rule of an expression."""
    if mask[0] not in ("not", "and", "or"):
        return MASKS[mask[0]](sizes, mask[1])
    parts = [combined(part, sizes) for part in mask[1:]]
    by_row, by_head = any(part.by_row for part in parts), any(part.by_head for part in parts)
    one, other = parts[0], parts[-1]
    mods = [part.mod for part in parts]
    if mask[0] == "not":
        return Rule(tritoncp.not_(*mods), lambda *at: ~one.visible(*at), by_row, by_head)
    if mask[0] == "and":
        both = tritoncp.and_masks(*mods)
        return Rule(both, lambda *at: one.visible(*at) & other.visible(*at), by_row, by_head)
    return Rule(tritoncp.or_masks(*mods), lambda *at: one.visible(*at) | other.visible(*at), by_row, by_head)


# -- tensors ----------------------------------------------------------------------------------------------


def tensors(case: Case) -> dict[str, Tensor]:
    """Return the leaves: q, k, v and, if the case has them, sinks and the learned tensor of its score_mod."""
    g = generator(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    _, heads, length, kv_length = case.sizes
    rows = 1 if case.layout == "one row of keys" else case.rows
    leaves = {
        "q": normal(case.rows, heads, length, case.dims[0]) * case.size,
        "k": normal(rows, case.heads, kv_length, case.dims[0]) * case.size,
        "v": normal(rows, case.heads, kv_length, case.dims[1]),
    }
    leaves = {name: laid_out(x.to(case.dtype), case.layout) for name, x in leaves.items()}
    shape = SCORES[case.score].shape(case.sizes)
    if shape:
        leaves["learned"] = normal(*shape).to(case.dtype)
    if case.sinks:
        leaves["sinks"] = normal(heads).to(case.dtype)
    return {name: x.detach().requires_grad_(case.loss != "forward") for name, x in leaves.items()}


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Return x [B, H, S, D], or one batch row of it for all, with the memory layout of this name."""
    if layout == "heads inside":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "slice":
        return torch.cat([x, x + 1], 2)[:, :, : x.shape[2]]
    if layout == "channels apart":
        return x.mT.contiguous().mT
    if layout == "one channel":
        return torch.stack([x, -x], -1)[..., 0]
    return x[:1].expand(x.shape) if layout == "rows alike" else x


# -- answers ----------------------------------------------------------------------------------------------


def call(case: Case, q: Tensor, k: Tensor, v: Tensor, learned: Any = None, sinks: Any = None) -> list[Tensor]:
    """Return out, lse and max_scores of tritoncp, on one device or on all ranks of a simulated world."""
    score = case.score_mod(learned)
    options: dict[str, Any] = {"scale": case.scale, "enable_gqa": True, "return_aux": AUX}
    options["kernel_options"] = dict(case.options)
    options["batch_offset"] = case.first_row or None
    if (case.world, case.balancer) == (1, None):
        attend = partial(tritoncp.flex_attention, score_mod=score, block_mask=case.raw_mask(), **options)
        if case.compiled:
            attend = torch.compile(attend, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager")
        out, aux = attend(q, k, v, sinks=sinks)
        return [out, aux.lse, aux.max_scores]
    world = tritoncp.simulate(case.world)
    if case.balancer == "any pieces":
        parts = (
            any_pieces(q, case.world, case.seed),
            *(any_pieces(x, case.world, case.seed + 1) for x in (k, v)),
        )
        outs, aux = world.flex_attention(*parts, score, case.raw_mask(), sinks=sinks, **options)
        return [torch.cat(xs, 2) for xs in (outs, aux.lse, aux.max_scores)]
    plan = world.make_plan(case.block_mask(), balancer=case.balancer, schedule=case.schedule)
    placed = plan.batch_rows(case.first_row, case.rows) if case.first_row else plan
    if len(placed.positions) > 1:  # rows lie differently
        k, v = (x.expand(case.rows, -1, -1, -1) for x in (k, v))
    shards = [world.shard(x, placed, dim=2, side=side, pad=math.nan) for x, side in zip((q, k, v), SIDES)]
    outs, aux = world.flex_attention(*shards, score, plan, sinks=sinks, **options)
    for rank, out in enumerate(outs):
        padding = (~placed.for_rank(rank).valid)[:, None].expand(out.shape[:3])
        assert bool((out[padding] == 0).all()), f"out in the padding of rank {rank}"
        assert sinks is not None or bool((aux.lse[rank][padding] == -math.inf).all()), f"lse, rank {rank}"
    return [world.unshard(xs, placed, dim=2) for xs in (outs, aux.lse, aux.max_scores)]


def any_pieces(x: Tensor, world: int, seed: int) -> list[Tensor]:
    """Cut x [B, H, S, D] into ``world`` pieces in order, some of them empty."""
    g = generator(seed)
    cuts = torch.randint(0, x.shape[2] + 1, (world - 1,), generator=g).sort().values.tolist()
    return [x[:, :, a:b] for a, b in itertools.pairwise([0, *cuts, x.shape[2]])]


def dense(
    case: Case, q: Tensor, k: Tensor, v: Tensor, learned: Any = None, sinks: Any = None
) -> list[Tensor]:
    """Return out, lse and max_scores of dense attention, with pairs that tritoncp did not compute."""
    mod = case.score_mod(learned)
    score = mod and (lambda s, b, *rest: mod(s, b + case.first_row, *rest))
    return [*dense_attention(q, k, v, case.visible(), score, scale=case.scale, sinks=sinks)]


def answers(case: Case, leaves: dict[str, Tensor], function: Callable[..., Sequence[Tensor]]) -> Answers:
    """Return out, lse, max_scores and the gradients of the case's loss."""
    out, lse, top = function(case, **leaves)
    got = {"out": out.detach(), "lse": lse.detach(), "max_scores": top.detach()}
    if case.loss == "forward":
        return got
    g = generator(case.seed + 1)
    by_out = torch.randn(out.shape, generator=g, dtype=torch.float64).to(case.dtype).double()
    by_lse = torch.randn(lse.shape, generator=g).double()  # float32, as gradients of lse
    if case.loss == "out of some rows":
        by_out = by_out * (by_lse > 0)[..., None]
    loss = (out.double() * by_out).sum() * (case.loss != "lse")
    if "lse" in case.loss:
        loss = loss + (torch.where(lse == -math.inf, 0, lse).double() * by_lse).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return got | {f"gradient of {name}": grad for name, grad in zip(leaves, grads, strict=True)}


def expected(case: Case) -> Answers:
    """Return the answers of dense attention in float64."""
    leaves = tensors(case)
    double = {name: x.detach().double().requires_grad_(x.requires_grad) for name, x in leaves.items()}
    return answers(case, double, dense)


def agree(case: Case, got: Answers, want: Answers) -> None:
    """Assert that answers have the dtypes of the call, and that each is within its rounding."""
    assert got.keys() == want.keys()
    for name, exact in want.items():
        value = got[name]
        statistic = name in ("lse", "max_scores")
        dtype = torch.promote_types(case.dtype, torch.float32) if statistic else case.dtype
        assert value.shape == exact.shape and value.dtype == dtype, f"{name}: {value.dtype} {value.shape}"
        assert value.device == exact.device, f"{name} is on {value.device}"
        finite = exact[exact.isfinite()].abs()
        limit = tolerance(dtype, name) * max(1.0, float(finite.max()) if finite.numel() else 0.0)
        error = torch.where(value.double() == exact, 0, (value.double() - exact).abs())
        assert bool((error <= limit).all()), f"{name}: {float(error.max()):.3g} off, allowed {limit:.3g}"


def tolerance(dtype: torch.dtype, name: str) -> float:
    """Return the allowed error relative to the max value. Gradients of learned tensors and sinks are sums
    over all pairs or rows."""
    grown = 4 if name in ("gradient of learned", "gradient of sinks") else 1
    return (
        rounding(name)
        * grown
        * {torch.float64: 1e-11, torch.float32: 1e-5}.get(dtype, 4 * torch.finfo(dtype).eps)
    )


def check(case: Case) -> None:
    """Assert that tritoncp's answers equal dense attention."""
    agree(case, answers(case, tensors(case), call), expected(case))


# -- factors ----------------------------------------------------------------------------------------------

FACTORS: dict[str, Any] = {
    "mask": tuple(zoo.MASKS),
    "score": tuple(zoo.SCORES),
    "schedule": ("auto", "allgather", "ring", "fetch", "ulysses", "ulysses+ring"),
    "world": (1, 2, 3, 4, 6),
    "balancer": (*zoo.BALANCERS, "any pieces"),
    "loss": PASSES,
    "dtype": DTYPES,
    "heads, group": ((2, 1), (1, 4), (3, 2), (2, 2)),
    "batch, first_row": ((1, 0), (2, 0), (3, 0), (3, 1)),
    "length, kv_length": ((40, 40), (37, 37), (21, 34), (34, 21), (5, 5)),  # the last: one block
    "dims": ((8, 8), (3, 16), (16, 1), (1, 5)),
    "block": (8, 13, (8, 16), (16, 4), (32, 5)),
    "own_lists": ((False, False), (True, False), (False, True)),
    "form": ("compact", "torch's", "without lists"),
    "layout": LAYOUTS,
    "sinks": (False, True),
    "scale": (None, 0.3, -0.2, 0.0),
}
# The cases of torch's flex attention tests: each score once, with few values of the other factors.
TORCHS: dict[str, Any] = {
    "mask": tuple(torch_mods.MASKS),
    "score": tuple(torch_mods.SCORES),
    "world": (1, 2),
    "batch, first_row": ((1, 0), (2, 1)),
    "heads, group": ((2, 1), (1, 2)),
    "block": (16, (8, 16)),
}


def case_of(row: Mapping[str, Any], seed: int) -> Case:
    """Return the case of one value of each factor, of one or more fields; ``seed`` also numbers the mask."""
    fields: dict[str, Any] = {"seed": seed}
    for names, value in row.items():
        fields |= dict(zip(names.split(", "), value)) if ", " in names else {names: value}
    return Case(**fields | {"mask": (row["mask"], seed)})


def named(cases: Sequence[Case]) -> list[Any]:
    """Return the cases as parameters with names."""
    return [
        pytest.param(case, id="-".join(map(str, (case.mask[0], case.score, case.schedule, case.world))))
        for case in cases
    ]


def spread(factors: Mapping[str, Sequence[Any]], count: int) -> list[Case]:
    """Return ``count`` cases with each value of a factor equally often, in a separate order for each
    factor."""
    columns = [
        random.Random(name).sample([*islice(cycle(values), count)], count) for name, values in factors.items()
    ]
    return [case_of(dict(zip(factors, row)), seed) for seed, row in enumerate(zip(*columns), 1)]


def of_torch(factors: Mapping[str, Sequence[Any]], **more: Sequence[Any]) -> list[Case]:
    """Return the cases of torch's tests, with these values of other factors."""
    return [
        replace(case, dtype=torch.float64) if case.score in torch_mods.FLOAT64 else case
        for case in spread({**factors, **TORCHS, **more}, len(torch_mods.SCORES))
    ]


def pairs(factors: Mapping[str, Sequence[Any]], apart: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield rows that together contain every pair of values of every two factors. For the two factors
    ``apart``, if given, they only contain every value.

    Greedy: a row begins with a missing pair, then each factor takes the value that adds most missing pairs.
    """
    choices = {name: [(i, j) for j in range(len(values))] for i, (name, values) in enumerate(factors.items())}
    missing = dict.fromkeys(
        pair
        for one, other in itertools.combinations(choices, 2)
        for pair in itertools.product(choices[one], choices[other])
        if {one, other} != {*apart}
    )

    def count_new(choice: tuple[int, int], row: list[tuple[int, int]]) -> int:
        return sum(tuple(sorted((choice, other))) in missing for other in row)

    while missing:
        row = list(next(iter(missing)))
        for values in choices.values():
            if not set(values) & set(row):
                row.append(max(values, key=partial(count_new, row=row)))
        row.sort()
        for pair in itertools.combinations(row, 2):
            missing.pop(pair, None)
        yield {name: values[j] for (name, values), (_, j) in zip(factors.items(), row, strict=True)}

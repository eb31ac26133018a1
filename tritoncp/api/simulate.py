"""Simulated worlds: all ranks in one process and thread, with the plans and schedules of real ranks.

For tests, for debugging context parallelism on one device, and for timing one rank of a larger world. A call
is one autograd node for all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, NamedTuple, Unpack, overload

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from tritoncp.api import plans, shards, trees
from tritoncp.api.attention import (
    KeywordOptions,
    ScoreMod,
    flex_attention,
)
from tritoncp.api.plans import MaskLike
from tritoncp.api.selected_keys import check_index_tensors, checked_choice, choose_for_rank
from tritoncp.api.trees import TreeEdges
from tritoncp.call import autograd, check_shards, plan_cache
from tritoncp.call.check_arguments import check_arguments, shared_batch
from tritoncp.call.facts import Call
from tritoncp.call.mask_source import Sources
from tritoncp.call.op_arguments import OpArguments
from tritoncp.call.prepare import prepare, selected_keys
from tritoncp.call.read import Arguments, ShardSizes, sort_arguments
from tritoncp.call.selected.probabilities import probabilities, probabilities_in_graph
from tritoncp.core.dynamo_boundary import host_only
from tritoncp.core.suggestions import unexpected_keyword
from tritoncp.graph import dispatch
from tritoncp.masks.mask import Mask
from tritoncp.masks.mask_mod import MaskMod
from tritoncp.masks.prefix_tree import Tree
from tritoncp.masks.traced_mask import plain_mask
from tritoncp.planning.placement import as_movable, lengthen, take
from tritoncp.planning.plan import Plan
from tritoncp.selection.selection import Selection, SelectionAuxRequest

Shards = Sequence[Tensor]


class WorldOptions(KeywordOptions, total=False):
    """Types of arguments by name of `World.flex_attention`."""

    enable_gqa: bool
    batch_offset: int | None
    expand: Sequence[Any] | None
    selected: Sequence[Selection] | None


class RankAux(NamedTuple):
    """torch's AuxOutput, or SelectionAuxOutput, for a simulated world: each field is a list of tensors by
    rank, or None."""

    lse: list[Tensor] | None
    max_scores: list[Tensor] | None
    probabilities: list[Tensor] | None = None


@dataclass(frozen=True)
class World:
    """A simulated world of ``world_size`` ranks in lockstep; sharded tensors are lists by rank."""

    world_size: int

    @overload
    def make_plan(self, block_mask: BlockMask | Mask, **options: Any) -> Plan: ...
    @overload
    def make_plan(self, block_mask: Mapping[str, BlockMask | Mask], **options: Any) -> dict[str, Plan]: ...
    @host_only
    def make_plan(self, block_mask: Any, **options: Any) -> Plan | dict[str, Plan]:
        """Call :func:`tritoncp.make_plan` for rank 0; ``plan.for_rank(r)`` is rank r's plan.

        Args:
            block_mask: mask of the whole sequence, or a dict of masks.
            options: keyword arguments of :func:`tritoncp.make_plan`.

        Returns:
            A :class:`Plan`, or a dict of plans.
        """
        plan: Plan | dict[str, Plan] = plans.make_plan(
            block_mask, world_size=self.world_size, rank=0, **options
        )
        return plan

    @host_only
    def shard(
        self, x: Tensor, plan: MaskLike | None, *, dim: int, side: str = "q", batch_dim: int | None = 0,
        pad: float | int | bool = 0,
    ) -> list[Tensor]:  # fmt: skip
        """Return the shards of all ranks of a global tensor, see :func:`tritoncp.shard`.

        Args:
            x: any tensor whose dimension ``dim`` is the global sequence.
            plan: Plan of any rank; or a mask or None, for even pieces in natural order.
            dim: dimension that is sharded.
            side: "q", or "kv" if the plan places queries and keys differently.
            batch_dim: batch dimension, needed if the plan places batch rows differently; None: there is none.
            pad: value of the padding rows at the end of a plan's shard.

        Returns:
            A list of shards, by rank.
        """
        plan = self._checked(plan)
        return [
            shards.cut(
                x, plan.for_rank(rank) if isinstance(plan, Plan) else plan, place, dim, side, batch_dim, pad
            )
            for rank, place in enumerate(self._places)
        ]

    @host_only
    def unshard(
        self, xs: Sequence[Tensor], plan: MaskLike | None, *, dim: int, side: str = "q",
        batch_dim: int | None = 0,
    ) -> Tensor:  # fmt: skip
        """Gather the shards of all ranks into the global tensor, see :func:`tritoncp.unshard`.
        Differentiable.

        Args:
            xs: shards by rank.
            plan: Plan of any rank; or a mask or None, for even pieces in natural order.
            dim: dimension that is sharded.
            side: "q", or "kv" if the plan places queries and keys differently.
            batch_dim: batch dimension, needed if the plan places batch rows differently; None: there is none.

        Returns:
            The global tensor.
        """
        plan = self._checked(plan)
        self._count(xs)
        for x in xs:
            shards.check_dim(x, dim)
        length = None if shards.has_lengths(plan) else shards.sum_even([x.shape[dim] for x in xs])
        placement, _ = shards.placement_of(xs[0], plan, self._places[0], dim, side, length)
        for rank, x in enumerate(xs):
            shards.check_rows_along(x, dim, placement.lengths[rank], f"rank {rank}'s shard")
        whole = torch.cat([lengthen(as_movable(x), dim, placement.s_max) for x in xs], dim)
        whole = take(whole, placement.inverse, dim, batch_dim, 0)
        return whole if whole.dtype == xs[0].dtype else whole.view(xs[0].dtype)

    @host_only
    def positions(self, plan: Plan, documents: Tensor | MaskMod | None = None) -> list[Tensor]:
        """Return the global positions of all ranks' tokens, see :func:`tritoncp.positions`.

        Args:
            plan: Plan of any rank.
            documents: see :func:`tritoncp.positions`.

        Returns:
            A list of int64 [B or 1, S_local], by rank.
        """
        self._check(plan)
        return [shards.positions(plan.for_rank(rank), documents) for rank in range(self.world_size)]

    @host_only
    def tree_edges(
        self, plan: Plan, tree: Tree, tokens: Tensor, weights: Tensor | None = None
    ) -> list[TreeEdges]:
        """Return the edges of all ranks' parts of a prefix tree, see :func:`tritoncp.tree_edges`.

        Args:
            plan: Plan of any rank.
            tree: mask of the prefix tree.
            tokens: ids of the whole buffer, integers [N] or [B, N].
            weights: weight of each token as a label, floats [N] or [B, N]; None: 1.

        Returns:
            A list of TreeEdges, by rank.
        """
        self._check(plan)
        return [
            trees.tree_edges(plan.for_rank(rank), tree, tokens, weights) for rank in range(self.world_size)
        ]

    @host_only
    def select_keys(
        self, queries: Shards, keys: Shards, weights: Shards | None = None, *, top: int, block_size: int = 1,
        block_mask: MaskLike | None = None, activation: str = "relu", pool: str = "mean",
        own: bool | None = None, first: int = 0, last: int = 0,
    ) -> list[Selection]:  # fmt: skip
        """Run :func:`tritoncp.select_keys` on all ranks: tensors and results are lists by rank.

        Args:
            queries: [B, Hi, S_local, Di] of each rank.
            keys: [B, 1 or Hi, S_local, Di] of each rank.
            weights: [B, Hi, S_local] of each rank, or None.
            top: number of keys, or blocks, of a query.
            block_size: 1, or keys of a block.
            block_mask: mask, or Plan of any rank; with a mask, shards are in natural order.
            activation: of the products, as for :func:`tritoncp.select_keys`.
            pool: how a block gets its score.
            own: whether the key, or block, of the query itself is always chosen; None: for blocks.
            first: how many of the first visible keys or blocks are always chosen.
            last: how many of the last visible ones up to the query are always chosen.

        Returns:
            A list of :class:`Selection`, by rank.
        """
        choice = checked_choice(top, block_size, activation, pool, own, first, last)
        sides = queries, keys, [None] * self.world_size if weights is None else weights
        for xs in sides:
            self._count(xs)
        for one in zip(*sides, strict=True):
            check_index_tensors(*one)
        passed = [Arguments(query, key, key) for query, key in zip(queries, keys, strict=True)]
        plan = self._shared_plan(self._checked(block_mask), passed)
        whole = self.unshard([key.detach() for key in keys], plan, dim=2, side="kv")
        chosen = []
        for rank, (query, _, own_weights) in enumerate(zip(*sides, strict=True)):
            own_weights = None if own_weights is None else own_weights.detach()
            part = choose_for_rank(query.detach(), whole, own_weights, choice, plan.for_rank(rank))
            chosen.append(Selection(part, block_size))
        return chosen

    @overload
    def flex_attention(
        self, queries: Shards, keys: Shards, values: Shards | None, score_mod: ScoreMod = ...,
        block_mask: MaskLike | None = ..., *, return_lse: Literal[True], **options: Unpack[WorldOptions],
    ) -> tuple[list[Tensor], list[Tensor]]: ...  # fmt: skip
    @overload
    def flex_attention(
        self, queries: Shards, keys: Shards, values: Shards | None, score_mod: ScoreMod = ...,
        block_mask: MaskLike | None = ..., *,
        return_aux: AuxRequest | SelectionAuxRequest, **options: Unpack[WorldOptions],
    ) -> tuple[list[Tensor], RankAux]: ...  # fmt: skip
    @overload
    def flex_attention(
        self, queries: Shards, keys: Shards, values: Shards | None, score_mod: ScoreMod = ...,
        block_mask: MaskLike | None = ..., *, return_lse: Literal[False] = ..., return_aux: None = ...,
        **options: Unpack[WorldOptions],
    ) -> list[Tensor]: ...  # fmt: skip
    @host_only
    def flex_attention(
        self, queries: Shards, keys: Shards, values: Shards | None,
        score_mod: ScoreMod = None, block_mask: MaskLike | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        """Run :func:`tritoncp.flex_attention` on all ranks: arguments and results are lists of shards, and so
        is ``selected``.

        >>> from tritoncp import causal, create_block_mask, simulate
        >>> world = simulate(2)
        >>> plan = world.make_plan(create_block_mask(causal(), 1, 1, 512, 512))
        >>> x = world.shard(torch.randn(1, 2, 512, 16), plan, dim=2)
        >>> [out.shape for out in world.flex_attention(x, x, x, plan)]
        [torch.Size([1, 2, 256, 16]), torch.Size([1, 2, 256, 16])]

        Args:
            queries: [B, Hq, S_local, D] of each rank.
            keys: [B, Hkv, S_local, D] of each rank.
            values: [B, Hkv, S_local, E] of each rank; None with ``expand``.
            score_mod: function (score, b, h, q_idx, kv_idx) that returns the changed score, or None.
            block_mask: mask, or Plan of any rank; with a mask, shards are in natural order. None sees all
                keys.
            options: keyword arguments of :func:`tritoncp.flex_attention` from ``scale`` on, but not ``mesh``
                and ``positions``.

        Returns:
            outs; ``(outs, lses)`` with ``return_lse``; ``(outs, RankAux)`` with ``return_aux``.
        """
        dispatch.refuse_transforms()
        if (wrong := unexpected_keyword(flex_attention, options)) is not None:
            raise wrong
        if names := sorted({"mesh", "positions"} & options.keys()):
            raise TypeError(
                f"{names[0]} was passed to a simulated world, whose ranks are all in this process: omit it"
            )
        score_mod, block_mask, _ = sort_arguments(score_mod, block_mask, None)
        mask = plan_cache.current_mask(block_mask)
        sides: tuple[Sequence[Any], ...]
        sides = queries, keys, [None] * self.world_size if values is None else values
        for xs in sides:
            self._count(xs)
        queries, keys, values = (list(dispatch.cast_for_autocast(*xs)) for xs in sides)
        if isinstance(mask, Plan):
            self._check(mask)
        selections = options.pop("selected", None)
        chosen = [None] * self.world_size if selections is None else selections
        self._count(chosen)
        passed = [
            Arguments(query, key, value, score_mod, selected=one, **options)
            for query, key, value, one in zip(queries, keys, values, chosen)
        ]
        passed = list(map(check_arguments, passed))
        plan = self._shared_plan(mask, passed)
        check_shards.check_order(plan)
        passed = list(map(shared_batch, passed))
        first = passed[0]
        call = prepare(first._replace(selected=None), plan)
        calls = [call._replace(plan=call.plan.for_rank(rank)) for rank in range(self.world_size)]
        if selections is not None:
            calls = [
                one._replace(selected=selected_keys(arguments, one.plan))
                for one, arguments in zip(calls, passed)
            ]
        if dispatch.is_traced(first.query):  # only shapes are computed, and nothing is sent
            with dispatch.fake_mode_of(first.query):
                parts = [_trace_call(call, one) for call, one in zip(calls, passed, strict=True)]
        else:
            flat = autograd.attend(calls, [x for one in passed for x in one[:3]])
            width = len(flat) // self.world_size
            parts = [flat[i : i + width] for i in range(0, len(flat), width)]
            if first.wants_probabilities:
                found = probabilities(calls, passed, [lse for _, lse, *_ in parts])
                parts = [[*part, x] for part, x in zip(parts, found, strict=True)]
        results = [first.results(one) for one in parts]
        if first.return_aux is not None:
            outs, fields = [out for out, _ in results], zip(*[aux for _, aux in results])
            return outs, RankAux(*[None if field[0] is None else list(field) for field in fields])
        if first.return_lse:
            return [out for out, _ in results], [lse for _, lse in results]
        return results

    def _shared_plan(self, mask: Any, passed: Sequence[Arguments]) -> Plan:
        """Return the plan of a call, checked against the shards of all ranks."""
        rows, batch_offset = passed[0].query.shape[0], passed[0].batch_offset
        sizes = [ShardSizes.of(one.query, one.key, one.expand, one.selected) for one in passed]
        batch = rows if batch_offset is None else check_shards.whole_batch(mask, rows, batch_offset)
        plan = mask
        if not isinstance(mask, Plan):
            lengths, kv_lengths = ([x.shape[2] for x in xs] for xs in zip(*[one[:2] for one in passed]))
            whole = sizes[0]._replace(batch=batch)
            plan = plan_cache.plan_in_order(Sources.of(mask), whole, lengths, kv_lengths)
        plan = plan if batch_offset is None else plan.batch_rows(batch_offset, rows)
        for rank, one in enumerate(sizes):
            check_shards.check_sizes(plan.for_rank(rank), one)
        return plan

    @property
    def _places(self) -> list[tuple[str, int, int]]:
        """The places of all ranks, as of :func:`tritoncp.distributed.groups.place_in_group`."""
        return [("", self.world_size, rank) for rank in range(self.world_size)]

    def _checked(self, plan_or_mask: Any) -> Any:
        """Return a plan of this world, or a mask, as it is."""
        plan_or_mask = plain_mask(plan_or_mask)
        if isinstance(plan_or_mask, Plan):
            self._check(plan_or_mask)
        return plan_or_mask

    def _check(self, plan: Plan) -> None:
        if not isinstance(plan, Plan):
            raise TypeError(f"plan is a {type(plan).__name__}; a Plan is needed: world.make_plan(block_mask)")
        if plan.world_size != self.world_size:
            raise ValueError(f"the plan is for {plan.world_size} ranks, this world has {self.world_size}")

    def _count(self, xs: Sequence[Any]) -> None:
        if len(xs) != self.world_size:
            raise ValueError(
                f"got a list of {len(xs)} shards; {self.world_size} are needed, one for each rank"
            )


def _trace_call(call: Call, arguments: Arguments) -> list[Tensor]:
    """Run the ops of one rank's call on tensors without values."""
    written = OpArguments.of(call)
    (plan,), captures = dispatch.as_inputs([written.plan]), dispatch.as_inputs(written.captures)
    written = written._replace(plan=plan, captures=captures)
    results: list[Tensor] = autograd.forward_op(*arguments[:3], *written)
    if arguments.wants_probabilities:
        results = [*results, probabilities_in_graph(arguments, results[1], written)]
    return results


def simulate(world_size: int) -> World:
    """Make a world of simulated ranks in this process, on one device.

    >>> from tritoncp import causal, create_block_mask, simulate
    >>> world = simulate(8)
    >>> plan = world.make_plan(create_block_mask(causal(), 1, 1, 1024, 1024))
    >>> [shard.shape for shard in world.shard(torch.randn(1, 2, 1024, 16), plan, dim=2)][:2]
    [torch.Size([1, 2, 128, 16]), torch.Size([1, 2, 128, 16])]

    Args:
        world_size: number of ranks.

    Returns:
        A :class:`World`, whose methods take and return lists of shards.

    Raises:
        ValueError: for fewer than one rank.
        TypeError: for a number that is not an int.
    """
    if not isinstance(world_size, Integral):
        raise TypeError(f"world_size={world_size!r} is a {type(world_size).__name__}; an int is needed")
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: pass at least 1")
    return World(world_size)

"""The record of one checked attention call, and its encoding as arguments of the registered ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tritoncp.call import call_mods
from tritoncp.call.expand import Expansion
from tritoncp.core.handles import handle_of, object_of
from tritoncp.core.host_copy import on_host
from tritoncp.graph.spec import decode_spec, encode_spec
from tritoncp.kernels.options import check_options
from tritoncp.mods import Mod
from tritoncp.planning.plan import Plan

if TYPE_CHECKING:
    from tritoncp.call.facts import Facts  # late: it imports this module


class Call(NamedTuple):
    """One checked call on one rank: all inputs of its forward and backward pass except query, key and value.

    plan:    the rank's plan, for the batch rows of the query
    score:   the score_mod without its captured tensors; None: there is none
    expand:  the function that computes keys and values of latents; None: keys and values travel
    scale:   multiplies q k^T before the score_mod
    group:   the process group of the ranks; None: all ranks are in this process
    options: kernel options, sorted by name
    returns: the results besides out: "lse", "max_scores"; "sinks" if the call has some
    score_tensors: the tensors that the score_mod captures
    facts:   of the call with its tensors, if kept (:func:`tritoncp.call.facts.with_facts`), else None
    """

    plan: Plan
    score: Mod | None
    scale: float
    group: Any = None
    options: tuple[tuple[str, Any], ...] = ()
    returns: tuple[str, ...] = ()
    expand: Expansion | None = None
    score_tensors: Sequence[Tensor] = ()
    facts: Facts | None = None

    @property
    def want_max(self) -> bool:
        """Whether max_scores is requested."""
        return "max_scores" in self.returns

    @property
    def is_invariant(self) -> bool:
        """Whether bits must not depend on the number of ranks."""
        return ("invariant", True) in self.options

    @property
    def captures(self) -> Sequence[Tensor]:
        """The tensors that the score_mod captures, then those of ``expand``."""
        own = self.score_tensors
        return own if self.expand is None else (*own, *self.expand.tensors)

    @property
    def wants(self) -> tuple[int, ...]:
        """Indices of the captures that require grad."""
        wants = () if self.score is None else self.score.wants
        if self.expand is None:
            return wants
        return *wants, *(len(self.score_tensors) + i for i in self.expand.wants)

    def with_captures(self, captures: Sequence[Tensor]) -> Call:
        """Copy the call with other captured tensors; () for none: an autograd node saves them apart from the
        call."""
        if (expand := self.expand) is None:
            has_some = captures or self.score_tensors
            return self._replace(score_tensors=captures) if has_some else self
        count = len(captures) - expand.num_tensors if captures else 0
        return self._replace(score_tensors=captures[:count], expand=expand.with_tensors(captures[count:]))

    @on_host
    def as_arguments(self) -> OpArguments:
        """Encode the call as arguments of the registered ops."""
        world = "" if self.group is None else self.group.group_name
        sizes = None if self.expand is None else self.expand.sizes
        spec = encode_spec(None, self.wants, world, self.options, self.returns, None, sizes)
        handle = handle_of(self.with_captures(()))
        return OpArguments(list(self.captures), [], self.scale, handle, spec)


CALL_SCHEMA = "Tensor[] captures, SymInt[] ints, float scale, Tensor plan, str spec"


class OpArguments(NamedTuple):
    """A call encoded as the last arguments of the registered ops, for graphs, dispatch modes and tensor
    subclasses.

    ints: in a graph, the numbers that the score_mod captures
    plan: handle (:mod:`tritoncp.core.handles`): in a graph of the plan, an input, so that one graph serves
          all plans; else of the :class:`Call` without captures
    spec: text of a :class:`tritoncp.graph.spec.CallConstants`
    """

    captures: list[Tensor]
    ints: list[int]
    scale: float
    plan: Tensor
    spec: str

    @property
    def wants(self) -> tuple[int, ...]:
        """Indices of the captures that require grad."""
        return decode_spec(self.spec).wants

    @property
    def group(self) -> Any:
        """See :attr:`tritoncp.graph.spec.CallConstants.group`."""
        return decode_spec(self.spec).group

    def with_captures(self, captures: Sequence[Tensor]) -> OpArguments:
        return self._replace(captures=list(captures))

    def as_arguments(self) -> OpArguments:
        return self

    def decode(self, x: Tensor) -> Call:
        """Decode the call. x: a tensor on its device. Checks that the state of the mask of a :class:`Call` is
        unchanged; in a graph, the op that looks up the plan has done so."""
        named, spec, score, expand = object_of(self.plan), decode_spec(self.spec), None, None
        score_tensors: Sequence[Tensor] = ()
        scale, options = self.scale, spec.options
        if isinstance(named, Call):
            named.plan.check_sources()
            return named.with_captures(self.captures)
        if spec.has_inputs:
            from tritoncp.graph import inputs  # late: it imports Dynamo, which plans do not need

            tensors, ints = iter(self.captures), iter(self.ints)
            if spec.graph_score:
                rebuilt = inputs.rebuild(spec.graph_score, tensors, ints)
                score, score_tensors = call_mods.translate_score(rebuilt, x.dtype, x.device)
            if spec.graph_expand:
                (fn, *arguments), autocast = inputs.rebuild(spec.graph_expand, tensors, ints)
                expand = Expansion.of(fn, arguments, spec.sizes or (), autocast)
            if spec.graph_scale:
                scale = float(inputs.rebuild(spec.graph_scale, tensors, ints))
            if spec.graph_options:
                numbers = [(name, inputs.rebuild(part, tensors, ints)) for name, part in spec.graph_options]
                options = tuple(sorted([*options, *numbers]))
                check_options(dict(options))
        return Call(named, score, scale, spec.group, options, spec.returns, expand, score_tensors)

    def with_leaves(self) -> OpArguments:
        """Detach the captures and mark those in ``wants`` as requiring grad, which an op's inputs do not."""
        leaves = [x.detach().requires_grad_(i in self.wants) for i, x in enumerate(self.captures)]
        return self._replace(captures=leaves)

    def order_sums(self, call: Call, sums: Sequence[Tensor]) -> list[Tensor]:
        """Sort ``sums``, gradients of the decoded call's captures, into the order of ``wants``: a score_mod
        rebuilt in a graph may read its captures in another order, or not read some of them."""
        places = {id(call.captures[i]): at for at, i in enumerate(call.wants)}
        targets = [self.captures[i] for i in self.wants]
        return [sums[places[id(x)]] if id(x) in places else torch.zeros_like(x) for x in targets]

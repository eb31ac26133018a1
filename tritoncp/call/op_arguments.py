"""A call as arguments of the registered ops, for graphs, dispatch modes and tensor subclasses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritoncp.call import call_mods
from tritoncp.call.expand import Expansion
from tritoncp.call.facts import Call
from tritoncp.core.handles import handle_of, object_of
from tritoncp.core.host_copy import on_host
from tritoncp.graph.spec import decode_spec, encode_spec
from tritoncp.kernels.options import check_options
from tritoncp.selection.selection import Selection, check_indices

CALL_SCHEMA = "Tensor[] captures, SymInt[] ints, float scale, Tensor plan, str spec"


class OpArguments(NamedTuple):
    """A call encoded as the last arguments of the registered ops, for graphs, dispatch modes and tensor
    subclasses.

    captures: tensors that the call reads besides query, key and value; the indices of selected keys are last
    ints: in a graph, the numbers that the score_mod captures
    plan: handle (:mod:`tritoncp.core.handles`): in a graph the handle of the plan, which is an input, so that
        one graph serves all plans; else the handle of the :class:`Call` without captures and indices
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

    @classmethod
    @on_host
    def of(cls, call: Call | OpArguments) -> OpArguments:
        """Encode a call, unless it is encoded."""
        if isinstance(call, OpArguments):
            return call
        world = "" if call.group is None else call.group.group_name
        sizes = None if call.expand is None else call.expand.sizes
        named, captures, selected = call.with_captures(()), list(call.captures), call.selected
        if selected is not None:  # a program of torch.jit runs again with other indices, also of other sizes
            named = named._replace(selected=None, facts=None)
            captures.append(selected.indices)
        form = None if selected is None else tuple(selected[1:])
        fields = None, call.wants, world, call.options, call.returns, None, sizes, None, (), form
        return cls(captures, [], call.scale, handle_of(named), encode_spec(*fields))

    @property
    def selected(self) -> None:
        """None: the indices of selected keys are a capture."""

    def with_captures(self, captures: Sequence[Tensor]) -> OpArguments:
        return self._replace(captures=list(captures))

    def decode(self, x: Tensor) -> Call:
        """Decode the call. x: a tensor on its device. Checks that the state of the mask of a :class:`Call` is
        unchanged, since a program of torch.jit may run the op again; in a graph, the op that looks up the
        plan has done so."""
        named, spec, score, expand = object_of(self.plan), decode_spec(self.spec), None, None
        score_tensors: Sequence[Tensor] = ()
        scale, options, captures, selected = self.scale, spec.options, self.captures, None
        plan = named.plan if isinstance(named, Call) else named
        if spec.selected:
            *captures, indices = captures
            selected = Selection(indices, *spec.selected)
            check_indices(selected, plan.mask.kv_len)
        if isinstance(named, Call):
            plan.check_sources()
            return named.with_captures(captures)._replace(selected=selected)
        selected = None if selected is None else selected.unique()
        if spec.has_inputs:
            from tritoncp.graph import inputs  # late: it imports Dynamo, which plans do not need

            tensors, ints = iter(captures), iter(self.ints)
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
        return Call(plan, score, scale, spec.group, options, spec.returns, expand, score_tensors, selected)

    def with_leaves(self) -> OpArguments:
        """Detach the captures and mark those in ``wants`` as requiring grad, since an op's inputs do not
        require grad."""
        leaves = [x.detach().requires_grad_(i in self.wants) for i, x in enumerate(self.captures)]
        return self._replace(captures=leaves)

    def order_sums(self, call: Call, sums: Sequence[Tensor]) -> list[Tensor]:
        """Sort ``sums``, gradients of the decoded call's captures, into the order of ``wants``: a score_mod
        rebuilt in a graph may read its captures in another order, or not read some of them."""
        places = {id(call.captures[i]): at for at, i in enumerate(call.wants)}
        targets = [self.captures[i] for i in self.wants]
        return [sums[places[id(x)]] if id(x) in places else torch.zeros_like(x) for x in targets]

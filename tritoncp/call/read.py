"""The records of one call: its arguments as passed, the checked call, and its encoding as arguments of the
registered ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from tritoncp.call import call_mods
from tritoncp.call.expand import Expansion
from tritoncp.call.sinks import with_sinks
from tritoncp.core.handles import handle_of, object_of
from tritoncp.core.host_copy import on_host
from tritoncp.distributed import groups
from tritoncp.graph.spec import decode_spec, encode_spec
from tritoncp.kernels.options import check_options
from tritoncp.masks.mask import Mask
from tritoncp.masks.mask_mod import MaskMod
from tritoncp.masks.traced_mask import TracedMask
from tritoncp.mods import Mod
from tritoncp.planning.plan import Plan
from tritoncp.selection.selection import Selection, check_indices

if TYPE_CHECKING:
    from tritoncp.call.facts import Facts  # late: it imports this module

MASKS = (BlockMask, Mask, MaskMod, Plan, TracedMask)


class Arguments(NamedTuple):
    """The arguments of one call of `flex_attention`, as they were passed but sorted (:func:`sort_arguments`).
    A check, :func:`tritoncp.call.validate.check_arguments`, replaces ``expand`` by its record."""

    query: Any
    key: Any
    value: Any
    score_mod: Any = None
    block_mask: Any = None
    mesh: Any = None
    scale: float | None = None
    enable_gqa: bool = False
    return_lse: bool = False
    kernel_options: dict[str, Any] | None = None
    return_aux: AuxRequest | None = None
    positions: Tensor | None = None
    sinks: Tensor | None = None
    batch_offset: int | None = None
    expand: Any = None
    selected: Any = None

    @property
    def returns(self) -> tuple[str, ...]:
        """Names of the requested results besides out."""
        aux, sinks = self.return_aux, ("sinks",) * (self.sinks is not None)
        if aux is None:
            return ("lse", *sinks) if self.return_lse else sinks
        return ("lse",) * (self.return_lse or aux.lse) + ("max_scores",) * aux.max_scores + sinks

    def results(self, outs: Sequence[Tensor]) -> Any:
        """Return the requested results, sinks included: out, (out, lse) or (out, AuxOutput)."""
        out, lse, *tops = outs
        if self.sinks is not None:
            out, lse = with_sinks(out, lse, self.sinks, bool((self.kernel_options or {}).get("invariant")))
        if (aux := self.return_aux) is not None:
            return out, AuxOutput(lse=lse if aux.lse else None, max_scores=tops[0] if tops else None)
        return (out, lse) if self.return_lse else out


def sort_arguments(score_mod: Any, block_mask: Any, mesh: Any) -> tuple[Any, Any, Any]:
    """Return (score_mod, block_mask, mesh) from the fourth and fifth argument and mesh=: calls are
    ``(q, k, v, block_mask, mesh)`` or torch's ``(q, k, v, score_mod, block_mask, mesh=mesh)``."""
    if type(score_mod) is not FunctionType and isinstance(score_mod, MASKS):
        if block_mask is None:
            return None, score_mod, mesh
        if isinstance(block_mask, MASKS):
            raise TypeError(
                "block_mask: the fourth and the fifth argument are both masks; pass one of them (a score_mod "
                "is the fourth argument)"
            )
        if mesh is not None:
            raise TypeError("mesh is both the fifth argument and mesh=: pass one of them")
        return None, score_mod, block_mask
    if callable(score_mod):
        if not torch.compiler.is_dynamo_compiling():  # would recompile for every function
            call_mods.check_score_mod(score_mod)
    elif score_mod is not None:
        raise TypeError(
            f"score_mod, the fourth argument, is a {type(score_mod).__name__}; a score_mod, a mask or a Plan "
            f"is needed{_hint(score_mod)}"
        )
    if block_mask is None or isinstance(block_mask, MASKS):
        return score_mod, block_mask, mesh
    if callable(block_mask):
        raise TypeError(
            "block_mask is a function; a mask is needed: make it with create_block_mask(mask_mod, B, H, "
            "Q_LEN, KV_LEN)"
        )
    if isinstance(block_mask, Tensor):
        raise TypeError(f"block_mask is a Tensor; a mask or a Plan is needed{_hint(block_mask)}")
    if score_mod is not None:
        raise TypeError(
            f"block_mask, after a score_mod, is a {type(block_mask).__name__}; a mask or a Plan is needed: "
            "pass a mesh by name, mesh=..."
        )
    if not groups.is_mesh(block_mask):
        raise TypeError(
            f"block_mask, the fifth argument, is a {type(block_mask).__name__}; a mask, a Plan or a mesh is "
            f"needed{_hint(block_mask)}"
        )
    return None, None, block_mask


def _hint(argument: Any) -> str:
    """Return the end of an error about an argument that is not a mask: how to get one."""
    if isinstance(argument, Mapping):
        return f": pass the value of this layer, of {', '.join(map(repr, argument))}"
    if isinstance(argument, Tensor):
        return "; a dense mask becomes one by create_block_mask(lambda b, h, q, kv: mask[q, kv], ...)"
    return ""


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
    selected: the keys that were chosen at run time, with unique indices; None: the mask alone decides
    facts:   facts of the call and its tensors, if kept (:func:`tritoncp.call.facts.with_facts`), else None

    >>> from tritoncp import alibi, causal, create_block_mask, make_plan
    >>> from tritoncp.mods import score_mod
    >>> slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    >>> score = score_mod(alibi(slopes))
    >>> plan = make_plan(create_block_mask(causal(), 1, 1, 256, 256))
    >>> without = score.with_captures((), score.numbers)
    >>> options = (("BLOCK_N", 64),)
    >>> call = Call(plan, without, 0.125, options=options, returns=("lse",), score_tensors=(slopes,))
    >>> call.plan.s_local, call.score.wants, call.scale, call.options, call.returns
    (256, (0,), 0.125, (('BLOCK_N', 64),), ('lse',))
    >>> call.score_tensors, call.wants, call.want_max
    ((tensor([0.5000, 0.2500], requires_grad=True),), (0,), False)
    >>> call.group, call.expand, call.facts         # one process, keys and values, a call outside of a graph
    (None, None, None)
    """

    plan: Plan
    score: Mod | None
    scale: float
    group: Any = None
    options: tuple[tuple[str, Any], ...] = ()
    returns: tuple[str, ...] = ()
    expand: Expansion | None = None
    score_tensors: Sequence[Tensor] = ()
    selected: Selection | None = None
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
        """The tensors that the score_mod captures, then the tensors of ``expand``."""
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
        """Copy the call with other captured tensors; () for none: an autograd node keeps them separately."""
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
    plan: handle (:mod:`tritoncp.core.handles`): in a graph the handle of the plan, which is an input, so that
        one graph serves all plans; else the handle of the :class:`Call` without captures
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
        unchanged, since a program of torch.jit may run the op again; in a graph, the op that looks up the
        plan has done so."""
        named, spec, score, expand = object_of(self.plan), decode_spec(self.spec), None, None
        score_tensors: Sequence[Tensor] = ()
        scale, options = self.scale, spec.options
        if isinstance(named, Call):
            named.plan.check_sources()
            return named.with_captures(self.captures)
        selected = None
        if spec.selected:
            selected = Selection(self.captures[-1], *spec.selected)
            check_indices(selected, named.mask.kv_len)
            selected = selected.unique()
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
        return Call(named, score, scale, spec.group, options, spec.returns, expand, score_tensors, selected)

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

"""A prepared call and its facts: properties that must be equal on all ranks, and properties that decide which
kernels run."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritoncp.call.expand import Expansion
from tritoncp.call.read import CallKind
from tritoncp.core.bounded_cache import BoundedCache
from tritoncp.core.records import fields_of
from tritoncp.distributed.collectives import dtype_name
from tritoncp.masks.mask_mod import MaskMod
from tritoncp.mods import Mod
from tritoncp.mods.user_code import describe
from tritoncp.planning.derived import PlanCache
from tritoncp.planning.plan import Plan
from tritoncp.selection.selection import Selection

DIGITS = 12  # characters of a digest in a message
MAX_STRUCTURES = 16  # max structures of a plan, by schedule and degree
MAX_FACTS = 1024  # max facts of a plan, by kinds of calls
_STRUCTURES: PlanCache[BoundedCache[Any, Any]] = PlanCache(lambda: BoundedCache(MAX_STRUCTURES))
_FACTS: PlanCache[BoundedCache[Any, Facts]] = PlanCache(lambda: BoundedCache(MAX_FACTS))


class Facts(NamedTuple):
    """The facts of a call that must be equal on all ranks. They contain no length of a shard, no layout, no
    contents of a tensor and no captured number. Hashable.

    device:  type of the device
    batch:   number of batch rows, and the index of the first in the whole batch
    heads:   number of heads of query and of key
    head_dims: head dim of query and key, and of value
    plan:    :func:`plan_structure`, with the global lengths
    score:   :func:`structure_of_score`
    expand:  :func:`structure_of_expansion`, or None
    selected: (batch rows, heads, keys of a row, block_size, query_block) of the selected keys, or None
    options: kernel options, sorted by name
    returns: names of the results besides out

    >>> from tritoncp import causal, create_block_mask, make_plan
    >>> plan = make_plan(create_block_mask(causal(), 1, 1, 64, 64))
    >>> q, k = torch.zeros(1, 4, 64, 16), torch.zeros(1, 2, 64, 16)
    >>> facts = Facts.of(Call(plan, None, 0.25), q, k, k)
    >>> facts.heads, facts.scale, facts == Facts.of(Call(plan, None, 0.25), q.mT.contiguous().mT, k, k)
    ((4, 2), 0.25, True)
    """

    device: str
    dtype: torch.dtype
    batch: tuple[int, int]
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    scale: float
    plan: Any
    score: tuple[Any, ...] | None
    expand: tuple[Any, ...] | None
    selected: tuple[int, ...] | None
    options: tuple[tuple[str, Any], ...]
    returns: tuple[str, ...]

    @classmethod
    def of(cls, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Facts:
        """Return the facts of a call on these shards. Under ``expand`` k is a latent."""
        plan, expand = call.plan, call.expand
        (batch, heads, _, dim), kv_heads, v_dim = q.shape, k.shape[1], v.shape[3]
        fields = (
            "cuda" if q.is_cuda else q.device.type, q.dtype, (batch, plan.first_row), (heads, kv_heads),
            (dim, v_dim), call.scale, plan_structure(plan),
            structure_of_score(call.score),
            None if expand is None else structure_of_expansion(expand),
            call.selected and call.selected.structure, call.options, call.returns,
        )  # fmt: skip
        return tuple.__new__(cls, fields)  # as cls(*fields), in half the time

    def texts(self) -> dict[str, str]:
        """Format the facts for messages, by name. Of the plan they have only the lengths."""
        (batch, row), (heads, kv_heads), (dim, v_dim) = self.batch, self.heads, self.head_dims
        (q_len, kv_len, *_), *_ = self.plan
        returns = [name for name in self.returns if name != "sinks"]
        score = f"a score_mod of structure {self.score[0][:DIGITS]}" if self.score else "no score_mod"
        return {
            "device": self.device,
            "dtype": str(self.dtype).removeprefix("torch."),
            "batch": f"batch {batch} from row {row} on",
            "heads": f"{heads} query heads and {kv_heads} key heads",
            "head dims": f"head dim {dim}, of values {v_dim}",
            "lengths": f"{q_len} queries and {kv_len} keys",
            "scale": f"scale {self.scale!r}",
            "kernel_options": f"kernel_options {dict(self.options)}",
            "returns": ", ".join(["out", *returns]),
            "sinks": "sinks" if "sinks" in self.returns else "no sinks",
            "score_mod": score,
            "expand": f"expand {self.expand}" if self.expand else "no expand",
            "selected": _selected_text(self.selected),
        }


class Call(NamedTuple):
    """One checked call on one rank: all inputs of its forward and backward pass except query, key and value.

    plan:    the rank's plan, for the batch rows of the query
    score:   the score_mod without its captured tensors; None: there is none
    expand:  the function that computes keys and values of latents; None: keys and values travel
    scale:   multiplies q k^T before the score_mod
    group:   the process group of the ranks; None: all ranks are in this process
    options: kernel options, sorted by name
    returns: the results besides out: "lse", "max_scores", "probabilities"; "sinks" if the call has some
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


def with_facts(call: Call, kind: CallKind, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """Return the call with its facts, which are made once for each kind of call of a plan."""
    plan, score, scale, group, options, returns, expand, tensors, selected, _ = call
    if expand is not None:  # to read its structure takes as long as to make its facts
        return call
    form = score and structure_of_score(score)
    chosen = selected and selected.structure
    key = kind, plan.first_row, plan.schedule, plan.degree, scale, options, returns, form, chosen
    kept = _FACTS.of(plan.derived)
    facts = kept.get(key) or kept.put(key, Facts.of(call, q, k, v))
    fields = plan, score, scale, group, options, returns, None, tensors, selected, facts
    return tuple.__new__(Call, fields)  # as call._replace(facts=facts), in a third of the time


class EngineKey(NamedTuple):
    """The key of an engine: calls of one plan with equal keys run the same compiled kernels. Calls with other
    keys may run them too: Triton compiles a kernel only for constants and alignments that it has not seen.

    facts:   facts of the call
    mod:     digest of the score_mod, and properties of its captured numbers for which Triton specialises
        kernels
    layouts: layouts of this rank's tensors, see :func:`tritoncp.kernels.layouts.layout_of`
    rank:    rank of the plan
    group:   weak reference to the process group, or None
    device:  device of the tensors
    target:  architecture for which kernels are executed on the CPU, or None
    tiles:   generation of the tables of measured tiles
    """

    facts: Facts
    mod: tuple[Any, ...]
    layouts: tuple[Any, ...]
    rank: int
    group: Any
    device: torch.device
    target: str | None
    tiles: int

    def difference(self, other: EngineKey) -> dict[str, str]:
        """Describe the fields by which another key differs, by name.

        >>> first = EngineKey(Facts(*range(12)), (), (), 0, None, torch.device("cpu"), None, 0)
        >>> first.difference(first._replace(facts=first.facts._replace(scale=0.25), rank=1))
        {'scale': 'scale was 5 and is 0.25', 'rank': 'rank was 0 and is 1'}
        """
        old, new = ({**key.facts._asdict(), **key._asdict(), "facts": None} for key in (self, other))
        return {name: f"{name} was {old[name]} and is {new[name]}" for name in old if old[name] != new[name]}


def _selected_text(structure: tuple[int, ...] | None) -> str:
    if structure is None:
        return "no selected keys"
    batch, heads, count, block_size, query_block = structure
    return (
        f"{count} selected keys of {heads} heads and {batch} batch rows, block_size {block_size}, "
        f"query_block {query_block}"
    )


def structure_of_score(score: Mod | None) -> tuple[Any, ...] | None:
    """Return the form of a score_mod, and the indices of its captures that require grad; None for None."""
    return None if score is None else (score.form, score.wants)


def structure_of_expansion(expand: Expansion) -> tuple[Any, ...]:
    """Return the code of a function that expands latents, the forms of its arguments and parameters, and the
    sizes of its results.

    >>> import torch
    >>> structure_of_expansion(Expansion.of(torch.mul, [torch.ones(2), 3.5], (1, 2, 2)))[1]
    (('float32', (2,), False), '3.5')
    """
    forms = [
        (dtype_name(x), tuple(x.shape), x.requires_grad) if isinstance(x, Tensor) else repr(x)
        for x in (*expand.leaves, *expand.parameters)
    ]
    return form_of(expand.fn), tuple(forms), tuple(expand.sizes), expand.autocast, str(expand.form)


def plan_structure(plan: Plan) -> Any:
    """Return a hashable structure of a plan, without its mask's tensors and numbers: equal on all ranks.

    >>> from tritoncp import causal, create_block_mask, make_plan, sliding_window
    >>> mods = causal() & causal(), sliding_window(4), sliding_window(5)
    >>> plans = [make_plan(create_block_mask(mod, 1, 1, 64, 64)) for mod in mods]
    >>> first, second, third = map(plan_structure, plans)
    >>> first == second, second == third
    (False, True)
    """
    structures, key = _STRUCTURES.of(plan.derived), (plan.schedule, plan.degree)
    if (structure := structures.get(key)) is None:
        mask = plan.mask
        lengths = mask.q_len, mask.kv_len, mask.q_block, mask.kv_block
        structure = structures.put(key, (lengths, plan.balancer, *key, form_of(mask.mask_mod)))
    return structure


def form_of(mod: Any) -> str:
    """Return the code of a mask_mod, or the kind of a closed form, without captures: equal on all ranks.

    >>> from tritoncp import causal, prefix_lm, sliding_window
    >>> window, other = (form_of(causal() & sliding_window(size)) for size in (4, 5))
    >>> window == other, window == form_of(causal()), window == form_of(causal() & prefix_lm(4))
    (True, False, False)
    >>> form_of(lambda b, h, q, kv: q >= kv) == form_of(lambda b, h, q, kv: q > kv)
    False
    """
    if isinstance(mod, Mod):
        return mod.form
    if isinstance(mod, functools.partial):
        return f"partial({form_of(mod.func)})"
    if isinstance(mod, MaskMod):
        parts = [form_of(part) for part in _fields(mod) if callable(part)]  # mask_mods combined by mod
        return f"{type(mod).__qualname__}({', '.join(parts)})"
    code = getattr(mod, "__code__", None)
    if code is None:
        return describe(mod)
    return (
        f"{describe(mod)} {hashlib.sha256(code.co_code + repr(code.co_names).encode()).hexdigest()[:DIGITS]}"
    )


def _fields(mod: MaskMod) -> Iterator[Any]:
    """Yield the values of a closed form's fields; for a sequence, its items."""
    for name in fields_of(mod):
        value = getattr(mod, name)
        yield from value if isinstance(value, tuple | list) else (value,)

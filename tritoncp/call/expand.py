"""Latent attention (MLA): ranks send latents, and each step expands the latent rows that it reads to keys and
values.

Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) computes the keys and values of all heads from a
few channels of each token. A schedule sends these channels like keys, and this engine computes the keys and
values of one step. The backward pass recomputes them. From their gradients it computes the gradients of the
latent, which are sent to its rank, and of the parameters, this rank's part of a sum over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from tritoncp.distributed.schedules import buffers
from tritoncp.mods.tracing import fresh_dispatch
from tritoncp.mods.user_code import origin
from tritoncp.planning.costs.layer import check_latent
from tritoncp.planning.plan import Plan
from tritoncp.planning.selected_rows import SelectedRows
from tritoncp.planning.step_tables import BackwardStep, Engine, ForwardStep, PreparedStep, Tables


class Expansion(NamedTuple):
    """The user's function from rows of a latent to keys and values (``expand=``), and its arguments.

    fn:        (latent [B, Hl, rows, C], *arguments) -> key [B, Hkv, rows, D], value [B, Hkv, rows, E]
    leaves:    leaves of the arguments, a pytree; None replaces tensors that an autograd node saves
    form:      pytree structure of the arguments; None: they are the leaves
    modules:   fn and leaves that are modules; their parameters are tensors of the call too
    parameters: parameters of the modules; None replaces them like leaves
    wants:     indices of the tensors that require grad
    sizes:     (Hkv, D, E); () before they are known
    autocast:  name of the autocast dtype of the call; "": autocast was off
    """

    fn: Callable[..., Any]
    leaves: tuple[Any, ...]
    form: Any
    modules: tuple[nn.Module, ...]
    parameters: tuple[Any, ...]
    places: tuple[int, ...]
    wants: tuple[int, ...]
    sizes: Sequence[int]
    autocast: str = ""

    @classmethod
    def of(
        cls, fn: Callable[..., Any], arguments: Iterable[Any], sizes: Sequence[int] = (), autocast: str = ""
    ) -> Expansion:
        """Make the record of a function and its arguments. sizes: (Hkv, D, E) of its results"""
        leaves, form = [*arguments], None
        if any(isinstance(x, tuple | list | dict) for x in leaves):
            leaves, form = tree_flatten(leaves)
        modules = tuple([x for x in (fn, *leaves) if isinstance(x, nn.Module)])
        parameters = tuple(dict.fromkeys([x for module in modules for x in module.parameters()]))
        places = tuple([i for i, x in enumerate(leaves) if isinstance(x, Tensor)])
        tensors = *[leaves[i] for i in places], *parameters
        wants = tuple([i for i, x in enumerate(tensors) if x.requires_grad])
        return cls(fn, tuple(leaves), form, modules, parameters, places, wants, sizes, autocast)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the function after the latent."""
        return self.leaves if self.form is None else tuple(tree_unflatten(self.leaves, self.form))

    @property
    def num_tensors(self) -> int:
        """Number of tensors, also while an autograd node keeps them."""
        return len(self.places) + len(self.parameters)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors among the arguments, then parameters of modules; () while an autograd node keeps
        them."""
        return tuple([x for x in (*[self.leaves[i] for i in self.places], *self.parameters) if x is not None])

    def with_tensors(self, tensors: Sequence[Tensor]) -> Expansion:
        """Copy the record with other tensors; () drops them."""
        new: Sequence[Any] = tensors or [None] * self.num_tensors
        by_place = dict(zip(self.places, new))
        leaves = tuple([by_place.get(i, x) for i, x in enumerate(self.leaves)])
        return self._replace(leaves=leaves, parameters=tuple(new[len(self.places) :]))

    def __call__(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Compute keys and values, under the autocast of the call."""
        context: AbstractContextManager[Any] = nullcontext()
        if self.autocast:
            context = torch.autocast(latent.device.type, getattr(torch, self.autocast))
        with context:
            if self.modules:
                result = call_with(self.modules, self.parameters, self.fn, latent, *self.arguments)
            else:
                result = self.fn(latent, *self.arguments)
        return _check_expanded(result, latent, origin(self.fn))

    def check_call(self, plan: Plan, is_invariant: bool) -> None:
        """Raise ValueError for a plan whose schedule exchanges heads, and for the kernel option invariant."""
        if is_invariant:
            raise ValueError(
                "kernel option invariant=True with expand=, whose function's bits may depend on the number "
                "of rows: expand before the call and pass key and value, or omit the option"
            )
        check_latent(plan, "expand=")


class _Modules(nn.ModuleList):
    """Modules whose parameters `torch.func.functional_call` replaces while it calls a function that reads
    them."""

    def forward(self, fn: Callable[..., Any], *arguments: Any) -> Any:
        return fn(*arguments)


def call_with(
    modules: Sequence[nn.Module], parameters: Sequence[Tensor], fn: Callable[..., Any], *arguments: Any
) -> Any:
    """Call ``fn(*arguments)`` with other parameters in the modules that it reads."""
    reader = _Modules(modules)
    names = [name for name, _ in reader.named_parameters()]
    return functional_call(reader, dict(zip(names, parameters, strict=True)), (fn, *arguments))


def _check_expanded(result: Any, latent: Tensor, place: str) -> tuple[Tensor, Tensor]:
    """Check the key and value that the function of expand= returned for rows of a latent; return them.
    place: file:line of the function, for messages"""
    if not isinstance(result, tuple | list) or [isinstance(x, Tensor) for x in result] != [True, True]:
        raise TypeError(
            f"expand: fn at {place} returned a {type(result).__name__}; a pair of tensors is needed: return "
            "key, value"
        )
    for name, x in zip(("key", "value"), result):
        if x.ndim != 4 or x.shape[0] != latent.shape[0] or x.shape[2] != latent.shape[2]:
            raise ValueError(
                f"expand: fn at {place} returned a {name} {tuple(x.shape)} for a latent "
                f"{tuple(latent.shape)}; [batch, heads, rows, head dim] with the latent's batch and rows is "
                "needed: map each row by itself"
            )
    key, value = result
    return key, value


class ExpandedStep(NamedTuple):
    """Expanded keys and values of a step, their engine, and ``leaves``, the tensors that get gradients: the
    latent, then parameters. A latent expanded over the batch has one batch row here."""

    keys: tuple[Tensor, Tensor]
    engine: Engine
    leaves: list[Tensor]

    def inputs(self, step: BackwardStep) -> BackwardStep:
        """Replace the latents of a step by the expanded keys and values."""
        key, value = _for_batch(self.keys, step.q)
        return step._replace(k=key, v=value)

    def gradients(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Compute the gradients of the leaves from the gradients of keys and values; zeros for an unused
        leaf."""
        # A view that the function made under no_grad claims to require grad, but has no derivative.
        pairs = [
            (x, grad.to(x.dtype))
            for x, grad in zip(self.keys, grads, strict=True)
            if x.grad_fn is not None or any(x is leaf for leaf in self.leaves)
        ]
        if not pairs:
            return [torch.zeros_like(x) for x in self.leaves]
        with fresh_dispatch():
            results, grads = zip(*pairs, strict=True)
            return torch.autograd.grad(results, self.leaves, grads, allow_unused=True, materialize_grads=True)


@dataclass(eq=False)
class ExpandingEngine:
    """An engine whose steps get latents in place of keys, expand them, and run another engine.

    expansion: the function from latents to keys and values
    engine_of: (keys, values) -> the engine for them
    base:      an engine for operations that read no keys
    sums:      buffers for the gradients of the tensors in ``expansion.wants``
    """

    expansion: Expansion
    engine_of: Callable[[Tensor, Tensor], Engine]
    base: Engine
    sums: Sequence[Tensor] = ()
    _step: ExpandedStep | None = field(default=None, init=False)

    @classmethod
    def of(
        cls, expansion: Expansion, engine_of: Callable[[Tensor, Tensor], Engine], q: Tensor,
        sums: Sequence[Tensor] = (),
    ) -> ExpandingEngine:  # fmt: skip
        """Make the engine for queries q. Its base is made for keys and values without memory."""
        heads, d, e = expansion.sizes
        base = engine_of(*(q.new_empty(()).expand(q.shape[0], heads, 1, dim) for dim in (d, e)))
        return cls(expansion, engine_of, base, sums)

    @property
    def v_head_dim(self) -> int:
        """Head dim of values and out."""
        return self.expansion.sizes[2]

    @property
    def fused(self) -> bool:
        return self.base.fused

    @property
    def selected(self) -> SelectedRows | None:
        return self.base.selected

    def from_head(self, first: int) -> Engine:
        raise ValueError("a schedule cut the heads of a latent, which is expanded for all heads at once")

    def delta(self, out: Tensor, dout: Tensor, dlse: Tensor | None, delta: Tensor) -> PreparedStep:
        return self.base.delta(out, dout, dlse, delta)

    def forward(self, step: ForwardStep) -> PreparedStep:
        """Prepare a forward step over latents k [B, Hl, rows, C]."""
        with fresh_dispatch():
            latents = _copy_rows(_rows_in_memory(step.k), step.tables)
            key, value = _for_batch(self.expansion(latents), step.q)
        return self.engine_of(key, value).forward(step._replace(k=key, v=value))

    def dq(self, step: BackwardStep, dq: Tensor, *, add: bool = False) -> PreparedStep:
        expanded = self._expand(step)
        return expanded.engine.dq(expanded.inputs(step), dq, add=add)

    def dkdv(
        self, step: BackwardStep, dk: Tensor, dv: Tensor, dq: Tensor, *, add: bool = False, split: int = 1
    ) -> PreparedStep:
        """Prepare a step's gradients of latents, written (or with ``add`` added) to dk, and of parameters,
        added to ``sums``."""
        expanded = self._expand(step)

        def run() -> None:
            grads = [step.lse.new_zeros(x.shape) for x in expanded.keys]
            dkey, dvalue = _for_batch(grads, step.q)
            buffers.dkdv(expanded.engine, expanded.inputs(step), dkey, dvalue, dq)
            latent, *params = expanded.gradients(grads)
            rows = _rows_in_memory(dk)
            rows.copy_(rows + latent if add else latent)
            for total, grad in zip(self.sums, params, strict=True):
                total += grad

        return run

    def split(self, q: Tensor, k: Tensor, tables: Tables) -> int:
        return 1

    def _expand(self, step: BackwardStep) -> ExpandedStep:
        """Return the expanded keys and values of a step. dq and dkdv of a step both call this: the first call
        computes them, the second returns and drops them."""
        if self._step is not None:
            expanded, self._step = self._step, None
            return expanded
        with fresh_dispatch(), torch.enable_grad():
            latent = _rows_in_memory(step.k).detach().requires_grad_()
            wants = self.expansion.wants
            tensors = [x.detach().requires_grad_(i in wants) for i, x in enumerate(self.expansion.tensors)]
            keys = self.expansion.with_tensors(tensors)(_copy_rows(latent, step.tables))
        engine = self.engine_of(*_for_batch(keys, step.q))
        self._step = ExpandedStep(keys, engine, [latent, *(tensors[i] for i in wants)])
        return self._step


def _rows_in_memory(x: Tensor) -> Tensor:
    """Return x[:1] if x [B, ...] was expanded from batch size 1, else x."""
    return x if x.stride(0) else x[:1]


def _copy_rows(latent: Tensor, tables: Tables) -> Tensor:
    """Copy the latent of a step, since the function may edit it in place. Rows outside of the step's slots
    (padding) are replaced by ones, for which the function was checked: arbitrary values might give NaN, also
    in gradients of parameters."""
    slots, rows = tables.kv_slots, latent.shape[2]
    if len(slots) == 1 and tables.kv_rows == rows:
        return latent.clone()
    first, _, tokens = slots.long().unbind(-1)
    edges, step = first.new_zeros(len(slots), rows + 1), torch.ones_like(first)
    edges.scatter_add_(1, first, step).scatter_add_(1, first + tokens, -step)
    covered = edges[:, :rows].cumsum(1) > 0
    if len(latent) == 1:  # batch rows share its memory; a row is a token if it is one in any batch row
        covered = covered.any(0, keepdim=True)
    return latent.masked_fill(~covered[:, None, :, None], 1)


def _for_batch(keys: Sequence[Tensor], q: Tensor) -> list[Tensor]:
    """Expand keys and values, or their gradients, to the batch rows of the queries."""
    return [x.expand(q.shape[0], -1, -1, -1) for x in keys]

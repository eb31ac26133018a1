"""Signatures of calls: the settings that must be equal on all ranks, compared at the first call with them.

Once for each group and signature the ranks compare dtype, heads, lengths, scale, options and the structure of
mods and mask, on the host; later calls cost a look-up. Contents of tensors and captured numbers are compared
only under TRITONCP_CHECK=1, at every call. A plan made in another process, as in a data loader's worker, is
compared at its first use.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from tritoncp.core.bounded_cache import BoundedCache, OwnedState
from tritoncp.core.host_copy import to_host
from tritoncp.core.records import fields_of
from tritoncp.core.user_code import describe, origin
from tritoncp.distributed import consistency, groups
from tritoncp.distributed.collectives import dtype_name
from tritoncp.distributed.consistency import Facts, fact
from tritoncp.masks.block_runs import content
from tritoncp.masks.mask_mod import MaskMod
from tritoncp.mods import Mod
from tritoncp.mods.snapshot import captured_state
from tritoncp.ops.call import Call
from tritoncp.ops.executable import caches_of
from tritoncp.ops.expand import Expansion
from tritoncp.planning.plan import Plan

MAX_SIGNATURES = 1024  # signatures and plans per group
MAX_SCALES = 16  # values of scale that are compared per signature; further values are not
MAX_VALUE = 100  # characters of a captured value in a message
DIGITS = 12  # of a digest in a message
CALL = "flex_attention"


class Table:
    """Signatures that a group's ranks have compared; equal on all ranks, which make the same calls in the
    same order.

    scales: compared scales, by signature
    plans:  identities of compared plans
    moves:  compared pairs of placements, and shapes of tensors, for reshard
    """

    def __init__(self) -> None:
        self.scales: BoundedCache[Any, set[float]] = BoundedCache(MAX_SIGNATURES)
        self.plans: BoundedCache[Any, bool] = BoundedCache(MAX_SIGNATURES)
        self.moves: BoundedCache[Any, bool] = BoundedCache(MAX_SIGNATURES)


_TABLES = OwnedState(Table)  # by group


def table_of(group: Any) -> Table:
    """Return the table of a group."""
    return _TABLES.of(group)


def compare_call(call: Call, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Compare a call across the ranks, if its signature or plan is new to the group, or if TRITONCP_CHECK=1.

    Raises Disagreement on every rank where the ranks differ, PeerLost where a rank is missing. Under
    CUDA-graph capture nothing is compared.
    """
    group, plan, scale, score = call.group, call.plan, call.scale, call.score
    table, sizes = table_of(group), _sizes(q, k, v)
    signature = (
        score and (score.digest, score.wants, *map(type, score.numbers)), call.options, call.returns,
        plan_structure(plan), plan.first_row, q.dtype, q.is_cuda, sizes,
        call.expand and structure_of_expansion(call.expand),
    )  # fmt: skip
    scales = table.scales.get(signature) or table.scales.put(signature, set())
    is_known = scale in scales or len(scales) >= MAX_SCALES
    if is_known and table.plans.get(plan.identity) and not consistency.CHECKED:
        return
    if not consistency.can_compare(group):
        return
    shapes = f"query {list(q.shape)}, key {list(k.shape)} and value {list(v.shape)}"
    purpose = f"{CALL} of {shapes} in {dtype_name(q)}"

    def facts() -> tuple[None, Facts, Sequence[int]]:
        return None, {"call": fact(purpose, CALL.encode()), **_facts(call, q, k, v)}, ()

    consistency.together(group, purpose, facts)
    scales.add(scale)
    table.plans[plan.identity] = True
    groups.connect_data(group, q.device)  # not yet made if the plan is of another process


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, int, int]:
    """Return the sizes that are equal on all ranks, so not the length of a shard: batch, heads of query and
    key, channels of query and value."""
    (batch, heads, _, dim), (_, kv_heads, _, _), (_, _, _, v_dim) = q.shape, k.shape, v.shape
    return batch, heads, kv_heads, dim, v_dim


def _facts(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Facts:
    """Return the facts of a call that must be equal on all ranks."""
    plan, score = call.plan, call.score
    mask, between = plan.mask, f"schedule {plan.schedule!r}, degree {plan.degree}"
    batch, heads, kv_heads, dim, v_dim = _sizes(q, k, v)
    facts = {
        "versions": consistency.versions(),
        "device": fact(q.device.type),
        "dtype": fact(dtype_name(q)),
        "batch": fact(f"batch {batch} from row {plan.first_row} on"),
        "heads": fact(f"{heads} query heads and {kv_heads} key heads"),
        "head dims": fact(f"head dim {dim}, of values {v_dim}"),
        "lengths": fact(f"{mask.q_len} queries and {mask.kv_len} keys"),
        "scale": fact(f"scale {call.scale!r}"),
        "kernel_options": fact(f"kernel_options {dict(call.options)}"),
        "returns": fact(", ".join(["out", *call.returns]).removesuffix(", sinks")),
        "sinks": fact("sinks" if "sinks" in call.returns else "no sinks"),
        "score_mod": fact(f"a score_mod of structure {score.digest[:DIGITS]}" if score else "no score_mod"),
        "expand": fact(f"expand {structure_of_expansion(call.expand)}" if call.expand else "no expand"),
        "mask": fact(lambda: mask_text(mask), plan.mask_digest + form_of(mask.mask_mod).encode()),
        "placement": fact(f"balancer {plan.balancer!r}, {between}", plan.digest),
    }
    if consistency.CHECKED:
        values = [*map(tensor_text, call.captures), *map(repr, score.numbers if score else ())]
        facts["captures"] = fact(", ".join(values) or "none")
    return facts


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
    structures, key = caches_of(plan).structures, (plan.schedule, plan.degree)
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
        return mod.digest
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


def mask_text(mask: Any) -> str:
    """Format a mask and the values that its mask_mod reads, for error messages."""
    return f"{mask!r} of {mod_text(getattr(mask, 'mask_mod', mask))}"


def mod_text(mod: Any) -> str:
    """Format a mask_mod with the numbers and tensors that it reads from closures, globals and attributes."""
    if mod is None:
        return "every pair"
    state = captured_state(mod)
    values = [tensor_text(x) for x in state.tensors]
    for part in state.key if isinstance(state.key, tuple) else ():
        match part:
            case (str(path), (str(), str(number))):
                values.append(f"{path} = {number}")
            case (str(path), (type(), value)):
                values.append(f"{path} = {repr(value)[:MAX_VALUE]}")
    name = repr(mod) if isinstance(mod, MaskMod) else f"{describe(mod)} ({origin(mod)})"
    return ", ".join([name, *dict.fromkeys(values)])


def _fields(mod: MaskMod) -> Iterator[Any]:
    """Yield the values of a closed form's fields; for a sequence, its items."""
    for name in fields_of(mod):
        value = getattr(mod, name)
        yield from value if isinstance(value, tuple | list) else (value,)


def tensor_text(x: Tensor) -> str:
    """Format a tensor's dtype, shape and a digest of its contents."""
    digest = hashlib.sha256(*map(content, to_host([x]))).hexdigest()
    return f"{dtype_name(x)} {list(x.shape)} #{digest[:DIGITS]}"

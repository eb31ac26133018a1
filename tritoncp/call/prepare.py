"""Preparation of a call: its record, after the checks that need its plan; and, as a pass begins, the
comparison of the ranks' calls (:func:`compare_call`).

Once for each group and signature the ranks compare dtype, heads, lengths, scale, options and the structure of
mods and mask, on the host; later calls cost a look-up. Contents of tensors and captured numbers are compared
only under TRITONCP_CHECK=1, at every call. A plan made in another process, for example in a data loader's
worker, is compared at its first use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tritoncp.call import call_mods
from tritoncp.call.check_arguments import scale_of
from tritoncp.call.facts import DIGITS, Call, Facts, form_of, with_facts
from tritoncp.call.read import Arguments
from tritoncp.core.bounded_cache import BoundedCache, OwnedState
from tritoncp.core.host_copy import to_host
from tritoncp.distributed import consistency, groups
from tritoncp.distributed.collectives import dtype_name
from tritoncp.distributed.consistency import fact
from tritoncp.kernels.options import check_options
from tritoncp.kernels.tile_rules import architecture
from tritoncp.masks.mask_mod import MaskMod
from tritoncp.masks.runs.block_runs import content
from tritoncp.mods import Mod
from tritoncp.mods.snapshot import captured_state
from tritoncp.mods.user_code import describe, origin
from tritoncp.planning.plan import Plan
from tritoncp.selection.selection import Selection, check_indices, check_selection

MAX_SIGNATURES = 1024  # max signatures and plans per group
MAX_SCALES = 16  # max values of scale that are compared per signature
MAX_VALUE = 100  # max characters of a captured value in a message
CALL = "flex_attention"
SCALE = Facts._fields.index("scale")


def prepare(arguments: Arguments, plan: Plan) -> Call:
    """Prepare a checked call of this plan: check its kernel options, score_mod and scale, and find its facts
    if they are kept.

    The passes compare the ranks (:func:`compare_call`) and find the engine, as they begin: under a dispatch
    mode a pass may get other tensors than the call."""
    query, options, kind = arguments.query, arguments.kernel_options, arguments.kind
    if options:
        check_options(options, architecture(query.device))
    score: Mod | None = None
    tensors: Sequence[Tensor] = ()
    if arguments.score_mod is not None:
        score, tensors = call_mods.translate_score(arguments.score_mod, query.dtype, query.device)
    group = kind and kind.ranks and kind.ranks()
    selected = None if arguments.selected is None else selected_keys(arguments, plan)
    call = Call(
        plan, score, scale_of(arguments), group, tuple(sorted(options.items())) if options else (),
        arguments.returns, arguments.expand, tensors, selected,
    )  # fmt: skip
    return with_facts(call, kind, *arguments[:3]) if kind and kind.is_kept else call


def selected_keys(arguments: Arguments, plan: Plan) -> Selection:
    """Return the selected keys of a call with unique indices, after checks."""
    selected, expand = arguments.selected, arguments.expand
    check_selection(selected, arguments.query, arguments.key.shape[1] if expand is None else expand.sizes[0])
    check_indices(selected, plan.mask.kv_len)
    return selected.unique()


class Table:
    """Signatures that a group's ranks have compared; equal on all ranks, which make the same calls in the
    same order.

    scales: compared scales, by signature: the facts of a call without its scale
    plans:  identities of compared plans
    """

    def __init__(self) -> None:
        self.scales: BoundedCache[Any, set[float]] = BoundedCache(MAX_SIGNATURES)
        self.plans: BoundedCache[Any, bool] = BoundedCache(MAX_SIGNATURES)


_TABLES = OwnedState(Table)  # by group


def table_of(group: Any) -> Table:
    """Return the table of a group."""
    return _TABLES.of(group)


def compare_call(call: Call, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Compare a call across the ranks, if its signature or plan is new to the group, or if TRITONCP_CHECK=1.

    Raises Disagreement on every rank if the ranks differ, PeerLost if a rank is missing. Under CUDA-graph
    capture nothing is compared.
    """
    group, plan, facts = call.group, call.plan, call.facts or Facts.of(call, q, k, v)
    table, signature = table_of(group), (*facts[:SCALE], *facts[SCALE + 1 :])
    scales = table.scales.get(signature) or table.scales.put(signature, set())
    is_known = facts.scale in scales or len(scales) >= MAX_SCALES
    if is_known and table.plans.get(plan.identity) and not consistency.CHECKED:
        return
    if not consistency.can_compare(group):
        return
    shapes = f"query {list(q.shape)}, key {list(k.shape)} and value {list(v.shape)}"
    purpose = f"{CALL} of {shapes} in {dtype_name(q)}"

    def to_compare() -> tuple[None, consistency.Compared, Sequence[int]]:
        return None, {"call": fact(purpose, CALL.encode()), **_compared(call, facts)}, ()

    consistency.together(group, purpose, to_compare)
    scales.add(facts.scale)
    table.plans[plan.identity] = True
    groups.connect_data(group, q.device)  # not made yet if the plan is from another process


def _compared(call: Call, facts: Facts) -> consistency.Compared:
    """Return what the ranks compare of a call: its facts, the mask and the placement."""
    plan, score = call.plan, call.score
    mask, between = plan.mask, f"schedule {plan.schedule!r}, degree {plan.degree}"
    compared = {
        "versions": consistency.versions(),
        **{name: fact(text) for name, text in facts.texts().items()},
        "mask": fact(lambda: mask_text(mask), plan.mask_digest + form_of(mask.mask_mod).encode()),
        "placement": fact(f"balancer {plan.balancer!r}, {between}", plan.digest),
    }
    if consistency.CHECKED:
        values = [*map(tensor_text, call.captures), *map(repr, score.numbers if score else ())]
        compared["captures"] = fact(", ".join(values) or "none")
    return compared


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


def tensor_text(x: Tensor) -> str:
    """Format a tensor's dtype, shape and a digest of its contents."""
    digest = hashlib.sha256(*map(content, to_host([x]))).hexdigest()
    return f"{dtype_name(x)} {list(x.shape)} #{digest[:DIGITS]}"

"""The probabilities of selected keys, summed over query heads, for the loss of the model that selects them.

They are computed after the forward pass, whose lse they need: the keys travel once more, without values. They
have no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritoncp.call.autograd import drive
from tritoncp.call.engine_factory import engine_of
from tritoncp.call.expand import ExpandingEngine
from tritoncp.call.facts import Call
from tritoncp.call.op_arguments import CALL_SCHEMA, OpArguments
from tritoncp.call.read import Arguments
from tritoncp.call.sinks import lse_with_sinks
from tritoncp.distributed import failures
from tritoncp.distributed.collectives import Requests
from tritoncp.distributed.schedules import SCHEDULES, schedule_of
from tritoncp.distributed.schedules.buffers import stats_dtype
from tritoncp.graph.dispatch import call_op, needs_dispatcher, register_op
from tritoncp.mods.tracing import fresh_dispatch
from tritoncp.planning.step_tables import Engine
from tritoncp.selection.cpu_engine import CpuProbabilities, SelectedCpuEngine
from tritoncp.selection.selection import in_order


def probabilities(
    calls: Sequence[Call], arguments: Sequence[Arguments], lses: Sequence[Tensor]
) -> list[Tensor]:
    """Return the probabilities of the selected keys of a rank's call, or of the calls of all ranks of a
    simulated world: [B, Hs, S_local, n], in the order of the indices. lses: [B, Hq, S], without sinks"""
    inputs = [pass_inputs(one, lse) for one, lse in zip(arguments, lses, strict=True)]
    if len(calls) == 1 and needs_dispatcher([*inputs[0], *calls[0].captures]):
        sizes = sizes_of(arguments[0])
        found = [call_op(probabilities_op, *inputs[0], *sizes, *OpArguments.of(calls[0]))]
    else:
        with torch.no_grad(), fresh_dispatch():
            found = probability_pass(calls, [[x.resolve_neg() for x in one] for one in inputs])
    return [in_order(one.selected, x) for one, x in zip(arguments, found, strict=True)]


def probabilities_in_graph(arguments: Arguments, lse: Tensor, written: Sequence[Any]) -> Tensor:
    """Trace the op of the probabilities of a call. lse: without sinks; written: :class:`OpArguments`"""
    captures, *rest = written
    tensors, without = pass_inputs(arguments, lse), [x.detach() for x in captures]
    found = probabilities_op(*tensors, *sizes_of(arguments), without, *rest)
    return in_order(arguments.selected, found)


def pass_inputs(arguments: Arguments, lse: Tensor) -> list[Tensor]:
    """Return the inputs of the pass of one call, without gradients: query, key and lse with sinks."""
    lse = lse.detach()
    if arguments.sinks is not None:
        lse = lse_with_sinks(lse, arguments.sinks.detach())
    return [arguments.query.detach(), arguments.key.detach(), lse]


def sizes_of(arguments: Arguments) -> tuple[int, int]:
    """Return the number of heads and of keys of a row of a selection."""
    _, heads, _, count = arguments.selected.indices.shape
    return heads, count


def probability_pass(calls: Sequence[Call], inputs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Compute the probabilities of each call, in the order of unique indices. inputs: query, key and lse"""
    passes = [_probability_schedule(call, *one) for call, one in zip(calls, inputs, strict=True)]
    return drive(calls, passes, inputs[0][0], "probabilities ")


def _probability_schedule(call: Call, q: Tensor, k: Tensor, lse: Tensor) -> Requests[Tensor]:
    """Return the schedule of the pass: that of the call, which sends the keys without values; fetch for a
    schedule that exchanges heads, since here each rank needs all heads of its queries."""
    assert call.selected is not None
    _, heads, _, count = call.selected.indices.shape
    sums = lse.new_zeros(q.shape[0], heads, q.shape[2], count)
    engine = _engine_of(call, q, k, lse, sums)
    exchanges = call.plan.schedule.startswith("ulysses")
    schedule = SCHEDULES["fetch"] if exchanges else schedule_of(call.plan)

    def run() -> Requests[Tensor]:
        yield from schedule.forward(call.plan, engine, q, k, k[..., :0], False)
        return sums

    return run()


def _engine_of(call: Call, q: Tensor, k: Tensor, lse: Tensor, sums: Tensor) -> Engine:
    """Return the engine whose forward steps add the probabilities of selected keys to ``sums``. lse: of all
    steps and sinks"""
    if call.expand is not None:
        expand, call = call.expand, call._replace(expand=None)
        return ExpandingEngine.of(expand, lambda key, value: _engine_of(call, q, key, lse, sums), q)
    engine: Any = engine_of(call, q, k, k)
    fields = {"base": engine.base, "selected": engine.selected, "pairs": engine.pairs}
    if isinstance(engine, SelectedCpuEngine):
        return CpuProbabilities(**fields, lse=lse, sums=sums)
    from tritoncp.selection.triton_probabilities import TritonProbabilities  # late: it imports the kernels

    return TritonProbabilities(**fields, lse=lse, sums=sums)


def _body(q: Tensor, k: Tensor, lse: Tensor, heads: int, count: int, *arguments: Any) -> Tensor:
    """Body of the op: run :func:`probability_pass` on decoded :class:`OpArguments`."""
    written = OpArguments(*arguments)
    with failures.closing(written.group), torch.no_grad():
        return probability_pass([written.decode(q)], [(q, k, lse)])[0]


def _fake(q: Tensor, k: Tensor, lse: Tensor, heads: int, count: int, *arguments: Any) -> Tensor:
    """Fake kernel of the op: allocate its result."""
    return q.new_empty(q.shape[0], heads, q.shape[2], count, dtype=stats_dtype(q.dtype))


SCHEMA = f"(Tensor query, Tensor key, Tensor lse, SymInt heads, SymInt count, {CALL_SCHEMA}) -> Tensor"
probabilities_op = register_op("probabilities", _body, _fake, schema=SCHEMA)

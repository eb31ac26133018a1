"""Tests of the simulator on graphs with known times and bytes, and on the sample model's graphs."""

import itertools
import operator
import random
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import tritoncp
from tests.chunking.graphs import ATEN, C10D, UNIT, Builder
from tests.chunking.test_refusals import attend_by, forward_graph
from tritoncp.chunking import Timeline, chunk, predict_timeline
from tritoncp.chunking.streams.costs import _computes_nothing
from tritoncp.chunking.streams.storages import Storages, _storage_bytes
from tritoncp.planning.costs.hardware import NVLINK
from tritoncp.report.memory_meter import MemoryMeter

NUMBERS = {"scale": torch.float32, "growth": torch.int32, "overflow": torch.float32}


def chain(b: Builder) -> list:
    x = b.input("x", 100)
    y = b.call(ATEN.neg.default, x)  # reads 100, writes 100
    return [b.call(ATEN.cat.default, [y, y, x])]  # reads each input once: 200, writes 300


def under_computation(b: Builder) -> list:
    x = b.input("x", 100)
    sent = b.send(x)
    y = b.call(ATEN.neg.default, b.call(ATEN.slice.Tensor, x, 0, 0, 10))  # 20 bytes
    return [y, b.call(ATEN.neg.default, b.wait(sent))]  # 200 bytes


def two_messages(b: Builder) -> list:
    y = b.call(ATEN.neg.default, b.input("x", 100))
    return [b.wait(sent) for sent in [b.send(y), b.send(y)]]


GRAPHS = {  # the graph, and the kind, start and end of each span
    "a chain": (chain, [("memory", 0, 200), ("memory", 200, 700)]),
    "the wait blocks for the rest of a message": (
        under_computation,
        [("message", 0, 50), ("memory", 0, 20), ("wait", 20, 50), ("memory", 50, 250)],
    ),
    "messages travel one after another, after the computation before them": (
        two_messages,
        [
            ("memory", 0, 200),
            ("message", 200, 250),
            ("message", 250, 300),
            ("wait", 200, 250),
            ("wait", 250, 300),
        ],
    ),
    "a lookup reads its indices and the rows that it returns": (
        lambda b: [
            b.call(ATEN.index_select.default, b.input("x", 50, 100), 0, b.input("i", 10, dtype=torch.int32))
        ],
        [("memory", 0, 1000 + 40 + 1000)],
    ),
    "memory that is allocated is not written": (
        lambda b: [b.call(ATEN.neg_.default, b.call(ATEN.empty_like.default, b.input("x", 100)))],
        [("memory", 0, 200)],
    ),
    "a sum reads all of its input": (
        lambda b: [b.call(ATEN.amax.default, b.input("x", 100))],
        [("memory", 0, 100 + 1)],
    ),
    "a message without a wait": (lambda b: [b.send(b.input("x", 100))], [("message", 0, 50)]),
    "a node that reads a message without a wait": (
        lambda b: [b.call(ATEN.neg.default, b.send(b.input("x", 100)))],
        [("message", 0, 50), ("wait", 0, 50), ("memory", 50, 250)],
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_spans_are_those_worked_out_by_hand(name):
    (build, spans), b = GRAPHS[name], Builder()
    timeline = predict_timeline(b.module(*build(b)), UNIT)
    assert [(span.kind, span.start, span.end) for span in timeline.spans] == spans
    lengths = {kind: sum(end - start for each, start, end in spans if each == kind) for kind, _, _ in spans}
    assert timeline.makespan == max(end for _, _, end in spans) and Timeline((), 0).makespan == 0
    assert (timeline.compute, timeline.communication) == (lengths.get("memory", 0), lengths.get("message", 0))
    assert timeline.exposed == timeline.makespan - timeline.compute
    times = timeline.makespan, timeline.exposed, timeline.compute, timeline.communication
    assert [float(x) for x in re.findall(r"([\d.e+]+) ms", str(timeline))] == [
        float(f"{seconds * 1e3:.3g}") for seconds in times
    ]


@pytest.mark.parametrize(
    ("op", "args", "seconds"),
    [
        (C10D.all_gather_into_tensor.default, (4, "g"), 4 * 96 / 2),
        (C10D.reduce_scatter_tensor.default, ("sum", 4, "g"), 96 / 2),
        (C10D.all_reduce.default, ("sum", "g"), 2 * 96 / 2),
        (C10D.all_to_all_single.default, ([24] * 4, [24] * 4, "g"), 96 / 2 / 0.5),
    ],
    ids=lambda value: value._schema.name.split("::")[1] if hasattr(value, "_schema") else "",
)
def test_messages_of_each_collective(op, args, seconds):
    b = Builder()
    sent = b.call(op, b.input("x", 96), *args)
    timeline = predict_timeline(b.module(b.wait(sent)), replace(UNIT, scattered=0.5, latency=7.0))
    assert timeline.communication == seconds + 7


def test_products_take_their_flops_or_their_bytes():
    b = Builder()
    x, w = b.input("x", 8, 16, dtype=torch.float32), b.input("w", 16, 4, dtype=torch.float32)
    gm = b.module(b.call(ATEN.mm.default, x, w))
    assert predict_timeline(gm, replace(UNIT, memory=1e9)).makespan == 2 * 8 * 16 * 4
    assert predict_timeline(gm, replace(UNIT, flops=1e9)).makespan == 4 * (8 * 16 + 16 * 4 + 8 * 4)


def attention_graph(plan):
    """Trace causal attention of 512 tokens, 2 rows, 4 heads, 64 wide, forward and backward."""

    def step(q, k, v):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = tritoncp.flex_attention(q, k, v, block_mask=plan)
        return torch.autograd.grad(out.sum(), (q, k, v))

    with FakeTensorMode():
        return make_fx(step)(*(torch.empty(2, 4, 512, 64) for _ in range(3)))


@pytest.mark.parametrize(
    ("mask", "blocks"),  # of 128 by 128 pairs, of 2 rows and 4 heads; masked ones cost 1.25
    [
        (tritoncp.create_block_mask(tritoncp.causal(), 1, 1, 512, 512), 2 * 4 * (6 + 4 * 1.25)),
        (
            tritoncp.create_block_mask(lambda b, h, q, kv: q >= kv + 128 * (h ^ b), 2, 4, 512, 512),
            2 * (6 + 3 + 1 + (4 + 3 + 2 + 1) * 1.25),
        ),
    ],
    ids=["one for all", "of each row and head"],
)
def test_attention_takes_the_visible_blocks_of_its_plan(mask, blocks):
    """The forward pass has 2 products of matrices, the backward pass 5."""
    gm = attention_graph(tritoncp.make_plan(mask, world_size=1, rank=0))
    spans = predict_timeline(gm, replace(UNIT, memory=1e30, flops=4.0)).spans
    flops = blocks * 128 * 128 * 2 * 64
    times = [span.seconds for span in spans if span.kind == "attention"]
    assert times == [flops * 2 / 4, flops * 5 / 4]
    assert "plan" not in {span.name for span in spans}


def test_attention_by_a_mask_of_unknown_documents_takes_the_time_of_all_pairs():
    def step(q, ids):
        return tritoncp.flex_attention(q, q, q, block_mask=tritoncp.document(ids=ids))

    with FakeTensorMode():
        gm = make_fx(step)(torch.empty(2, 4, 512, 64), torch.empty(512, dtype=torch.int64))
    spans = predict_timeline(gm, replace(UNIT, memory=1e30, flops=4.0)).spans
    (seconds,) = (span.seconds for span in spans if span.kind == "attention")
    assert seconds == 2 * 4 * 512 * 512 * 2 * 64 * 2 / 4


@pytest.mark.long
@pytest.mark.parametrize("dim", ["seq", "batch"])
def test_attention_of_chunks_takes_the_time_of_the_whole(dim):
    """Chunks of the batch take equal parts; each chunk of the sequence sees more keys than the one before."""
    mask = tritoncp.create_block_mask(tritoncp.causal(), 1, 1, 64, 64, BLOCK_SIZE=16)
    plan = tritoncp.make_plan(mask)
    gm = forward_graph(attend_by(plan), torch.randn(8, 64, 6))

    def times() -> list[float]:
        spans = predict_timeline(gm, UNIT).spans
        return [span.seconds for span in spans if span.kind == "attention"]

    (whole,) = times()
    chunk(gm, dim=dim, chunks=4)
    parts = times()
    assert len(parts) == 4 and sum(parts) == whole
    assert parts == sorted(set(parts)) if dim == "seq" else len(set(parts)) == 1


@given(seed=st.integers(0, 10**6), count=st.integers(2, 30))
def test_predicted_live_bytes_equal_the_live_bytes_of_a_run(seed, count):
    """A run on meta tensors frees each value after its last use: views, items and writes share memory."""
    rng, b = random.Random(seed), Builder()
    x = b.input("x", 6, 10, dtype=torch.float32)
    nodes = [b.call(ATEN.neg.default, x)]
    for _ in range(count):
        y, kind = rng.choice(nodes), rng.choice(["view", "copy", "write", "parts", "sort", "sum"])
        if kind == "view":
            nodes.append(
                b.call(ATEN.t.default, b.call(ATEN.slice.Tensor, y, 0, 0, y.meta["val"].shape[0] - 1))
            )
        elif kind == "copy":
            nodes.append(b.call(ATEN.reshape.default, y, list(reversed(y.meta["val"].shape))))
        elif kind == "write":
            nodes.append(b.call(ATEN.neg_.default, y))
        elif kind == "sum":
            nodes.append(b.call(ATEN.cat.default, [y, y]))
        else:
            op, arguments = (ATEN.split.Tensor, (2,)) if kind == "parts" else (ATEN.sort.default, ())
            both = b.call(op, y, *arguments)
            nodes += [b.call(operator.getitem, both, at) for at in range(len(both.meta["val"]))]
        nodes = [node for node in nodes if node.meta["val"].shape[0] > 1]
    gm = b.module(*[node for node in b.graph.nodes if not node.users and node.op == "call_function"])
    real = torch.empty(6, 10, device="meta")
    with MemoryMeter([real]) as meter:
        torch.fx.Interpreter(gm).run(real)
    assert predict_timeline(gm, UNIT).peak == meter.peak + real.nbytes


def test_the_input_of_a_message_lives_until_its_wait():
    b = Builder()
    x = b.input("x", 100)
    y = b.call(ATEN.neg.default, x)
    sent = b.send(y)
    z = b.call(ATEN.cat.default, [x, x])  # x, y, the message's and 200: 500
    timeline = predict_timeline(b.module(b.wait(sent), z), UNIT)
    assert timeline.peak == 500


def test_copies_of_a_node_with_one_fake_value_are_two_storages():
    b = Builder()
    x = b.input("x", 100)
    first, second = (b.call(ATEN.neg.default, x) for _ in range(2))
    second.meta = first.meta
    assert predict_timeline(b.module(first, second), UNIT).peak == 300


def test_inputs_live_to_the_end_unless_the_graph_frees_them():
    b = Builder()
    y = b.call(ATEN.neg.default, b.input("x", 100))
    last = b.call(ATEN.cat.default, [b.call(ATEN.neg.default, y)] * 2)
    gm = b.module(b.call(ATEN.neg_.default, last))
    assert predict_timeline(gm, UNIT).peak == 400
    assert predict_timeline(gm, UNIT, boxed=True).peak == 300


def test_a_result_shares_memory_with_the_argument_of_its_alias_alone():
    """The op writes two arguments, each with an alias."""
    b = Builder()
    scale, growth, overflow = (b.input(name, dtype=dtype) for name, dtype in NUMBERS.items())
    node = b.call(ATEN._amp_update_scale_.default, scale, growth, overflow, 2.0, 0.5, 1)
    storages = Storages(b.module(node))
    assert storages.of[node] == storages.of[scale]
    assert storages.writes[node] == {*storages.of[scale], *storages.of[growth]}


def test_items_of_a_list_of_views_share_memory_with_the_argument():
    b = Builder()
    x = b.input("x", 10)
    pair = b.call(ATEN.split.Tensor, x, 5)
    items = [b.call(operator.getitem, pair, index) for index in (0, 1)]
    storages = Storages(b.module(*items))
    assert [storages.of[node] for node in (pair, *items)] == [[0, 0], [0], [0]]


def test_ops_that_return_handles_take_no_time_and_other_ops_of_tritoncp_do():
    b = Builder()
    handle, gradient = (b.input(name, *shape) for name, shape in (("handle", ()), ("gradient", (4, 2))))
    for x, takes_none in ((handle, True), (gradient, False)):
        node = b.graph.call_function(torch.ops.tritoncp.land_gradients.default, (x,))
        node.meta["val"] = [x.meta["val"]]
        assert _computes_nothing(node) == takes_none


def test_symbolic_sizes_count_by_their_hints():
    gm = make_fx(lambda x: (x + x, x[: x.shape[0] // 2].neg()), tracing_mode="symbolic")(
        torch.empty(24, 2, dtype=torch.uint8)
    )
    (x,) = gm.graph.find_nodes(op="placeholder")
    assert isinstance(x.meta["val"].shape[0], torch.SymInt)
    timeline = predict_timeline(gm, UNIT)
    assert (timeline.makespan, timeline.peak) == (2 * 48 + 2 * 24, 48 + 48 + 24)


def test_a_timeline_is_the_same_under_a_fake_mode():
    mask = tritoncp.create_block_mask(tritoncp.causal(), 1, 1, 512, 512)
    gm = attention_graph(tritoncp.make_plan(mask, world_size=1, rank=0))
    with FakeTensorMode():
        inside = predict_timeline(gm, NVLINK)
    assert inside == predict_timeline(gm, NVLINK)


def message_under_computation(marked: bool) -> Timeline:
    """Simulate a message of 50 s under 20 s of chunk 0, before 80 s of chunk 1."""
    b = Builder()
    x = b.input("x", 100)
    sent = b.send(x)
    first = b.call(ATEN.neg.default, b.call(ATEN.slice.Tensor, x, 0, 0, 10))
    last = b.call(ATEN.neg.default, b.call(ATEN.slice.Tensor, b.wait(sent), 0, 0, 40))
    for node, index in ((sent, 1), (first, 0), (last, 1)) if marked else ():
        node.meta["custom"] = {"tritoncp_chunk": ("layers.0", index)}
    return predict_timeline(b.module(first, last), UNIT)


def test_text_shows_both_streams_and_the_chunks_in_proportion():
    assert message_under_computation(True).format(width=13).splitlines()[1:] == [
        "      compute |--   --------|",
        "        chunk |00   11111111|",
        "communication |=====        |",
        "        chunk |11111        |",
    ]
    assert message_under_computation(False).format(width=26, makespan=260).splitlines()[1:] == [
        "      compute |--   --------             |",
        "communication |=====                     |",
    ]
    b = Builder()
    text = predict_timeline(b.module(b.input("x", 3 << 20)), UNIT).format(width=4)
    assert "; at most 3 MiB live" in text and text.endswith("communication |    |")


@given(
    sizes=st.lists(st.integers(0, 4), max_size=3), steps=st.lists(st.integers(0, 5), min_size=3, max_size=3)
)
def test_bytes_of_a_tensor_reach_from_its_first_to_its_last_element(sizes, steps):
    x = torch.empty_strided(sizes, steps[: len(sizes)], dtype=torch.int32, device="meta")
    places = [
        sum(i * step for i, step in zip(index, x.stride())) for index in itertools.product(*map(range, sizes))
    ]
    assert _storage_bytes(x) == 4 * max((place + 1 for place in places), default=0)


def test_an_op_without_a_schema_may_write_its_inputs_and_an_item_writes_none():
    b = Builder()
    x = b.input("x", 10)
    pair = b.call(ATEN.split.Tensor, x, 5)
    item = b.call(operator.getitem, pair, 0)
    unknown = b.call(torch.neg, item)
    storages = Storages(b.module(unknown))
    assert storages.writes[item] == set() and storages.writes[unknown] == set(storages.of[item])

"""Tests of the simulator on graphs with known times and bytes, and on the sample model's graphs."""

import operator
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import tritoncp
from tests.chunking.graphs import ATEN, C10D, UNIT, Builder
from tritoncp.chunking.streams.costs import Kind, node_costs
from tritoncp.chunking.streams.timeline import simulate
from tritoncp.planning.cost import NVLINK, costs
from tritoncp.planning.memory import Shape


def test_a_chain_takes_the_bytes_that_its_nodes_read_and_write():
    b = Builder()
    x = b.input("x", 100)
    y = b.call(ATEN.neg.default, x)  # reads 100, writes 100
    z = b.call(ATEN.cat.default, [y, y, x])  # reads each input once: 200, writes 300
    timeline = simulate(b.module(z), UNIT)
    assert (timeline.makespan, timeline.compute, timeline.exposed) == (700, 700, 0)
    assert [(span.name, span.kind, span.seconds) for span in timeline.spans] == [
        ("neg_default", "memory", 200),
        ("cat_default", "memory", 500),
    ]


def test_a_message_travels_while_other_nodes_compute_and_the_wait_blocks_for_the_rest():
    b = Builder()
    x = b.input("x", 100)
    sent = b.send(x)  # 50 bytes to the other rank: 0 to 50
    y = b.call(ATEN.neg.default, b.call(ATEN.slice.Tensor, x, 0, 0, 10))  # 20 bytes: 0 to 20
    arrived = b.wait(sent)  # at 50
    z = b.call(ATEN.neg.default, arrived)  # 200 bytes: 50 to 250
    timeline = simulate(b.module(y, z), UNIT)
    assert (timeline.makespan, timeline.compute, timeline.communication) == (250, 220, 50)
    assert timeline.exposed == 30
    assert [(span.kind, span.start, span.end) for span in timeline.spans if span.kind != "memory"] == [
        ("message", 0, 50),
        ("wait", 20, 50),
    ]


def test_messages_travel_one_after_another_and_start_after_the_computation_before_them():
    b = Builder()
    x = b.input("x", 100)
    y = b.call(ATEN.neg.default, x)  # 0 to 200
    sent = [b.send(y), b.send(y)]  # 200 to 250, 250 to 300
    timeline = simulate(b.module(*map(b.wait, sent)), UNIT)
    messages = [(span.start, span.end) for span in timeline.spans if span.kind == "message"]
    assert messages == [(200, 250), (250, 300)] and timeline.exposed == 100


def test_a_message_without_a_wait_counts_to_the_end():
    b = Builder()
    sent = b.send(b.input("x", 100))
    timeline = simulate(b.module(sent), UNIT)
    assert (timeline.makespan, timeline.exposed) == (50, 50)


def test_a_node_that_reads_a_message_without_a_wait_is_blocked_like_one():
    b = Builder()
    y = b.call(ATEN.neg.default, b.send(b.input("x", 100)))
    timeline = simulate(b.module(y), UNIT)
    assert (timeline.makespan, timeline.exposed) == (250, 50)


@pytest.mark.parametrize(
    ("op", "args", "seconds"),
    [
        (C10D.all_gather_into_tensor.default, (4, "g"), 3 * 96),
        (C10D.reduce_scatter_tensor.default, ("sum", 4, "g"), 96 * 3 / 4),
        (C10D.all_reduce.default, ("sum", "g"), 2 * 96),
        (C10D.all_to_all_single.default, ([24] * 4, [24] * 4, "g"), 96 * 3 / 4 / 0.5),
    ],
    ids=lambda value: value._schema.name.split("::")[1] if hasattr(value, "_schema") else "",
)
def test_messages_of_each_collective(op, args, seconds):
    b = Builder()
    sent = b.call(op, b.input("x", 96), *args)
    timeline = simulate(b.module(b.wait(sent)), replace(UNIT, scattered=0.5, latency=7.0))
    assert timeline.communication == seconds + 7


def test_products_take_their_flops_or_their_bytes():
    b = Builder()
    x, w = b.input("x", 8, 16, dtype=torch.float32), b.input("w", 16, 4, dtype=torch.float32)
    gm = b.module(b.call(ATEN.mm.default, x, w))
    assert simulate(gm, replace(UNIT, memory=1e9)).makespan == 2 * 8 * 16 * 4
    assert simulate(gm, replace(UNIT, flops=1e9)).makespan == 4 * (8 * 16 + 16 * 4 + 8 * 4)


def attention_graph(plan):
    """Trace causal attention of 512 tokens, 2 rows, 4 heads, 64 wide, forward and backward."""

    def step(q, k, v):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = tritoncp.flex_attention(q, k, v, block_mask=plan)
        return torch.autograd.grad(out.sum(), (q, k, v))

    with FakeTensorMode():
        return make_fx(step)(*(torch.empty(2, 4, 512, 64) for _ in range(3)))


def test_attention_takes_the_visible_blocks_of_its_plan():
    # 4 x 4 blocks of 128: 6 full ones, 4 masked ones that cost 1.25; products of 2 and 5 matrices.
    mask = tritoncp.create_block_mask(tritoncp.causal(), 1, 1, 512, 512)
    gm = attention_graph(tritoncp.make_plan(mask, world_size=1, rank=0))
    spans = {span.op: span for span in simulate(gm, replace(UNIT, memory=1e30)).spans}
    pairs = (6 + 4 * 1.25) * 128 * 128 * 2 * 4
    times = [span.seconds for span in spans.values() if span.kind == "attention"]
    assert times == [pairs * 2 * 2 * 64, pairs * 5 * 2 * 64]


def test_attention_over_ranks_takes_what_the_cost_model_predicts_of_the_slowest_rank():
    mask = tritoncp.create_block_mask(tritoncp.causal(), 1, 1, 2048, 2048)
    seconds = set()
    for rank in range(4):
        plan = tritoncp.make_plan(mask, world_size=4, rank=rank, schedule="ring").pinned()
        b = Builder()
        q = b.input("q", 2, 4, 512, 64, dtype=torch.bfloat16)
        root = torch.nn.Module()
        root.handle = plan.handle
        handle = b.graph.get_attr("handle")
        node = b.graph.call_function(torch.ops.tritoncp.forward.default, (q, q, q, [], [], 1.0, handle, "{}"))
        node.meta["val"] = [q.meta["val"]]
        b.graph.output(node)
        cost = node_costs(torch.fx.GraphModule(root, b.graph), NVLINK)[node]
        assert cost.kind is Kind.ATTENTION
        seconds.add(cost.seconds)
    shape = Shape(batch=2, heads=4, kv_heads=4, head_dim=64, v_head_dim=64)
    assert seconds == {next(one.forward for one in costs(plan, shape, NVLINK) if one.schedule == "ring")}


def test_a_storage_lives_until_the_last_user_of_any_view_of_it():
    b = Builder()
    x = b.input("x", 100)
    y = b.call(ATEN.neg.default, x)  # 100 more
    view = b.call(ATEN.view.default, y, [10, 10])
    part = b.call(ATEN.select.int, view, 0, 3)
    z = b.call(ATEN.cat.default, [x, x, x])  # x, y and 300 more: 500
    end = b.call(ATEN.neg.default, part)  # x, y, z and 10 more: 510; y is free after it
    last = b.call(ATEN.neg.default, x)  # x, z, end, last: 510
    timeline = simulate(b.module(z, end, last), UNIT)
    assert (timeline.peak, timeline.peak_node) == (510, "neg_default_1")
    assert [span.live for span in timeline.spans] == [200, 500, 510, 510]


def test_a_storage_without_users_is_free_at_once():
    b = Builder()
    x = b.input("x", 100)
    b.call(ATEN.neg.default, x)
    timeline = simulate(b.module(b.call(ATEN.neg.default, x)), UNIT)
    assert timeline.peak == 200


def test_results_of_an_op_with_several_live_as_long_as_each_is_used():
    b = Builder()
    x = b.input("x", 100, dtype=torch.float32)
    sort = b.call(ATEN.sort.default, x)  # 400 and 800 bytes beside the input's 400
    values, places = (b.call(operator.getitem, sort, at) for at in (0, 1))
    first = b.call(ATEN.neg.default, places)  # 400, 400, 800 and 800: then the places are free
    last = b.call(ATEN.neg.default, values)  # 400, 400, 800 and 400
    timeline = simulate(b.module(first, last), UNIT)
    assert [span.live for span in timeline.spans] == [1600, 2400, 2000]


def test_views_of_several_parts_keep_one_storage():
    b = Builder()
    x = b.call(ATEN.neg.default, b.input("x", 100))
    parts = b.call(ATEN.split.Tensor, x, 50)
    items = [b.call(operator.getitem, parts, at) for at in (0, 1)]
    ends = [b.call(ATEN.neg.default, item) for item in items]
    timeline = simulate(b.module(*ends), UNIT)
    assert [span.live for span in timeline.spans] == [200, 250, 300]


def test_writes_in_place_make_no_storage():
    b = Builder()
    x = b.input("x", 100)
    y = b.call(ATEN.neg.default, x)
    z = b.call(ATEN.add_.Tensor, y, x)
    timeline = simulate(b.module(z), UNIT)
    assert timeline.peak == 200 and timeline.makespan == 200 + 300


def test_the_input_of_a_message_lives_until_its_wait():
    b = Builder()
    x = b.input("x", 100)
    y = b.call(ATEN.neg.default, x)
    sent = b.send(y)
    z = b.call(ATEN.cat.default, [x, x])  # x, y, the message's and 200: 500
    timeline = simulate(b.module(b.wait(sent), z), UNIT)
    assert timeline.peak == 500


def test_reshape_of_a_dense_tensor_is_a_view_and_of_a_transposed_one_a_copy():
    for transpose, peak in ((False, 200), (True, 300)):
        b = Builder()
        y = b.call(ATEN.neg.default, b.input("x", 10, 10))
        y = b.call(ATEN.t.default, y) if transpose else y
        assert simulate(b.module(b.call(ATEN.reshape.default, y, [100])), UNIT).peak == peak


def test_copies_of_a_node_with_one_fake_value_are_two_storages():
    b = Builder()
    x = b.input("x", 100)
    first, second = (b.call(ATEN.neg.default, x) for _ in range(2))
    second.meta = first.meta
    assert simulate(b.module(first, second), UNIT).peak == 300


def test_inputs_live_to_the_end_unless_the_graph_frees_them():
    b = Builder()
    y = b.call(ATEN.neg.default, b.input("x", 100))
    gm = b.module(b.call(ATEN.cat.default, [b.call(ATEN.neg.default, y)] * 2))
    assert simulate(gm, UNIT).peak == 400
    assert simulate(gm, UNIT, boxed=True).peak == 300


def test_symbolic_sizes_count_by_their_hints():
    gm = make_fx(lambda x: (x + x, x[: x.shape[0] // 2].neg()), tracing_mode="symbolic")(
        torch.empty(24, 2, dtype=torch.uint8)
    )
    (x,) = gm.graph.find_nodes(op="placeholder")
    assert isinstance(x.meta["val"].shape[0], torch.SymInt)
    timeline = simulate(gm, UNIT)
    assert (timeline.makespan, timeline.peak) == (2 * 48 + 2 * 24, 48 + 48 + 24)


def test_a_simulation_under_a_fake_mode_is_the_same():
    mask = tritoncp.create_block_mask(tritoncp.causal(), 1, 1, 512, 512)
    gm = attention_graph(tritoncp.make_plan(mask, world_size=1, rank=0))
    with FakeTensorMode():
        inside = simulate(gm, NVLINK)
    assert inside == simulate(gm, NVLINK)

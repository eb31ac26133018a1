"""Tests of measured tile shapes: precedence of files, look-up for a call, and agreement on rank 0's table."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import multiprocessing
import os
import warnings
from dataclasses import asdict

import pytest
import torch

from tests.multiprocess.ranks import run as on_ranks
from tritoncp import causal, create_block_mask, flex_attention, make_plan
from tritoncp.analysis.jobs import VARIANTS
from tritoncp.kernels import forward_specialised, launch
from tritoncp.kernels.tile_rules import Config
from tritoncp.masks import full_mask
from tritoncp.mods import score_mod
from tritoncp.ops import engine_factory, tile_lookup, tile_tables, tune_on_first_call
from tritoncp.ops.tile_lookup import Call
from tritoncp.ops.tile_tables import Device
from tritoncp.perf.suite.cases import MASKS as CASES
from tritoncp.reference.dense import dense_attention
from tritoncp.tuning.targets import MASKS

H200 = Device("sm_90", "NVIDIA H200")
H100 = Device("sm_90", "NVIDIA H100 80GB HBM3")
CPU = Device("interpreter", "cpu")


def entry(block_m, kernel="forward", mask="causal", head_dim=16, dtype="float32", **more):
    config = asdict(Config(block_m, 32))
    return {"kernel": kernel, "dtype": dtype, "head_dim": head_dim, "mask": mask, "config": config, **more}


@pytest.fixture(autouse=True)
def places(monkeypatch, tmp_path):
    """Make the three folders of tile files, all empty."""
    tile_tables.forget()
    tile_lookup.WARNED_DEVICES.clear()
    tune_on_first_call._ATTEMPTS.clear()
    monkeypatch.setenv("TRITONCP_CONFIG_DIR", str(tmp_path / "given"))
    monkeypatch.setattr(tile_tables, "user_folder", lambda: tmp_path / "user")
    monkeypatch.setattr(tile_tables, "SHIPPED", tmp_path / "shipped")
    yield tmp_path
    tile_tables.forget()


def put(folder, block_m, device=H200, triton=None, **fields):
    path = tile_tables.path_in(folder, device, triton)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"entries": [entry(block_m, **fields)]}))


def configs(device, dtype, dims, mask, score=False):
    """Return the tile options of a call."""
    return tile_lookup.measured_options(device, Call.of(dtype, dims, mask, score))


def blocks(device=H200):
    return {row[0]: row[-1]["BLOCK_M"] for row in json.loads(tile_tables.table(device, "any"))}


def test_the_nearest_place_that_knows_wins(places):
    """Entries are written in ascending precedence: each replaces the previous one."""
    assert blocks() == {}
    weakest_first = [
        ("shipped", H100, None),
        ("user", H100, None),
        ("given", H100, "3.6.0"),
        ("given", H200, "3.6.0"),  # the device itself, with another Triton
        ("shipped", H200, None),
        ("user", H200, None),
        ("given", H200, None),
    ]
    for i, (folder, device, triton) in enumerate(weakest_first):
        put(places / folder, 16 << i % 4, device, triton)
        tile_tables.forget()
        assert blocks() == {"forward": 16 << i % 4}, (folder, device, triton)
    assert blocks(Device("sm_100", "NVIDIA B200")) == {}


def test_a_missing_entry_is_looked_up_in_the_next_folder(places):
    put(places / "given", 16)
    put(places / "user", 64, kernel="dq")
    assert blocks() == {"forward": 16, "dq": 64}


def test_a_dash_looks_nowhere(places, monkeypatch):
    put(places / "user", 16, CPU)
    assert tile_lookup.local_table(torch.device("cpu")) != "[]"
    monkeypatch.setenv("TRITONCP_CONFIG_DIR", "-")
    assert tile_lookup.local_table(torch.device("cpu")) == "[]"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"entries": [{}]}',
        json.dumps({"entries": [entry(48)]}),
        json.dumps({"entries": [entry(32, "odd")]}),
        json.dumps({"entries": [entry(32, head_dim="16")]}),
        json.dumps({"entries": [entry(32, v_head_dim=512)]}),
        json.dumps({"entries": [entry(32, dtype="matmul")]}),
        json.dumps({"entries": [entry(32, mask="round")]}),
        json.dumps({"entries": ["forward"]}),
        json.dumps({"entries": [entry(32, "route")]}),
        json.dumps({"entries": [entry(32) | {"kernel": "route", "config": {"ROUTE": "scenic"}}]}),
        "[" * 100_000,
        '{"entries": [' + '{"a":' * 100_000,
        json.dumps({"entries": [entry(32, mask=["causal"])]}),
        json.dumps({"entries": [entry(32) | {"config": {"BLOCK_M": [[[32]]]}}]}),
        "\udcff",
        f'{{"entries": [{"9" * 5000}]}}',
    ],
    ids=[
        *("torn", "empty", "tile", "kernel", "text", "wide", "dtype", "mask", "word", "no route", "route"),
        *("brackets", "braces", "list", "nested", "bytes", "digits"),
    ],
)
def test_a_file_that_makes_no_sense_is_named_and_passed_over(places, text):
    put(places / "user", 64)
    path = tile_tables.path_in(places / "given", H200)
    path.parent.mkdir(parents=True)
    path.write_text(text, errors="surrogateescape")
    with pytest.warns(UserWarning, match="given.*not used"):
        assert blocks() == {"forward": 64}


@pytest.mark.parametrize("kind", ["folder", "pipe", "endless", "large"])
def test_unusable_files_are_named_and_skipped(places, kind):
    put(places / "user", 64)
    path = tile_tables.path_in(places / "given", H200, "3.6.0")
    path.parent.mkdir(parents=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        with path.open("w") as file:
            file.truncate(1 << 30)  # takes no room
    with pytest.warns(UserWarning, match="given.*not used"):
        assert blocks() == {"forward": 64}


def test_a_call_goes_on_beside_a_file_that_is_nested_without_end(places):
    path = tile_tables.path_in(places / "given", CPU)
    path.parent.mkdir(parents=True)
    path.write_text("[" * 100_000)
    q = torch.rand(1, 1, 16, 16)
    with pytest.warns(UserWarning, match="given.*not used"):
        out = flex_attention(q, q, q)
    assert out.isfinite().all()


def test_a_mask_that_was_not_measured_takes_the_nearest_that_was(places):
    put(places / "user", 16, CPU)
    cpu = torch.device("cpu")
    for mask, expected in (("causal", 16), ("full", 16), ("interval", 16), ("mod", 16), ("window", None)):
        options = configs(cpu, torch.float32, (16, 16), mask)
        assert dict(dict(options.get("CONFIGS", ())).get("forward", ())).get("BLOCK_M") == expected
        hash(options.get("CONFIGS"))  # a key of caches
    assert configs(cpu, torch.float32, (32, 32), "causal") == {}
    assert configs(cpu, torch.bfloat16, (16, 16), "causal") == {}


def test_a_score_mod_that_loads_for_each_score_uses_only_entries_of_its_kind(places):
    """The rule has tiles for this case, in which the standard tiles spill registers."""
    cpu = torch.device("cpu")
    heavy = entry(64, score="mine:table") | {"loads": 2}
    tile_tables.write(places / "user", CPU, [entry(16), entry(32, score="softcap")], {})
    assert configs(cpu, torch.float32, (16, 16), "causal", 2) == {}
    tile_tables.write(places / "user", CPU, [heavy], {})
    for score, block in ((0, 16), (1, 32), (2, 64)):
        tiles = dict(configs(cpu, torch.float32, (16, 16), "causal", score)["CONFIGS"])
        assert dict(tiles["forward"])["BLOCK_M"] == block
    slopes, table = torch.rand(2), torch.rand(2, 64)
    kinds = (None, lambda s, b, h, q, kv: s * slopes[h], lambda s, b, h, q, kv: s + table[h, q - kv + 32])
    for score, mod in enumerate(kinds):
        translated = mod and score_mod(mod)
        digest = translated and translated.digest
        assert engine_factory.score_kind(engine_factory.Spec(digest, None, (), (), False, None)) == score


def test_entries_with_a_score_mod_and_a_value_dim_precede_the_nearest(places):
    """Entries are written in ascending precedence: each replaces the previous one. Calls without a score_mod
    never use entries that were measured with one."""
    cpu, entries = torch.device("cpu"), []

    def lookups(*, score, dims=(16, 8), mask="causal"):
        options = configs(cpu, torch.float32, dims, mask, score=score)
        return dict(dict(options.get("CONFIGS", ())).get("forward", ())).get("BLOCK_M")

    weakest_first = [
        {"mask": "full"},
        {"mask": "causal"},
        {"mask": "full", "v_head_dim": 8},
        {"mask": "causal", "v_head_dim": 8},
        {"mask": "full", "score": "softcap"},
        {"mask": "causal", "score": "softcap"},
        {"mask": "full", "score": "softcap", "v_head_dim": 8},
        {"mask": "causal", "score": "softcap", "v_head_dim": 8},
    ]
    for i, lookup_key in enumerate(weakest_first):
        entries.append(entry(16 << i % 4, **lookup_key))
        tile_tables.write(places / "user", CPU, entries[-1:], {})
        assert lookups(score=True) == 16 << i % 4, lookup_key
        assert lookups(score=False) == 16 << min(i, 3) % 4
    assert lookups(score=True, dims=(16, 16)) == 16 << 5 % 4
    assert lookups(score=False, dims=(8, 16)) == 16 << 1 and lookups(score=True, dims=(8, 8)) is None
    tile_tables.write(places / "user", CPU, [entry(128, mask="causal", score="alibi")], {})
    assert lookups(score=True, dims=(16, 16)) == 128, "one score_mod stands for all: the last"


def test_an_untuned_gpu_causes_one_warning_with_the_command(monkeypatch):
    monkeypatch.setattr(tile_tables, "device_of", lambda device: H200)
    gpu = torch.device("cuda", 0)
    with pytest.warns(UserWarning, match=r"NVIDIA H200 \(sm_90\).*`tritoncp autotune --preset"):
        assert configs(gpu, torch.bfloat16, (128, 128), "causal") == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert configs(gpu, torch.bfloat16, (64, 64), "full") == {}
    tile_lookup.WARNED_DEVICES.clear()
    monkeypatch.setenv("TRITONCP_CONFIG_DIR", "-")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert configs(gpu, torch.bfloat16, (128, 128), "causal") == {}


def test_a_call_without_a_matching_entry_causes_a_warning(places, monkeypatch):
    """A shipped entry for one shape does not suppress the warning for other shapes."""
    monkeypatch.setattr(tile_tables, "device_of", lambda device: H200)
    gpu = torch.device("cuda", 0)
    put(places / "shipped", 64, head_dim=64, dtype="bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert configs(gpu, torch.bfloat16, (64, 64), "causal")
    with pytest.warns(UserWarning, match=r"nothing like this call.*--shapes of your model"):
        assert configs(gpu, torch.bfloat16, (128, 128), "causal") == {}


def test_writing_replaces_entries_with_the_same_key_only(places):
    folder = places / "user"
    tile_tables.write(folder, H200, [entry(16), entry(32, "dq")], {"code": "a"})
    path = tile_tables.write(folder, H200, [entry(64)], {"code": "b"})
    assert blocks() == {"forward": 64, "dq": 32}
    document = json.loads(path.read_text())
    assert (document["device"], document["arch"], document["code"]) == (
        "NVIDIA H200",
        "sm_90",
        "b",
    ) and document["triton"]
    assert {left.name for left in path.parent.iterdir()} == {path.name, f"{path.name}.lock"}
    assert list(tile_tables.sources(H200)) == [path], "a lock is no table"


FORK = multiprocessing.get_context("fork")
WRITERS, WRITES = 8, 20


def write_many(folder, first, start):
    start.wait()
    for head_dim in range(first, first + WRITES):
        tile_tables.write(folder, H200, [entry(16, head_dim=head_dim)], {})


def test_concurrent_writers_lose_no_entry(places):
    start = FORK.Barrier(WRITERS)
    firsts = [1 + i * WRITES for i in range(WRITERS)]
    writers = [FORK.Process(target=write_many, args=(places / "user", first, start)) for first in firsts]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * WRITERS
    written = {line["head_dim"] for line in tile_tables.read(tile_tables.path_in(places / "user", H200))}
    assert written == set(range(1, WRITERS * WRITES + 1))


def hold(path, locked, release):
    with tile_tables.locked(path):
        locked.set()
        release.wait()


def test_a_lock_held_by_another_process_is_an_error(places, monkeypatch):
    path = tile_tables.path_in(places / "user", H200)
    locked, release = FORK.Event(), FORK.Event()
    holder = FORK.Process(target=hold, args=(path, locked, release))
    holder.start()
    assert locked.wait(60)
    monkeypatch.setattr(tile_tables, "LOCK_SECONDS", 0.2)
    with pytest.raises(TimeoutError, match=r"nvidia-h200.*is not written.*\.lock for 0\.2 s.*run again"):
        tile_tables.write(places / "user", H200, [entry(16)], {})
    assert not path.exists()
    holder.kill()  # its lock ends with it
    holder.join()
    tile_tables.write(places / "user", H200, [entry(16)], {})
    assert blocks() == {"forward": 16}


def test_a_filesystem_without_locks_is_an_error_with_a_remedy(places, monkeypatch):
    def refuse(fd, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match=r"cannot be locked \(No locks available\).*TRITONCP_CONFIG_DIR"):
        tile_tables.write(places / "user", H200, [entry(16)], {})


def test_a_folder_that_cannot_be_created_is_an_error_with_a_remedy(places):
    (places / "user").write_text("")
    with pytest.raises(OSError, match=r"is not written.*make the folder writable.*TRITONCP_CONFIG_DIR"):
        tile_tables.write(places / "user", H200, [entry(16)], {})


# -- calls ---------------------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch):
    """Record (kernel, BLOCK_M) of every launch."""
    launches = []
    original = launch.Launch.__call__

    def call(self):
        launches.append((self.kernel.__name__.removesuffix("_kernel"), self.config.BLOCK_M))
        return original(self)

    monkeypatch.setattr(launch.Launch, "__call__", call)
    return launches


def attend(mask, score=None, call=flex_attention, **options):
    q, k, v = torch.randn(3, 1, 1, 40, 16).unbind()
    q.requires_grad_()
    out = call(q, k, v, score, mask, kernel_options=options or None)
    out.sum().backward()
    mask_of_call = create_block_mask(mask, 1, 1, 40, 40)
    torch.testing.assert_close(out, dense_attention(q, k, v, mask_of_call, score).out, atol=2e-6, rtol=1e-5)


def test_calls_use_measured_tiles_and_options_override_them(places, launched):
    put(places / "user", 16, CPU)
    attend(causal())
    assert dict(launched)["forward"] == 16 and dict(launched)["dq"] == 128
    launched.clear()
    attend(causal(), fwd_BLOCK_M=64)
    assert dict(launched)["forward"] == 64


def test_calls_with_a_score_mod_and_fused_ones_take_their_own(places, launched):
    measured = [entry(16), entry(64, score="softcap"), entry(32, "fused", score="alibi")]
    tile_tables.write(places / "user", CPU, measured, {})

    def doubled(score, b, h, q, kv):
        return score * 2

    attend(causal())
    assert dict(launched)["forward"] == 16
    attend(causal(), doubled)
    assert dict(launched)["forward"] == 64 and dict(launched)["dkdv"] == 128
    compiled = torch.compile(flex_attention, backend="eager", fullgraph=True)
    launched.clear()
    attend(causal(), doubled, compiled, FUSED_BACKWARD=True)
    assert dict(launched) == {"forward": 64, "delta": 64, "dkdv": 32}


ROUTED = {"kernel": "route", "config": {"ROUTE": "specialised", **asdict(Config(64, 32))}}


def test_a_route_applies_only_to_calls_equal_to_the_measured_one(places):
    """A route was verified only for its call, device and Triton version."""

    def look_up(**changes):
        call = {"dtype": torch.float32, "dims": (16, 16), "mask": "causal"} | changes
        options = configs(torch.device("cpu"), **call)
        return dict(options.get("CONFIGS", ())).get("route")

    tile_tables.write(places / "user", CPU, [entry(16), entry(16, head_dim=32), entry(16) | ROUTED], {})
    assert look_up() == (("ROUTE", "specialised"),)
    other_calls = [{"mask": "full"}, {"mask": "interval"}, {"dims": (16, 8)}, {"score": True}]
    assert not any(look_up(**other) for other in [*other_calls, {"dims": (32, 32)}, {"dtype": torch.float16}])
    won = {"kernel": "route", "config": {"ROUTE": "loops", **asdict(Config(64, 32))}}
    tile_tables.write(places / "given", CPU, [entry(16) | won], {})
    assert look_up() is None and configs(torch.device("cpu"), torch.float32, (16, 16), "causal")
    for path in places.glob("*/*/*.json"):
        path.unlink()
    for device, triton in ((CPU, "3.6.0"), (Device("interpreter", "another"), None)):
        tile_tables.write(places / "user", device, [entry(16), entry(16) | ROUTED], {}, triton)
        assert look_up() is None and tile_lookup.local_table(torch.device("cpu")) != "[]"


@pytest.fixture
def kernels(launched):
    """Return the kernels of one forward pass."""

    def run(rows=128, **options):
        launched.clear()
        q, k, v = torch.randn(1, 1, rows, 16), *torch.randn(2, 1, 1, 128, 16).unbind()
        mask = create_block_mask(lambda b, h, q, kv: q + 128 - rows >= kv, 1, 1, rows, 128, BLOCK_SIZE=64)
        out = flex_attention(q, k, v, mask, kernel_options=options or None)
        torch.testing.assert_close(out, dense_attention(q, k, v, mask).out, atol=2e-6, rtol=1e-5)
        return [kernel for kernel, _ in launched]

    return run


def test_calls_use_the_measured_route_if_it_is_available(places, kernels, monkeypatch):
    """Only calls that request a route warn about it."""
    loops, both = ["forward"], ["forward", "specialised"]
    tile_tables.write(places / "user", CPU, [entry(64) | ROUTED | {"mask": "interval"}], {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels() == loops, "the state between its launches would take too long"
        monkeypatch.setattr(forward_specialised, "STATE_SHARE", math.inf)
        assert kernels() == both
        for options in ({"ROUTE": "loops"}, {"PACK_GQA": True}, {"BLOCK_N": 32}, {"rows": 64}):
            assert kernels(**options) == loops, options
        assert kernels(SPLIT_KV=2) == [*loops, "combine"]
        gluon = ROUTED["config"] | {"ROUTE": "gluon"}
        tile_tables.write(
            places / "user", CPU, [entry(64) | ROUTED | {"mask": "interval", "config": gluon}], {}
        )
        assert kernels() == loops and kernels(ROUTE="specialised") == both
    with pytest.raises(ValueError, match="cannot be interpreted"):
        kernels(ROUTE="gluon")


def test_few_rows_use_their_entry_for_every_mask(places):
    """A process with no other entries is warned to tune."""
    tile_tables.write(places / "user", CPU, [entry(64, "few", mask="full")], {})
    for mask in ("full", "causal", "interval", "mod", "window"):
        options = configs(torch.device("cpu"), torch.float32, (16, 16), mask)
        assert dict(dict(options["CONFIGS"])["few"])["BLOCK_M"] == 64
        assert not tile_lookup.has_pass_tiles(options["CONFIGS"])


def test_the_rule_serves_where_nothing_was_measured(launched):
    attend(causal())
    assert dict(launched)["forward"] == 128


def test_rank_0_chooses_for_all(places, launched, monkeypatch):
    """Ranks have different files, rank 2 none; every rank launches rank 0's tiles."""
    for rank, block in enumerate((16, 64)):
        put(places / str(rank), block, CPU)
        put(places / str(rank), 32, CPU, triton="0.0", kernel="dq")

    def work(group):
        monkeypatch.setenv("TRITONCP_CONFIG_DIR", str(places / str(group.rank())))
        mask = create_block_mask(causal(), 1, 1, 48, 48, BLOCK_SIZE=16)
        plan = make_plan(mask, group)
        x = torch.randn(1, 1, plan.s_local, 16, requires_grad=True)
        flex_attention(x, x, x, plan, group).sum().backward()
        own = tile_lookup.local_table(torch.device("cpu"))
        return (
            own,
            tile_lookup.table_text(torch.device("cpu"), group),
            {m for kernel, m in launched if kernel == "forward"},
        )

    results = on_ranks(3, work)
    own, used, forward = zip(*results)
    assert len(set(own)) == 3 and set(used) == {own[0]}
    assert set().union(*forward) == {16}


def test_ranks_that_have_the_same_send_nothing(places, monkeypatch):
    """Digests are part of an exchange that happens anyway; only different tables cost another exchange."""
    put(places / "given", 16, CPU)
    put(places / "other", 32, CPU)

    def work(group, differ):
        if differ and group.rank():
            monkeypatch.setenv("TRITONCP_CONFIG_DIR", str(places / "other"))
        count = []
        original = tile_lookup.collectives.exchange
        monkeypatch.setattr(
            tile_lookup.collectives, "exchange", lambda *words: count.append(1) or original(*words)
        )
        mask = create_block_mask(causal(), 1, 1, 48, 48, BLOCK_SIZE=16)
        return [make_plan(mask, group) and len(count) for _ in range(2)]

    assert on_ranks(2, work, False) == [[1, 2]] * 2
    assert on_ranks(2, work, True) == [[2, 3]] * 2


def test_written_kinds_equal_looked_up_kinds() -> None:
    """The kind of a written target equals the kind of its mask at look-up."""
    for name, (kind, variant) in MASKS.items():
        closed = CASES[name].closed(512)
        mask = full_mask(512, 512) if closed is None else create_block_mask(closed, 1, 1, 512, 512)
        assert tile_lookup.kind_of(mask) == kind and variant in VARIANTS

"""Tests of files of measured tile shapes: precedence, look-up, unusable files, concurrent writers."""

from __future__ import annotations

import json
import multiprocessing
import warnings

import pytest
import torch

from tests.measured_tiles.measured_tiles import CPU, H100, H200, USER, configs, entry, places, put
from tritoncp.call import engine_factory
from tritoncp.measured_tiles import tile_lookup, tile_tables
from tritoncp.measured_tiles.tile_tables import Device
from tritoncp.mods import score_mod

__all__ = ["places"]  # fixture


def blocks(device=H200):
    return {key[0]: config["BLOCK_M"] for key, config in tile_tables.table(device, "any").items()}


def test_the_nearest_file_with_an_entry_wins(places):
    """Files are written in ascending precedence: each replaces the previous one."""
    assert blocks() == {}
    weakest_first = [
        ("shipped", H100, None),
        (USER, H100, None),
        ("given", H100, "3.6.0"),
        ("given", H200, "3.6.0"),  # the device itself, with another Triton
        ("shipped", H200, None),
        (USER, H200, None),
        ("given", H200, None),
    ]
    for i, (folder, device, triton) in enumerate(weakest_first):
        put(places / folder, 16 << i % 4, device, triton)
        tile_tables.forget()
        assert blocks() == {"forward": 16 << i % 4}, (folder, device, triton)
    assert blocks(Device("sm_100", "NVIDIA B200")) == {}
    put(places / USER, 64, kernel="dq")
    tile_tables.forget()
    assert blocks() == {"forward": 16 << 6 % 4, "dq": 64}


def test_a_dash_as_folder_reads_no_file(places, monkeypatch):
    put(places / USER, 16, CPU)
    assert tile_lookup.local_table(torch.device("cpu"))
    monkeypatch.setenv("TRITONCP_CONFIG_DIR", "-")
    assert not tile_lookup.local_table(torch.device("cpu"))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"entries": [{}]}',
        json.dumps({"entries": [entry(48)]}),
        json.dumps({"entries": [entry(32, dtype="matmul")]}),
        json.dumps({"entries": [entry(32) | {"kernel": "route", "config": {"ROUTE": "scenic"}}]}),
        json.dumps({"entries": [entry(32, mask=["causal"])]}),
        json.dumps({"entries": [entry(32) | {"config": {"BLOCK_M": [[[32]]]}}]}),
        "[" * 100_000,
        "\udcff",
        f'{{"entries": [{"9" * 5000}]}}',
    ],
    ids=["torn", "empty", "tile", "dtype", "route", "list", "nested", "brackets", "bytes", "digits"],
)
@pytest.mark.bar(24)
def test_an_invalid_file_is_named_and_skipped(places, text):
    put(places / USER, 64)
    path = tile_tables.path_in(places / "given", H200)
    path.parent.mkdir(parents=True)
    path.write_text(text, errors="surrogateescape")
    with pytest.warns(UserWarning, match="given.*ignored"):
        assert blocks() == {"forward": 64}


def test_a_mask_that_was_not_measured_uses_tiles_of_the_nearest_kind(places):
    put(places / USER, 16, CPU)
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
    tile_tables.write(places / USER, CPU, [entry(16), entry(32, score="softcap")], {})
    assert configs(cpu, torch.float32, (16, 16), "causal", 2) == {}
    tile_tables.write(places / USER, CPU, [heavy], {})
    for score, block in ((0, 16), (1, 32), (2, 64)):
        tiles = dict(configs(cpu, torch.float32, (16, 16), "causal", score)["CONFIGS"])
        assert dict(tiles["forward"])["BLOCK_M"] == block
    slopes, table = torch.rand(2), torch.rand(2, 64)
    kinds = (None, lambda s, b, h, q, kv: s * slopes[h], lambda s, b, h, q, kv: s + table[h, q - kv + 32])
    for score, mod in enumerate(kinds):
        assert engine_factory.score_kind(mod and score_mod(mod)) == score


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
        tile_tables.write(places / USER, CPU, entries[-1:], {})
        assert lookups(score=True) == 16 << i % 4, lookup_key
        assert lookups(score=False) == 16 << min(i, 3) % 4
    assert lookups(score=True, dims=(16, 16)) == 16 << 5 % 4
    assert lookups(score=False, dims=(8, 16)) == 16 << 1 and lookups(score=True, dims=(8, 8)) is None
    tile_tables.write(places / USER, CPU, [entry(128, mask="causal", score="alibi")], {})
    assert lookups(score=True, dims=(16, 16)) == 128, "one score_mod stands for all: the last"


def test_an_untuned_gpu_causes_one_warning_with_the_command(places, gpus, monkeypatch):
    """An entry for one shape does not suppress the warning for other shapes."""
    gpus("sm_90")
    gpu = torch.device("cuda", 0)
    put(places / "shipped", 64, head_dim=64, dtype="bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert configs(gpu, torch.bfloat16, (64, 64), "causal")
        with pytest.warns(UserWarning, match=r"NVIDIA H200 \(sm_90\).*`tritoncp autotune --preset"):
            assert configs(gpu, torch.bfloat16, (128, 128), "causal") == {}
        assert configs(gpu, torch.bfloat16, (96, 96), "full") == {}
        tile_lookup.WARNED_DEVICES.clear()
        monkeypatch.setenv("TRITONCP_CONFIG_DIR", "-")
        assert configs(gpu, torch.bfloat16, (128, 128), "causal") == {}


def test_writing_replaces_entries_with_the_same_key_only(places):
    folder = places / USER
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


@pytest.mark.long
@pytest.mark.bar(24)
def test_concurrent_writers_lose_no_entry(places):
    start = FORK.Barrier(WRITERS)
    firsts = [1 + i * WRITES for i in range(WRITERS)]
    writers = [FORK.Process(target=write_many, args=(places / USER, first, start)) for first in firsts]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * WRITERS
    written = {line["head_dim"] for line in tile_tables.read(tile_tables.path_in(places / USER, H200))}
    assert written == set(range(1, WRITERS * WRITES + 1))


def hold(path, locked, release):
    with tile_tables.locked(path, 60):
        locked.set()
        release.wait()


def test_a_lock_held_by_another_process_is_an_error(places, monkeypatch):
    path = tile_tables.path_in(places / USER, H200)
    locked, release = FORK.Event(), FORK.Event()
    holder = FORK.Process(target=hold, args=(path, locked, release))
    holder.start()
    assert locked.wait(60)
    monkeypatch.setattr(tile_tables, "LOCK_SECONDS", 0.2)
    with pytest.raises(TimeoutError, match=r"nvidia-h200.*is not written.*\.lock for 0\.2 s.*run again"):
        tile_tables.write(places / USER, H200, [entry(16)], {})
    assert not path.exists()
    holder.kill()  # the lock is released when the process ends
    holder.join()
    tile_tables.write(places / USER, H200, [entry(16)], {})
    assert blocks() == {"forward": 16}


def test_a_folder_that_cannot_be_created_is_an_error_with_a_remedy(places):
    (places / USER).parent.mkdir()
    (places / USER).write_text("")
    with pytest.raises(OSError, match=r"is not written.*make the folder writable.*TRITONCP_CONFIG_DIR"):
        tile_tables.write(places / USER, H200, [entry(16)], {})

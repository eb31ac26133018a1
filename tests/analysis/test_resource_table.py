"""`tritoncp inspect`: the shipped table, the regressions it reports, and its reading of machine code."""

import json
import re
from dataclasses import asdict
from typing import Any

import pytest
from click.testing import CliRunner

from tritoncp.analysis import disassembly, resource_table
from tritoncp.analysis.disassembly import (
    Instruction,
    gcn,
    innermost,
    products,
    ptx,
    sass,
)
from tritoncp.analysis.kernel_digest import read_syntax
from tritoncp.analysis.throughput_bound import MACHINES, bound, cycles
from tritoncp.cli import main
from tritoncp.kernels.tile_rules import Config
from tritoncp.ops import tile_tables

UNITS = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "v_mfma"}
TABLE = list(resource_table.read_table().values())
PASSES = [row for row in TABLE if row["kernel"] not in ("delta", "combine") and row["dtype"] != "float32"]
RULES = [row for row in PASSES if "source" not in row]  # without measured tiles
LISTED = [*resource_table.shipped(), *resource_table.measured()]


def test_the_table_has_a_row_for_all_that_is_shipped_and_no_other() -> None:
    assert [resource_table.key(row) for row in TABLE] == [resource_table.key(vars(job)) for job in LISTED]


def test_the_table_was_made_from_the_kernels_and_tiles_that_are_here(monkeypatch, tmp_path) -> None:
    """Remedy for a failure: run ``tritoncp inspect --update`` and commit the table."""
    assert resource_table.stale(LISTED, 1) == []
    older = tmp_path / "resources.json"
    resource_table.write([TABLE[0], TABLE[1] | {"digest": "of another kernel"}], older)
    monkeypatch.setattr(resource_table.read_table, "__defaults__", (older,))
    assert resource_table.stale(resource_table.shipped()[:3], 1) == resource_table.shipped()[1:3]


def test_a_digest_is_of_code_not_of_what_is_said_about_it() -> None:
    def plain() -> Any:
        def f(x: int) -> int:
            return x + 1

        return f

    def explained() -> Any:
        def f(x: int) -> int:
            """One more."""
            # for everyone
            return x + 1

        return f

    def changed() -> Any:
        def f(x: int) -> int:
            return x + 2

        return f

    one, same, other = (read_syntax(make_function()) for make_function in (plain, explained, changed))
    assert one == same != other


def test_what_the_table_promises_is_what_may_be_shipped() -> None:
    """No spill, no more shared memory than there is, and matrix units."""
    for row in TABLE:
        assert row["shared_bytes"] <= MACHINES[row["arch"]].block
        assert row["spill_bytes"] == 0, resource_table.key(row)
    for row in PASSES:
        assert 0 < row["bound"] <= row["overlap"] <= 1 and row["limit"]
        assert row["loop_spills"] == 0
        assert resource_table.families(row["mma"]) == UNITS[row["arch"]], resource_table.key(row)


def test_no_kernel_multiplies_more_than_its_tile() -> None:
    """FLOPs issued in the loop are those of the tile, over the pieces that the head dim is cut into. Where
    there are few rows, loads are the limit, not products."""
    many = [row for row in RULES if row["variant"] not in ("few", "decode")]
    assert [resource_table.key(row) for row in many if row["flops"] != 1] == []


def test_which_kernels_for_hopper_are_bounded_above_torchs() -> None:
    """Compare bounds of copies by descriptor with torch's, with and without descriptors: with the window,
    intervals and state that tritoncp's kernels keep in registers too; with a mask_mod, which torch's other
    loop also has, with torch's defaults. dQ of 256 channels overlaps exponentials with products for every
    mask but the mask_mod; without a score_mod dQ of 128 equals torch's, which copies by other means: every
    alternative that was tried is equal too, or needs four warps. tritoncp's kernels also clamp probabilities
    at 1, one instruction for each."""
    rows = [row for row in RULES if resource_table.flex(row) and row["variant"] in resource_table.MASKS]
    assert len(rows) == 54
    behind = {}
    for row in rows:
        default, with_tma = resource_table.flex(row)
        beaten = default if row["variant"] == "mask_mod" else max(default, with_tma)
        if row["bound"] <= beaten:
            behind[row["kernel"], row["head_dim"], row["variant"]] = row["bound"] - beaten
    equal_kernels = {("dq", 128, mask) for mask in ("full", "causal", "documents", "mask_mod")}
    assert set(behind) == {("dq", 256, "mask_mod"), *equal_kernels}
    assert min(behind[kernel_key] for kernel_key in equal_kernels) > -0.02 and min(behind.values()) > -0.04


def test_forward_for_hopper_has_the_tiles_that_it_should() -> None:
    rows = [row for row in RULES if resource_table.flex(row) and row["variant"] in resource_table.MASKS]
    for row in rows:
        if row["kernel"] == "forward" and row["head_dim"] == 128:
            assert row["config"]["BLOCK_M"] >= 128 and row["config"]["BLOCK_N"] >= 128 and row["tma"] > 0


def test_copies_are_where_the_config_says() -> None:
    for row in TABLE:
        assert (row["tma"] > 0) == row["config"]["USE_TMA"]
        assert row["tma"] == 0 or row["arch"] in ("sm_90", "sm_100")
    assert not any(row["tma"] for row in TABLE if row["variant"] == "pointers")


def test_bounds_that_fall_and_units_that_are_lost_are_named() -> None:
    was = next(row for row in PASSES if row["arch"] == "sm_90")
    assert resource_table.find_regressions(was, was) == []
    assert resource_table.find_regressions(was | {"bound": was["bound"] * 0.98}, was) == []
    for change, said in (
        ({"bound": was["bound"] * 0.96}, "bound"),
        ({"flops": 2.0}, "issues 2.0 times"),
        ({"spill_bytes": 8}, "8 spilled bytes, before 0"),
        ({"loop_spills": 2}, "2 spills in the loop"),
        ({"touched": 3}, "3 instructions touch registers of products"),
        ({"shared_bytes": 300_000}, "300000 bytes of shared memory, there are 232448"),
        ({"mma": {"HMMA.16816": 3}}, "by HMMA, before by HGMMA"),
        ({"failed": "it broke"}, "it broke"),
    ):
        assert any(said in line for line in resource_table.find_regressions(was | change, was)), said
    assert resource_table.find_regressions(was | {"tma": 0}, was | {"tma": 4}) == ["no TMA any more"]
    parts = next(row for row in PASSES if row["kernel"] == "specialised" and row["arch"] == "sm_100")
    parts |= {"warps": 12, "hidden": 1.0}
    assert resource_table.find_regressions(parts, parts) == []
    for change, said in (
        ({"warps": 4}, "the compiler has not specialised its warps"),
        ({"hidden": 0.0}, "no warp issues products ahead of the softmax"),
        ({"tensor_columns": 608}, "608 columns of tensor memory, there are 512"),
    ):
        assert resource_table.find_regressions(parts | change, parts) == [said]
    assert resource_table.find_regressions(was, None) == [
        "not in the table: tritoncp inspect --update writes it"
    ]


def test_writing_rows_leaves_the_others_alone(tmp_path) -> None:
    path = tmp_path / "configs/resources.json"
    resource_table.write(TABLE[:3], path)
    resource_table.write([TABLE[1] | {"registers": 7}], path)
    assert list(resource_table.read_table(path).values()) == [TABLE[0], TABLE[1] | {"registers": 7}, TABLE[2]]


def test_the_command_compares_and_says_what_is_worse(monkeypatch, tmp_path) -> None:
    """Compile one kernel; the table has better figures for it."""
    words = ["inspect", "--arch", "gfx942", "--kernel", "dkdv", "--head-dim", "64", "--mask", "full"]
    done = CliRunner().invoke(main, [*words, "--json", "--check"])
    (row,) = json.loads(done.stdout)
    assert done.exit_code == 0, done.output
    needed = "kernel arch head_dim dtype config registers spill_bytes shared_bytes mma tma bound"
    assert set(needed.split()) <= set(row)
    better = tmp_path / "resources.json"
    resource_table.write([row | {"bound": 0.99}], better)
    monkeypatch.setattr(resource_table.read_table, "__defaults__", (better,))
    done = CliRunner().invoke(main, [*words, "--check"])
    assert done.exit_code == 1 and "before 0.990" in done.stderr and "v_mfma" in done.stdout


def test_tiles_that_are_shipped_as_measured_are_listed_judged_and_kept(monkeypatch, tmp_path) -> None:
    """A forward pass whose tiles waste nothing, and a dK/dV that spills: compiled, shown, and named."""
    folder = tmp_path / "configs"
    good, bad = Config(64, 64, 4, 2, False, True), Config(128, 128, 4, 2)
    entry_key = {"dtype": "bfloat16", "head_dim": 64, "mask": "interval"}
    entries = [
        entry_key | {"kernel": "forward", "config": asdict(good)},
        entry_key | {"kernel": "dkdv", "config": asdict(bad), "v_head_dim": 128, "score": "softcap"},
        entry_key | {"kernel": "few", "config": asdict(good), "mask": "full"},
        entry_key
        | {"kernel": "route", "config": {"ROUTE": "gluon", **asdict(Config(128, 64, 4, 2, False, True))}},
    ]
    tile_tables.write(folder, tile_tables.Device("sm_90", "NVIDIA H200"), entries, {}, "3.7.1")
    jobs = resource_table.measured(["sm_80", "sm_90"], folder)
    named = ("forward", "documents"), ("forward", "state"), ("dkdv", "documents"), ("dkdv", "state")
    named += ("few", "few"), ("few", "decode"), ("gluon", "documents"), ("gluon", "state")
    assert [(job.kernel, job.variant) for job in jobs] == list(named)
    assert len({resource_table.key(vars(job)) for job in [*LISTED, *jobs]}) == len(LISTED) + len(jobs)
    monkeypatch.setattr(resource_table.measured, "__defaults__", (resource_table.ARCHS, folder))
    compiled = [job for job in jobs if job.variant == "state" and job.kernel in ("dkdv", "gluon")]
    rows = {row["kernel"]: row for row in resource_table.inspect_jobs(compiled, 1, 300)}
    assert rows["gluon"]["config"] == asdict(Config(128, 64, 4, 2, False, True))
    assert resource_table.find_regressions(rows["gluon"], None) == [
        "not in the table: tritoncp inspect --update writes it"
    ]
    worse = rows["dkdv"]
    assert (
        worse["spill_bytes"] > 0
        and worse["source"] == "nvidia-h200-triton-3.7.1 dkdv interval 64x128 softcap"
    )
    assert resource_table.find_regressions(worse, worse | {"spill_bytes": 0, "loop_spills": 0})
    table = tmp_path / "resources.json"
    resource_table.write([TABLE[0], *rows.values()], table)
    assert (
        len(resource_table.read_table(table)) == 3
        and resource_table.read_table(table)[resource_table.key(worse)]["spill_bytes"]
    )
    tile_tables.write(
        folder,
        tile_tables.Device("sm_90", "NVIDIA H200"),
        [],
        {},
        "3.7.1",
        [tile_tables.entry_key(entries[1])],
    )
    resource_table.write([TABLE[0]], table)
    assert len(resource_table.read_table(table)) == 2 and resource_table.key(
        worse
    ) not in resource_table.read_table(table)
    tile_tables.path_in(folder, tile_tables.Device("sm_90", "odd"), "3.7.1").write_text("{")
    with pytest.raises(ValueError, match=r"odd-triton.*is no file of tritoncp autotune"):
        resource_table.measured(["sm_90"], folder)


@pytest.mark.parametrize("words", [["--arch", "h100"], ["--mask", "nonsense"]])
def test_the_command_refuses_what_it_does_not_know(words) -> None:
    assert CliRunner().invoke(main, ["inspect", *words]).exit_code != 0


# -- machine code ----------------------------------------------------------------------------------------


def listing(*lines: str) -> str:
    return "\n".join(f"        /*{16 * i:04x}*/   {line} ;" for i, line in enumerate(lines))


def test_a_wait_at_the_far_end_is_no_loop() -> None:
    """Spins that ptxas puts behind the code jump back into the middle of the loop that they belong to."""
    code = sass(
        listing(
            "MOV R0, R1",
            "HMMA.16816.F32.BF16 R4, R8, R12, R4",  # 0x10: the loop
            "@!P0 BRA 0x70",
            "FADD R1, R2, R3",
            "@P1 BRA 0x10",
            "EXIT",
            "NOP",
            "@P0 BRA 0x30",  # 0x70
            "BRA 0x70",
        )
    )
    (body,) = innermost(code)
    assert [x.op for x in body if x.op != "BRA"] == ["HMMA.16816.F32.BF16", "FADD"] and len(body) == 6


def test_what_a_table_of_jumps_leads_to_is_found() -> None:
    """Specialised warps wait in a loop for their task; each part of the work ends with a jump back."""
    code = sass(
        listing(
            "LDC R2, c[0x2][R3]",  # 0x00: wait
            "BRX R2 -0x20",
            "UTCHMMA gdesc[UR8], gdesc[UR10], tmem[UR6]",  # 0x20: one part
            "@P0 BRA 0x20",
            "BRA 0x00",
            "@P1 BRA 0x70",  # 0x50: another, which may skip
            "FSEL R4, R4, R5",
            "MUFU.EX2 R4, R4",
            "BAR.SYNC.DEFER_BLOCKING 0x2, 0x80",
            "@P0 BRA 0x50",
            "BRA 0x00",
            "EXIT",
        )
    )
    (one,), (other,) = innermost(code), innermost(code, "mufu")
    assert [x.op for x in one] == ["UTCHMMA", "BRA"] and innermost(code, "tensor", "mufu") == [one, other]
    assert [x.op for x in other] == ["BRA", "FSEL", "MUFU.EX2", "BAR.SYNC.DEFER_BLOCKING", "BRA"]
    assert disassembly.shortest(code, other) == [other[0], *other[2:]]
    assert (disassembly.barrier_warps(one), disassembly.barrier_warps(other)) == (1, 4)


def test_the_outer_loop_and_code_behind_an_exit_are_left_out() -> None:
    code = sass(
        listing(
            "MOV R0, R1",
            "IADD3 R0, R0, 1, RZ",  # 0x10: outer
            "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24",  # 0x20: inner
            "@P0 BRA 0x20",
            "@!P1 CALL.REL.NOINC 0x60",  # ptxas's long jump
            "BRA 0x10",
            "EXIT",
            "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24",
            "BRA 0x70",
        )
    )
    assert [len(body) for body in disassembly.loops(code)] == [2, 5]
    assert [len(body) for body in innermost(code)] == [2]


def test_loops_of_labelled_text_may_lie_in_any_order() -> None:
    """The header behind its latch, as LLVM likes to place them."""
    text = """
    bra.uni $L__BB0_3;
$L__BB0_2:
    add.s32 %r1, %r1, 1;
    @%p1 bra $L__BB0_3;
    ret;
$L__BB0_3:                              // header
    mov.b32 %r9, 136381584;
    @%p2 tcgen05.mma.cta_group::1.kind::f16 [ %r5 + 0 ], [ %r4 + 0 ], %rd2, %r9, %p3;
    bra.uni $L__BB0_2;
"""
    (body,) = innermost(ptx(text))
    assert len(body) == 5
    assert products(body) == [disassembly.Product(128, 128, 16, 0, 4096)]


def test_amd_loops() -> None:
    text = "\n".join(
        ["\ts_mov_b32 s0, 0", ".LBB0_1:  ; %loop", "\tv_mfma_f32_32x32x8_bf16 v[0:15], v[16:17], v[18:19], 0",
         "\tv_exp_f32_e32 v1, v1 ; comment", "\ts_cbranch_scc1 .LBB0_1", "\ts_endpgm"]
    )  # fmt: skip
    (body,) = innermost(gcn(text))
    assert disassembly.mix(body) == {"tensor": 1, "mufu": 1, "other": 1}
    spent = cycles(body, products(body), 8, MACHINES["gfx942"])
    assert spent == (64.0, 32.0, 0.0, 0.0)  # 2 waves a scheduler: 2 x 32 cycles of products, 2 x 16 of exp


def test_the_model_gives_the_published_cycles_of_a_hopper_tile() -> None:
    """128 x 128 tiles of 128 channels on 8 warps: 16 wgmma of 64 x 128 x 16 in each of two warpgroups are
    2048 cycles, as 4 * 128 * 128 * 128 FLOPs at 4096 a cycle are; 64 exponentials a thread at 16 a cycle of
    a multiprocessor are 1024."""
    body = sass(
        listing(
            *["HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24"] * 8,
            *["HGMMA.64x128x16.F32.BF16 R24, R152, gdesc[UR8], R24"] * 8,
            *["MUFU.EX2 R1, R1"] * 64,
        )
    )
    spent = cycles(body, products(body), 8, MACHINES["sm_90"])
    assert spent.tensor == 4 * 128**3 / 4096 == 2048
    assert spent.mufu == 128 * 128 / 16 == 1024
    assert spent.issue == 80 * 8 / 4
    assert spent.shared == 2 * (8 * (64 + 128) + 8 * 128) * 16 * 2 / 128
    alone = bound(spent, 8, 255, 160 << 10, MACHINES["sm_90"])
    assert alone.utilisation == round(2048 / 3072, 3) and alone.programs == 1
    two = bound(spent, 8, 128, 100 << 10, MACHINES["sm_90"])
    assert two.utilisation == 1.0 == two.overlap and two.limit == "tensor cores"


def test_every_kind_of_instruction_has_a_pattern_of_its_own() -> None:
    """No pattern shadows another: each kind is found for some name that its own pattern begins with."""
    op_of_kind = {
        "tensor": "HMMA",
        "mufu": "MUFU.EX2",
        "fma": "FFMA2",
        "compare": "FMNMX3",
        "convert": "F2FP",
    }
    op_of_kind |= {"spill": "LDL.64", "memory": "UTMALDG.4D", "barrier": "WARPGROUP.ARRIVE", "integer": "SEL"}
    assert {kind: disassembly.kind_of(op) for kind, op in op_of_kind.items()} == {
        kind: kind for kind in op_of_kind
    }
    assert (
        re.match(disassembly.KINDS["memory"], "LDGDEPBAR") and disassembly.kind_of("LDGDEPBAR") == "barrier"
    )
    assert disassembly.mix([Instruction("R2UR", ""), Instruction("UIADD3", "")]) == {"other": 2}

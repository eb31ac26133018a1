"""The default tiles, compiled for absent GPUs: matrix instructions, no spills, shared memory, all as in the
shipped table."""

import json
from functools import cache
from itertools import product
from typing import Any

import pytest
import triton

from tritoncp.analysis import resource_table
from tritoncp.analysis.compile_pool import Compilers
from tritoncp.analysis.jobs import KERNELS, Job, step_job
from tritoncp.kernels.tile_rules import Config, family

ARCHS = ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942")
MATRIX = {"sm_80": "HMMA", "sm_86": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "v_mfma"}

COPY = ("sm_90", "sm_100")  # by tensor descriptor
# Compiled in every run; tests/analysis/test_resource_table.py compares the digests of the other kernels.
AGAIN = {"sm_80": (128,), "sm_90": (128,), "sm_100": (128,), "gfx942": (128,)}


def compile_jobs(jobs: list[Job]) -> list[dict[str, Any]]:
    """Compile in one process: the suite runs in two already."""
    return list(resource_table.inspect_jobs(jobs, 1, 300))


@cache
def compile_every_run() -> dict[Job, dict[str, Any]]:
    """Compile the jobs of every run of the suite in one process, which takes seconds to start."""
    jobs = [
        job for arch in resource_table.ARCHS for job in default_jobs(arch, "bfloat16", AGAIN[arch], "state")
    ]
    jobs += few_jobs("sm_90", 128) + scored_jobs(*LEARNS)
    with Compilers(1) as compilers:
        return {job: job.fields | report for job, report in compilers.compile_jobs(jobs)}


def default_jobs(arch: str, dtype: str, dims: tuple[int, ...], *variants: str) -> list[Job]:
    return [step_job(name, arch, dim, dtype, mask) for mask in variants for dim in dims for name in KERNELS]


def reports(arch: str, dtype: str, dims: tuple[int, ...], *variants: str) -> list[dict[str, Any]]:
    return compile_jobs(default_jobs(arch, dtype, dims, *variants))


def check(arch: str, rows: list[dict[str, Any]], *, matrix: bool = True, spill: int = 0) -> None:
    bad = [
        row
        for row in rows
        if "failed" in row
        or row["spill_bytes"] > spill
        or row["shared_bytes"] > resource_table.SHARED_BYTES[family(arch)]
        or (matrix and row["kernel"] not in ("delta", "combine", "sums") and row["matrix"] != MATRIX[arch])
    ]
    assert rows and not bad


@pytest.mark.long
@pytest.mark.parametrize("arch", resource_table.ARCHS)
def test_defaults_fit_and_are_what_the_table_says(arch: str) -> None:
    """Tables, intervals, full blocks, state in and out: every loop of every kernel. Another Triton than the
    table's spills what the table lists of it, and loses nothing else."""
    rows = [compile_every_run()[job] for job in default_jobs(arch, "bfloat16", AGAIN[arch], "state")]
    assert len(rows) == len(AGAIN[arch]) * len(KERNELS)
    table = resource_table.read_table(triton=triton.__version__)
    check(arch, rows, spill=max(table[row["name"]]["spill_bytes"] for row in rows))
    if triton.__version__ == json.loads(resource_table.TABLE.read_text())["origin"]["triton"]:
        for row in rows:
            was = table[row["name"]]
            assert {name: row.get(name) for name in was} == was
    else:
        assert not any(resource_table.find_regressions(row, table[row["name"]]) for row in rows)


def test_default_tiles_are_copied_by_descriptor_as_the_table_says() -> None:
    table = resource_table.read_table()
    for arch in resource_table.ARCHS:
        jobs = default_jobs(arch, "bfloat16", (64, 128, 256), "state")
        copied = {(job.head_dim, job.kernel) for job in jobs if table[job.name]["tma"]}
        assert copied == (set(product((64, 128, 256), ("forward", "dq", "dkdv"))) if arch in COPY else set())


def few_jobs(arch: str, *dims: int) -> list[Job]:
    jobs = [step_job(name, arch, dim, variant="few") for dim in dims for name in ("forward", "combine")]
    return jobs + [step_job("forward", arch, dim, variant=m) for dim in dims for m in ("decode", "short")]


@pytest.mark.long
def test_few_rows_fit() -> None:
    """Heads packed into a tile, keys shared by programs that leave states, and the kernel that combines the
    states."""
    rows = [compile_every_run()[job] for job in few_jobs("sm_90", 128)]
    check("sm_90", rows)
    assert [bool(row["tma"]) for row in rows] == [True, False, True, True]


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ARCHS)
def test_few_rows_fit_everywhere(arch: str) -> None:
    check(arch, compile_jobs(few_jobs(arch, 64, 128, 256)))


LEARNS = "sm_90", (128,), ("documents",), "table_learns"


def scored_jobs(arch: str, dims: tuple[int, ...], masks: tuple[str, ...], *scores: str) -> list[Job]:
    """List kernels with named score_mods; worker processes import tests/kernels/support/scores.py."""
    kernels = [name for name in KERNELS if name != "delta"]
    return [
        step_job(
            name,
            arch,
            dim,
            variant=mask,
            score=score if score in ("alibi", "softcap") else f"{__package__}.support.scores:{score}",
        )
        for name, dim, mask, score in product(kernels, dims, masks, scores)
    ]


@pytest.mark.long
def test_score_mods_that_learn_spill_nothing() -> None:
    """Learned captures are loaded and accumulated for each score; dQ once spilled 392 bytes for them."""
    check("sm_90", [compile_every_run()[job] for job in scored_jobs(*LEARNS)])


@pytest.mark.nightly
@pytest.mark.parametrize("arch", resource_table.ARCHS)
def test_score_mods_spill_few_bytes(arch: str) -> None:
    """A few registers, and some kernels more: on sm_80 dK/dV of tables in smaller tiles would cost nearly
    half of the bound; on sm_90 ALiBi of documents takes 169 warp instructions (160 without a spill)."""
    scores = "alibi", "softcap", "table", "table_learns", "bias_learns", "slopes_learn"
    rows = compile_jobs(scored_jobs(arch, (64, 128, 256), ("causal", "documents"), *scores))
    most = {
        **{("sm_80", "dkdv", 128): 40, ("sm_80", "dkdv", 256): 520, ("sm_100", "dq", 256): 80},
        **{("sm_90", "forward", 128): 80, ("sm_90", "dkdv", 128): 72, ("sm_90", "dkdv", 256): 80},
    }
    for row in rows:
        check(arch, [row], spill=most.get((arch, row["kernel"], row["head_dim"]), 24))


@pytest.mark.nightly
def test_no_shipped_kernel_is_worse_than_in_the_table() -> None:
    before = resource_table.read_table(triton=triton.__version__)
    rows = resource_table.inspect_jobs([*resource_table.shipped(), *resource_table.measured()], 2, 300)
    assert [
        line for row in rows for line in resource_table.find_regressions(row, before.get(row["name"]))
    ] == []


@pytest.mark.nightly
@pytest.mark.parametrize("variant", ["state", "documents", "causal", "window", "full"])
def test_defaults_fit_for_head_dims_outside_of_the_table(variant: str) -> None:
    check("sm_86", reports("sm_86", "bfloat16", (64, 128, 256), variant))


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ARCHS)
def test_defaults_fit_odd_dims(arch: str) -> None:
    """There are two pieces of channels. The number of free registers depends on the tiles, so that a few may
    spill."""
    check(arch, reports(arch, "float16", (80, 96, 192), "state", "causal"), spill=64)


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ARCHS)
def test_mask_mods_and_sizes_of_one_may_spill_a_little(arch: str) -> None:
    """A mask_mod's code takes more registers; sizes of one are constants to Triton."""
    check(arch, reports(arch, "bfloat16", (64, 128, 256), "mask_mod", "single", "pair"), spill=128)


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ARCHS)
def test_float32_fits_without_matrix_instructions(arch: str) -> None:
    check(arch, reports(arch, "float32", (64, 128, 256), "state", "causal"), matrix=False, spill=64)


@pytest.mark.long
def test_a_compiler_that_fails_or_hangs_is_reported_and_replaced() -> None:
    good, bad = step_job("delta", "sm_90", 64), step_job("forward", "sm_90", 100_000)
    odd = step_job("forward", "sm_90", 20, config=Config(64, 64, USE_TMA=True))  # 40 bytes of channels
    with Compilers(1) as compilers:
        reports = dict(compilers.compile_jobs([bad, odd, good]))
    assert (
        "failed" in reports[bad]
        and "descriptors" in reports[odd]["failed"]
        and reports[good]["registers"] > 0
    )
    with Compilers(1, timeout=0.01) as compilers:
        late = dict(compilers.compile_jobs([good]))
    assert late == {good: {"failed": "took more than 0.01 s"}}

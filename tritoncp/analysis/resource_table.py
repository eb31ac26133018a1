"""The table ``kernels/configs/resources.json``: resources of every shipped kernel, compiled for absent
GPUs; its stale rows, and regressions against it."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tritoncp.analysis.compile_pool import compile_all
from tritoncp.analysis.jobs import KERNELS, VARIANT_OF_KIND, Job, step_job
from tritoncp.analysis.templates.comparison import comparisons
from tritoncp.analysis.templates.flex import MASKS as COMPARED_MASKS
from tritoncp.analysis.throughput_bound import MACHINES, TENSOR_COLUMNS
from tritoncp.core.checked_json import read_json
from tritoncp.kernels.tile_rules import Config, copies, family, fuses, widest_route
from tritoncp.ops import tile_tables

Row = dict[str, Any]

ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")
TABLE = tile_tables.SHIPPED / "resources.json"
MASKS = ("full", "causal", "window", "documents", "state", "mask_mod")
REGRESSION_TOLERANCE = 0.03  # of a bound, before it counts as lost
RECORDED_FIELDS = (  # of a row, in the table
    *(
        "digest",
        "config",
        "registers",
        "spill_bytes",
        "shared_bytes",
        "tensor_columns",
        "mma",
        "tma",
        "async_copies",
        "loop",
        "masked_loop",
    ),
    *("loop_spills", "programs", "flops", "bound", "overlap", "limit"),
)


def shipped(archs: Iterable[str] = ARCHS) -> list[Job]:
    """List the kernels that are shipped for these architectures: bfloat16 with every kind of mask and for few
    rows, without descriptors where they are the rule, and fused where tiles exist; head dims
    of two pieces, float16 and float32 with the kind that needs the most registers.

    >>> len(shipped(["sm_90"])), len({job.name for job in shipped()})
    (131, 437)
    """
    jobs = []
    for arch in archs:
        passes = [name for name in KERNELS if name != "delta"]
        for dim in (64, 128, 256):
            jobs.append(step_job("delta", arch, dim))
            jobs += [step_job(name, arch, dim, variant=mask) for mask in MASKS for name in passes]
            jobs += [step_job(name, arch, dim, variant="pointers") for name in passes if copies(arch)]
            jobs += [step_job(name, arch, dim, variant="mask_mod_local") for name in passes]
            jobs += [step_job("forward", arch, dim, variant=mask) for mask in ("few", "decode")]
            jobs.append(step_job("combine", arch, dim, variant="few"))
            jobs += [step_job("fused", arch, dim, variant=mask) for mask in ("full", "state") if fuses(arch)]
            if dim <= widest_route(arch, "gluon"):
                jobs += [step_job("gluon", arch, dim, variant=mask) for mask in MASKS if mask != "mask_mod"]
        jobs += [step_job(name, arch, dim) for dim in (96, 192) for name in passes]
        jobs += [step_job(name, arch, 128, "float16") for name in passes]
        jobs += [step_job("gluon", arch, 128, "float16")] if widest_route(arch, "gluon") else []
        jobs += [step_job(name, arch, dim, "float32") for dim in (64, 128, 256) for name in passes]
    return jobs


def measured(archs: Iterable[str] = ARCHS, folder: Path = tile_tables.SHIPPED) -> list[Job]:
    """List the kernels of tiles that are shipped because they were measured: with a mask of their kind, and
    with the variant that needs the most registers. Raises ValueError for a file that cannot be read."""
    jobs = []
    for path in (path for arch in archs for path in sorted((folder / arch).glob("*.json"))):
        for entry in tile_tables.read(path):
            kernel, tiles = tile_tables.kernel_and_tiles(entry["kernel"], entry["config"])
            lookup_key, dim, wide = tile_tables.entry_key(entry), entry["head_dim"], entry.get("v_head_dim")
            words = [path.stem, entry["kernel"], entry["mask"], f"{dim}x{wide}" if wide else ""]
            source, score = " ".join(filter(None, [*words, entry.get("score")])), entry.get("score") or ""
            variants = ("few", "decode") if kernel == "few" else (VARIANT_OF_KIND[lookup_key[4]], "state")
            sizes, config = (path.parent.name, dim, entry["dtype"]), Config(**tiles)
            jobs += [step_job(kernel, *sizes, variant, config, wide, score, source) for variant in variants]
    return jobs


def pick(jobs: Sequence[Job], **criteria: Sequence[Any]) -> list[Job]:
    """Select the jobs with one of these values of each field; no values: any. Raises ValueError for a value
    that no job has, and where no job has all of it.

    >>> [job.name for job in pick(shipped(["sm_90"]), kernel=["delta"], head_dim=[64])]
    ['delta sm_90 d64 bfloat16 state']
    """
    for field, values in criteria.items():
        field_values = dict.fromkeys(str(getattr(job, field)) for job in jobs)
        for value in values:
            if str(value) not in field_values:
                raise ValueError(f"no shipped kernel has {field} {value!r}; known: {', '.join(field_values)}")
    picked = [job for job in jobs if all(getattr(job, f) in v for f, v in criteria.items() if v)]
    if not picked:
        raise ValueError("no shipped kernel is all of that; tritoncp inspect lists them")
    return picked


def key(row: Row) -> tuple[Any, ...]:
    """The key of a row: kernel, arch, head_dim, dtype, variant; then the source of its tiles, unless it is
    the rule."""
    identity = tuple(row[name] for name in ("kernel", "arch", "head_dim", "dtype", "variant"))
    return (*identity, row["source"]) if row.get("source") else identity


def inspect_jobs(jobs: Sequence[Job], processes: int | None, timeout: float) -> Generator[Row]:
    """Compile jobs and yield a row for each as it is done; ``failed`` has the error of a failed
    compilation."""
    with closing(compile_all(jobs, processes, timeout)) as done:
        for job, row in done:
            yield job.identity | row


def read_table(path: Path = TABLE) -> dict[tuple[Any, ...], Row]:
    """Read the committed table."""
    return {key(row): row for row in read_json(path)["rows"]}


def stale(jobs: Sequence[Job], processes: int | None = None) -> list[Job]:
    """List the jobs whose rows in the table are missing, or were made from other kernels, tiles or another
    Triton."""
    before = read_table()
    with closing(compile_all(jobs, processes, 60.0, "digest")) as done:
        current = {job: row.get("digest") for job, row in done}
    recorded = {job: before.get(key(job.identity), {}).get("digest") for job in jobs}
    return [job for job in jobs if current[job] is None or current[job] != recorded[job]]


def write(rows: Iterable[Row], path: Path = TABLE) -> None:
    """Write rows into the table, in place of the rows with the same keys: a line each. Rows of measured tiles
    that are no longer shipped are dropped."""
    import triton

    old = read_table(path) if path.exists() else {}
    fresh = {key(row): {name: row.get(name) for name in RECORDED_FIELDS} for row in rows}
    names = ("kernel", "arch", "head_dim", "dtype", "variant", "source")
    merged = old | {identity: dict(zip(names, identity)) | row for identity, row in fresh.items()}
    order = {key(job.identity): i for i, job in enumerate([*shipped(), *measured()])}
    remaining = [row for identity, row in merged.items() if identity in order or "source" not in row]
    remaining.sort(key=lambda row: order.get(key(row), len(order)))
    lines = ",\n".join(json.dumps(row) for row in remaining)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"triton": "{triton.__version__}", "rows": [\n{lines}\n]}}\n')


def find_regressions(row: Row, before: Row | None) -> list[str]:
    """List a row's regressions against the table, and its violations of the GPU's limits.

    >>> was = {"spill_bytes": 0, "loop_spills": 0, "mma": {"HGMMA.64x128x16": 16}, "tma": 4, "flops": 1.0}
    >>> was |= {"arch": "sm_90", "shared_bytes": 0, "bound": 0.66}
    >>> find_regressions(was | {"mma": {"HMMA.16816": 9}, "tma": 0, "bound": 0.64}, was)
    ['matrix products by HMMA, before by HGMMA', 'no TMA any more', 'bound 0.640, before 0.660']
    """
    if "failed" in row:
        return [row["failed"]]
    limit = MACHINES[family(row["arch"])].block
    regressions = []
    if row["shared_bytes"] > limit:
        regressions.append(f"{row['shared_bytes']} bytes of shared memory, there are {limit}")
    if (row.get("tensor_columns") or 0) > TENSOR_COLUMNS:
        regressions.append(f"{row['tensor_columns']} columns of tensor memory, there are {TENSOR_COLUMNS}")
    if row.get("touched"):
        regressions.append(f"{row['touched']} instructions touch registers of products under way")
    if before is None:
        return [*regressions, "not in the table: tritoncp inspect --update writes it"]
    for name, what in (("spill_bytes", "spilled bytes"), ("loop_spills", "spills in the loop")):
        if (row.get(name) or 0) > (before[name] or 0):
            regressions.append(f"{row[name]} {what}, before {before[name] or 0}")
    units, units_before = families(row["mma"]), families(before["mma"])
    if units != units_before:
        regressions.append(f"matrix products by {units or 'nothing'}, before by {units_before or 'nothing'}")
    if before["tma"] and not row["tma"]:
        regressions.append("no TMA any more")
    if before["bound"] is None or row["bound"] is None:
        return regressions
    if row["flops"] > before["flops"]:
        regressions.append(f"issues {row['flops']} times the FLOPs of its tile, before {before['flops']}")
    if row["bound"] < (1 - REGRESSION_TOLERANCE) * before["bound"]:
        regressions.append(f"bound {row['bound']:.3f}, before {before['bound']:.3f}")
    return regressions


def families(mma: dict[str, int]) -> str:
    """Name the units that multiply matrices, without shapes.

    >>> families({"HGMMA.64x64x16": 2, "HGMMA.64x128x16": 1}), families({"v_mfma_f32_32x32x8_bf16": 48})
    ('HGMMA', 'v_mfma')
    """
    return ", ".join(sorted({name.split(".")[0].split("_f32")[0] for name in mma}))


def flex(row: Row) -> tuple[float, float] | None:
    """The bounds of torch's flex_attention for a row's kernel and mask, at torch's default tiles and at its
    best candidate, if :func:`tritoncp.analysis.templates.comparison.comparisons` has them. Those of a causal
    mask stand for masks that it lacks; for few rows torch has another template."""
    if row["variant"] in ("few", "decode"):
        return None
    mask = row["variant"] if row["variant"] in COMPARED_MASKS else "causal"
    place = comparisons().get((row["kernel"], row["arch"], row["head_dim"], mask))
    if place is None or row["dtype"] != "bfloat16":
        return None
    return place.default["bound"], place.best["bound"]

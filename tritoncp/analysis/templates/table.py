"""The table ``kernels/configs/templates.json``: torch's templates of flex attention at every tile that torch
chooses from, and tritoncp's kernels for the same masks."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tritoncp.analysis import disassembly, throughput_bound
from tritoncp.analysis.compile_pool import compile_all
from tritoncp.analysis.jobs import Job, step_job
from tritoncp.analysis.kernel_digest import read_syntax
from tritoncp.analysis.templates.flex import MASKS, TemplateJob, candidates, write_source
from tritoncp.core.checked_json import read_json
from tritoncp.kernels.tile_rules import widest_route
from tritoncp.ops import tile_tables

Row = dict[str, Any]

TABLE = tile_tables.SHIPPED / "templates.json"
AUTOTUNED = "sm_90"  # torch's candidates for it are in the table, for others its default tiles
HEAD_DIMS = (64, 128, 256)
KERNELS = ("forward", "dq", "dkdv")
KEY = ("source", "kernel", "arch", "head_dim", "mask", "tma", "tile", "warps", "stages")
FIGURES = ("registers", "spill_bytes", "shared_bytes")
LOOP = (
    "loop",
    "masked_loop",
    "loop_spills",
    "serial",
    "mix",
    "cycles",
    "programs",
    "bound",
    "overlap",
    "limit",
)


def template_jobs() -> list[TemplateJob]:
    """List torch's kernels: for sm_90 every candidate of max-autotune, and the default tiles with USE_TMA;
    for sm_80 the default tiles."""
    return [
        job
        for arch, tma in (("sm_90", False), ("sm_80", False), ("sm_90", True))
        for mask in MASKS
        for dim in HEAD_DIMS
        for template in ("forward", "backward")
        for job in candidates(template, arch, dim, mask, tma, autotune=arch == AUTOTUNED and not tma)
    ]


def own_jobs() -> list[Job]:
    """List tritoncp's kernels for the same GPUs, head dims and masks: the default route, and gluon."""
    routes = [(arch, dim, kernel) for arch in ("sm_90", "sm_80") for dim in HEAD_DIMS for kernel in KERNELS]
    routes += [("sm_90", dim, "gluon") for dim in HEAD_DIMS if dim <= widest_route("sm_90", "gluon")]
    return [step_job(kernel, arch, dim, variant=mask) for arch, dim, kernel in routes for mask in MASKS]


def compile_template_rows(
    jobs: Sequence[TemplateJob], processes: int | None = None, timeout: float = 300.0
) -> Iterator[Row]:
    """Compile torch's kernels and yield a row for each of their loops. Raises ValueError for a kernel that
    does not compile."""
    with closing(compile_all(jobs, processes, timeout, "template")) as done:
        for job, report in done:
            _check_report(str(job), report)
            for kernel, loop in report["loops"].items():
                figures = {name: report[name] for name in FIGURES} | {name: loop[name] for name in LOOP}
                yield _identity(job, kernel) | {"default": job.default} | figures


def compile_own(
    jobs: Sequence[Job], processes: int | None = None, timeout: float = 300.0
) -> Iterator[tuple[Row, Row]]:
    """Compile tritoncp's kernels and yield, for each, its row here and its row in the table of resources.
    Raises ValueError for a kernel that does not compile."""
    with closing(compile_all(jobs, processes, timeout)) as done:
        for job, report in done:
            _check_report(job.name, report)
            config = report["config"]
            key = {"source": "tritoncp", "kernel": job.kernel, "arch": job.arch, "head_dim": job.head_dim}
            key |= {"mask": job.variant, "tma": config["USE_TMA"]}
            key |= {"tile": [config["BLOCK_M"], config["BLOCK_N"]]}
            groups = 2 if job.kernel == "gluon" else 1  # that compute; a third copies
            key |= {"warps": groups * config["num_warps"], "stages": config["num_stages"]}
            figures = {name: report[name] for name in (*FIGURES, *LOOP)}
            yield key | {"default": True} | figures, job.identity | report


def _check_report(name: str, report: Mapping[str, Any]) -> None:
    if "failed" in report:
        raise ValueError(f"{name}: {report['failed']}")


def _identity(job: TemplateJob, kernel: str) -> Row:
    key = {"source": "torch", "kernel": kernel, "arch": job.arch, "head_dim": job.head_dim, "mask": job.mask}
    return key | {"tma": job.tma, "tile": list(job.tile(kernel)), "warps": job.warps, "stages": job.stages}


def key(row: Mapping[str, Any]) -> str:
    """The key of a row: its values of KEY, as text."""
    return json.dumps([row[name] for name in KEY])


def stale_templates(rows: Iterable[Row]) -> list[TemplateJob]:
    """List torch's kernels of which the rows lack a loop."""
    present = {key(row) for row in rows}
    loops = {"forward": ("forward",), "backward": ("dq", "dkdv")}
    return [
        job
        for job in template_jobs()
        if any(key(_identity(job, kernel)) not in present for kernel in loops[job.template])
    ]


def stale_own(rows: Iterable[Row], resources: Mapping[tuple[Any, ...], Row]) -> list[Job]:
    """List tritoncp's kernels whose row differs from theirs in the table of resources
    (:func:`tritoncp.analysis.resource_table.read_table`)."""
    names = (*FIGURES, "loop", "masked_loop", "programs", "bound", "limit")

    def figures(row: Row) -> list[Any]:
        return [row.get(name) for name in names]

    own = {
        (row["kernel"], row["arch"], row["head_dim"], row["mask"]): figures(row)
        for row in rows
        if row["source"] == "tritoncp"
    }
    return [
        job
        for job in own_jobs()
        if own.get((job.kernel, job.arch, job.head_dim, job.variant))
        != figures(resources.get((job.kernel, job.arch, job.head_dim, job.dtype, job.variant), {}))
    ]


def read_rows(path: Path = TABLE) -> list[Row]:
    """Read the rows of the committed table."""
    return read_json(path)["rows"]


def is_current(path: Path = TABLE) -> bool:
    """Return whether the rows were made by the installed torch and Triton, and by the code that is here."""
    return path.exists() and read_json(path).get("toolchain") == toolchain()


@functools.cache
def toolchain() -> dict[str, str]:
    """Return the versions that rows depend on, and the hash of torch's source for each template and mask, and
    of the modules that read and bound machine code."""
    import torch
    import triton

    defaults = [job for job in template_jobs() if job.default and (job.arch, job.head_dim) == ("sm_90", 128)]
    sources = [write_source(job) for job in defaults]
    sources += [read_syntax(module)[0] for module in (disassembly, throughput_bound)]
    digest = hashlib.sha256(repr(sources).encode()).hexdigest()[:16]
    return {"torch": torch.__version__.partition("+")[0], "triton": triton.__version__, "digest": digest}


def write_rows(rows: Iterable[Row], path: Path = TABLE) -> None:
    """Write the table, with the rows of jobs that are listed: a line each."""
    merged = {key(row): row for row in rows}
    torch_rows = [_identity(job, kernel) for job in template_jobs() for kernel in _kernels(job)]
    places = {(job.kernel, job.arch, job.head_dim, job.variant): i for i, job in enumerate(own_jobs())}
    own = {}
    for row in merged.values():  # the newest row of each kernel: its tiles may have changed
        if row["source"] == "tritoncp":
            own[row["kernel"], row["arch"], row["head_dim"], row["mask"]] = row
    ordered = [own[place] for place in places if place in own]
    ordered += [merged[key(row)] for row in torch_rows if key(row) in merged]
    lines = ",\n".join(json.dumps(row) for row in ordered)
    path.write_text(f'{{"toolchain": {json.dumps(toolchain())}, "rows": [\n{lines}\n]}}\n')


def _kernels(job: TemplateJob) -> tuple[str, ...]:
    return ("forward",) if job.template == "forward" else ("dq", "dkdv")

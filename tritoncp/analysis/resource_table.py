"""The table ``kernels/configs/resources.json``: registers, spills, ... of every shipped kernel, compiled for
absent GPUs; regressions against it; a run of `tritoncp inspect`, which compiles kernels and shows rows."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Generator, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rich.table import Table

from tritoncp.analysis.compile_pool import Compilers
from tritoncp.analysis.jobs import KERNELS, VARIANT_OF_KIND, Job, step_job
from tritoncp.command_base import make_console
from tritoncp.core.versions import installed_version, minor_of
from tritoncp.kernels.options import ROUTES
from tritoncp.kernels.tile_rules import PASSES, Config, copies, family, fuses, widest_route
from tritoncp.measured_tiles import tile_tables
from tritoncp.perf.progress import Progress

Row = dict[str, Any]

ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")
TABLE = tile_tables.SHIPPED / "resources.json"
MASKS = ("full", "causal", "window", "documents", "state", "mask_mod")  # other routes have no mask_mod
COLUMNS = ("registers", "spill_bytes", "shared_bytes", "matrix", "tma")
WIDE = (320, 384, 448, 512, 576)  # head dims above 256 of shipped rows; 576 with values of 512
SELECTED_WIDE = (512, 576)  # of latent attention, absorbed, without and with its rotary part
KIB = 1 << 10
SHARED_BYTES = {
    **{"sm_80": 163 * KIB, "sm_86": 99 * KIB, "sm_90": 227 * KIB, "sm_100": 227 * KIB},
    "gfx942": 64 * KIB,
}  # max bytes of shared memory of a CTA, by family
TENSOR_COLUMNS = 512  # columns of sm_100's tensor memory
SHOWN = ("kernel", "D", "dtype", "mask", "tiles", "regs", "spill", "shared", "matrix", "TMA")  # headings


def shipped(archs: Iterable[str] = ARCHS) -> list[Job]:
    """List jobs for the shipped kernels of these architectures: bfloat16 with every kind of mask and for few
    query rows, also without descriptors where these are the default, and fused where tiles exist; head dims
    that are split, float16 and float32 with the kind of mask that needs the max number of registers.

    >>> len(shipped(["sm_90"])), len({job.name for job in shipped()})
    (159, 534)
    """
    jobs = []
    for arch in archs:
        passes = [name for name in KERNELS if name != "delta"]
        for dim in (64, 128, 256):
            jobs.append(step_job("delta", arch, dim))
            jobs += [step_job(name, arch, dim, variant=mask) for mask in MASKS for name in passes]
            jobs += [step_job(name, arch, dim, variant="pointers") for name in passes if copies(arch)]
            jobs += [step_job("forward", arch, dim, variant=mask) for mask in ("few", "decode")]
            jobs.append(step_job("combine", arch, dim, variant="few"))
            jobs += [step_job("fused", arch, dim, variant=mask) for mask in ("full", "state") if fuses(arch)]
            routes = [route for route in ROUTES[1:] if dim <= widest_route(arch, route)]
            jobs += [step_job(name, arch, dim, variant=mask) for mask in MASKS[:-1] for name in routes]
        jobs += [step_job(name, arch, dim) for dim in (96, 192) for name in passes]
        jobs += [step_job(name, arch, 128, "float16") for name in passes]
        jobs += [step_job(name, arch, 128, "float16") for name in ROUTES[1:] if widest_route(arch, name)]
        jobs += [step_job(name, arch, dim, "float32") for dim in (64, 128, 256) for name in passes]
        if not arch.startswith("gfx"):
            jobs += [step_job(name, arch, dim) for dim in WIDE for name in ("forward", "dq", "dv", "dk")]
        jobs += _selected(arch) if arch.startswith("sm_") else []
    return jobs


def _selected(arch: str) -> list[Job]:
    """List the kernels of keys that are selected at run time; dK/dV of blocks of 128 channels on sm_100 has
    not been compiled."""
    rows = [(dim, variant) for dim in (64, 128, 256) for variant in ("tokens", "blocks")]
    rows += [(dim, "tokens") for dim in SELECTED_WIDE]
    jobs = [step_job(name, arch, dim, variant=mask) for dim, mask in rows for name in PASSES]
    jobs += [step_job("sums", arch, dim, variant="tokens") for dim in (64, 128, 256, *SELECTED_WIDE)]
    return [job for job in jobs if job.name != "dkdv sm_100 128 bfloat16 blocks"]


def measured(archs: Iterable[str] = ARCHS, folder: Path = tile_tables.SHIPPED) -> list[Job]:
    """List jobs for the measured tiles that are shipped: with a mask of their kind, and with the variant that
    needs the most registers. Raises ValueError for a file that cannot be read."""
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
    """Select the jobs with one of the given values in each field (no values: any). Raises ValueError for a
    value that no job has, and if no job matches all criteria.

    >>> [job.name for job in pick(shipped(["sm_90"]), kernel=["delta"], head_dim=[64])]
    ['delta sm_90 64 bfloat16 state']
    """
    for field, values in criteria.items():
        field_values = dict.fromkeys(str(getattr(job, field)) for job in jobs)
        for value in values:
            if str(value) not in field_values:
                raise ValueError(
                    f"{field} {value!r}: no such shipped kernel; pass one of {', '.join(field_values)}"
                )
    picked = [job for job in jobs if all(getattr(job, f) in v for f, v in criteria.items() if v)]
    if not picked:
        raise ValueError("no shipped kernel matches all options; tritoncp inspect without options lists them")
    return picked


def inspect_jobs(jobs: Sequence[Job], processes: int | None, timeout: float) -> Generator[Row]:
    """Compile jobs and yield a row for each as it is done, with a line of progress; ``failed`` has the error
    of a failed compilation."""
    progress = Progress()
    progress.add(len(jobs))
    with progress, Compilers(processes, timeout) as compilers:
        for job, report in compilers.compile_jobs(jobs):
            failure = ": " + report["failed"] if "failed" in report else ""
            progress.show(job.name + failure, measured=True)
            yield job.fields | report


def read_table(path: Path = TABLE, triton: str = "") -> dict[str, Row]:
    """Read the committed table: COLUMNS by the names of jobs.

    triton: a version of Triton, whose spilled bytes replace those of the table's where they are known to
    differ
    """
    table = json.loads(path.read_text())
    rows = {name: dict(zip(COLUMNS, figures, strict=True)) for name, figures in table["rows"].items()}
    for version, spills in table["spills"].items():
        if minor_of(version) == minor_of(triton):
            for name, spill_bytes in spills.items():
                rows[name]["spill_bytes"] = spill_bytes
    return rows


@cache
def origin() -> dict[str, str]:
    """Return the origin of a whole table: Triton's version, and a hash of the kernels and rules of tiles
    without comments and docstrings. Every Python gives the same hash."""
    import triton

    parts = []
    for path in sorted(tile_tables.SHIPPED.parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (_is_kernel(node) or path.name == "tile_rules.py"):
                body = node.body[ast.get_docstring(node) is not None :]
                parts.append(ast.unparse(ast.Module([node.args, *body], [])))  # type: ignore[list-item]
    return {"triton": triton.__version__, "kernels": hashlib.sha256(repr(parts).encode()).hexdigest()[:10]}


def _is_kernel(function: ast.FunctionDef) -> bool:
    decorators = [x.func if isinstance(x, ast.Call) else x for x in function.decorator_list]
    return any(ast.unparse(x).endswith(("jit", "constexpr_function")) for x in decorators)


def write(rows: Iterable[Row], path: Path = TABLE) -> None:
    """Write rows into the table, one per line. They replace rows of the same jobs, and rows of kernels that
    are not shipped any more are dropped. The origin is written with a whole table, or if all rows that stay
    have it. What other versions of Triton are known to spill stays."""
    old = read_table(path) if path.exists() else {}
    before = json.loads(path.read_text()) if path.exists() else {"origin": {}, "spills": {}}
    spills, here = before["spills"], origin()
    new = {row["name"]: row for row in rows}
    names = [job.name for job in [*shipped(), *measured()]]
    figures = {name: [row[column] for column in COLUMNS] for name, row in (old | new).items()}
    current = figures if before["origin"] == here else new
    head = here if current.keys() >= {*names} else {}
    lines = ",\n".join(
        f'"{name}":{json.dumps(figures[name], separators=(",", ":"))}' for name in names if name in figures
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    listed = {
        version: {name: known[name] for name in names if name in known} for version, known in spills.items()
    }
    path.write_text(
        f'{{"origin": {json.dumps(head)},\n"spills": {json.dumps(listed)},\n"rows": {{\n{lines}\n}}}}\n'
    )


def find_faults(row: Row, arch: str) -> list[str]:
    """Return why a compiled kernel cannot be launched: a line for each violation of the GPU's limits, or the
    error of a failed compilation."""
    if "failed" in row:
        return [row["failed"]]
    shared, columns, limit = row["shared_bytes"], row.get("tensor_columns") or 0, SHARED_BYTES[family(arch)]
    faults = []
    if shared > limit:
        faults.append(f"{shared} bytes of shared memory, more than the limit {limit}")
    if columns > TENSOR_COLUMNS:
        faults.append(f"{columns} columns of tensor memory, more than {TENSOR_COLUMNS}")
    return faults


def find_regressions(row: Row, before: Row | None) -> list[str]:
    """Return a line for each regression of a row against the table, and each violation of the GPU's limits.

    >>> was = {"arch": "sm_90", "spill_bytes": 0, "shared_bytes": 0, "matrix": "HGMMA", "tma": 4}
    >>> find_regressions(was | {"matrix": "HMMA", "tma": 0, "spill_bytes": 8}, was)
    ['8 spilled bytes, before 0', 'matrix products by HMMA, before by HGMMA', 'no TMA any more']
    """
    regressions = find_faults(row, row["arch"])
    if "failed" in row:
        return regressions
    if before is None:
        return [*regressions, "not in the table: tritoncp inspect --update writes it"]
    if row["spill_bytes"] > before["spill_bytes"]:
        regressions.append(f"{row['spill_bytes']} spilled bytes, before {before['spill_bytes']}")
    if row["matrix"] != before["matrix"]:
        units = row["matrix"] or "nothing", before["matrix"] or "nothing"
        regressions.append("matrix products by {}, before by {}".format(*units))
    if before["tma"] and not row["tma"]:
        regressions.append("no TMA any more")
    return regressions


def run(
    jobs: Sequence[Job],
    processes: int | None = None,
    timeout: float = 300.0,
    *,
    as_json: bool = False,
    check: bool = False,
    update: bool = False,
) -> list[str]:
    """Compile jobs and print their rows. check: compare them with the table; update: write them to it.
    Returns a line for each fault."""
    order = [job.name for job in jobs]
    rows = sorted(inspect_jobs(jobs, processes, timeout), key=lambda row: order.index(row["name"]))
    before = read_table(triton=installed_version("triton") or "")
    faults = [
        f"{row['name']}: {why}"
        for row in rows
        if check or "failed" in row
        for why in find_regressions(row, before.get(row["name"]))
    ]
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        show(rows, make_console())
    if update:
        write(row for row in rows if "failed" not in row)
    return faults


def tiles(config: dict[str, Any]) -> str:
    """Format a config: its route, tile sizes, warps and stages.

    >>> tiles({"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3})
    '128×64 8/3'
    >>> tiles({"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3, "USE_TMA": True})
    '128×64 8/3 TMA'
    >>> tiles({"ROUTE": "gluon", "BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3})
    'gluon 128×64 4/3'
    """
    shape = f"{config['BLOCK_M']}×{config['BLOCK_N']} {config['num_warps']}/{config['num_stages']}"
    route = f"{config['ROUTE']} " if "ROUTE" in config else ""
    return route + shape + " TMA" * config.get("USE_TMA", False)


def show(rows: Sequence[Row], console: Any) -> None:
    """Print a table for each architecture, with dashes for missing values."""
    for arch in dict.fromkeys(row["arch"] for row in rows):
        print_table(console, arch, SHOWN, [_cells(row) for row in rows if row["arch"] == arch])
    console.print(
        "\ntiles: M×N warps/stages, TMA if by descriptor; regs, spill (bytes): per thread; shared: bytes per "
        "CTA; matrix: instruction of matrix products; TMA: number of bulk copy instructions",
        style="dim",
    )


def print_table(console: Any, title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows under a title and headings."""
    table = Table(*columns, title=title, box=None, padding=(0, 1), title_justify="left")
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)


def _cells(row: Row) -> list[Any]:
    """Return the cells of a row, by SHOWN."""
    variant = f"{row['variant']} ({row['source']})" if row["source"] else row["variant"]
    cells = [row["kernel"], row["head_dim"], row["dtype"], variant]
    if "failed" in row:
        return [*cells, *"–" * (len(SHOWN) - len(cells))]
    *figures, matrix, copied = (row[column] for column in COLUMNS)
    return [*cells, tiles(row["config"]), *figures, matrix or "–", copied or "–"]

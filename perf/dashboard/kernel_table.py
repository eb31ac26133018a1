"""Generates the table of compiled kernels in perf/NOTES.md from the table of `tritoncp inspect`.

``python -m tritoncp.perf.dashboard.kernel_table`` prints the table, ``--write`` puts it into the notes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from tritoncp.perf.dashboard.readme_figures import ROOT, rewrite
from tritoncp.perf.exit_codes import PerfCommand

from tritoncp.ops.tile_tables import SHIPPED

BEGIN, END = "<!-- kernels: begin -->", "<!-- kernels: end -->"
ARCHITECTURES = ("sm_90", "sm_100", "sm_80", "gfx942")
KERNELS = ("forward", "few rows", "gluon", "dq", "dkdv", "fused")
HEAD_DIMS = (64, 128, 256)
HEAD = ("kernel", "D", "tile", "full", "masked", "registers", "programs", "bound", "limited by")
LIMITS = {"mufu": "exponentials", "issue": "instructions", "tensor cores": "products", "tensor": "products"}


def format_kernels(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format a table for each architecture: a row for each kernel and head dim, of bfloat16 inputs.

    The masked loop is that of a causal mask, of few rows that of a mask by row intervals; every other figure
    is of a mask of full blocks.
    """
    by_key = {
        (row["arch"], row["kernel"], row["head_dim"], row["variant"]): row
        for row in rows
        if row["dtype"] == "bfloat16"
    }
    parts = []
    for arch in ARCHITECTURES:
        parts += [f"**{arch}**", "\n".join(_format_architecture(arch, by_key))]
    return "\n\n".join(parts)


def _format_architecture(arch: str, by_key: Mapping[tuple[Any, ...], Mapping[str, Any]]) -> list[str]:
    lines = [f"| {' | '.join(HEAD)} |", "|---|--:|---|--:|--:|--:|--:|--:|---|"]
    for kernel in KERNELS:
        for head_dim in HEAD_DIMS:
            few = kernel == "few rows"
            key = arch, "forward" if few else kernel, head_dim
            if (row := by_key.get((*key, "few" if few else "full"))) is not None:
                masked_row = row if few else by_key.get((*key, "causal"), row)
                cells = _format_row(kernel, row, masked_row["masked_loop"])
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def _format_row(kernel: str, row: Mapping[str, Any], masked_loop: int | None) -> list[str]:
    """Format the cells of a kernel from its row of resources.json.

    >>> config = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
    >>> config |= {"USE_TMA": True, "FLIP": False}
    >>> row = {"head_dim": 64, "config": config, "loop": 526, "registers": 194, "programs": 2, "bound": 0.941,
    ...        "limit": "mufu after tensor; registers hold 1 program"}
    >>> _format_row("forward", row, 666)[2:]
    ['128×64, 4w, 2s, TMA', '526', '666', '194', '2', '94 %', 'exponentials after products']
    """
    config = row["config"]
    tile = f"{config['BLOCK_M']}×{config['BLOCK_N']}, {config['num_warps']}w, {config['num_stages']}s"
    tile += ", TMA" * config["USE_TMA"] + ", transposed" * config["FLIP"]
    first, *second = row["limit"].split(";")[0].split(" after ")
    limit = " after ".join(LIMITS.get(name, name) for name in (first, *second))
    counts = (row["loop"], masked_loop or "–", row["registers"], row["programs"], f"{row['bound']:.0%}")
    return [kernel, str(row["head_dim"]), tile, *(str(count).replace("%", " %") for count in counts), limit]


@click.command(cls=PerfCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--page", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=ROOT / "perf/NOTES.md"
)
@click.option("--write", is_flag=True, help="Write the table into the page instead of printing it.")
def main(page: Path, write: bool) -> None:
    """Print the table of compiled kernels that perf/NOTES.md holds."""
    block = format_kernels(json.loads((SHIPPED / "resources.json").read_text())["rows"])
    if write:
        rewrite(page, f"\n{block}\n", BEGIN, END)
    else:
        click.echo(block)


if __name__ == "__main__":
    main()

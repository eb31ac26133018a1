"""Comparisons of tritoncp's kernels with torch's, by the rows of ``kernels/configs/templates.json``."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tritoncp.analysis.templates.flex import PRODUCTS
from tritoncp.analysis.templates.table import TABLE, Row, read_rows
from tritoncp.analysis.throughput_bound import MACHINES

DQ, DKDV = PRODUCTS["dq"], PRODUCTS["dkdv"]
TOLERANCE = 0.01  # of the peak: bounds as near as that are equal


def fits(row: Mapping[str, Any]) -> bool:
    """Return whether a GPU can launch a row's kernel; torch's autotuning drops candidates that it cannot."""
    return row["shared_bytes"] <= MACHINES[row["arch"]].block


def is_serial(row: Mapping[str, Any]) -> bool:
    """Return whether a row's loop waits for one product after another, more often than once for each of its
    products of matrices: for those the bound, in which products follow each other at once, is too high."""
    return row["serial"] > PRODUCTS.get(row["kernel"], DQ + DKDV)


def scaled(row: Mapping[str, Any], count: int) -> float:
    """Scale a count of one warp's instructions in a turn of the loop to all warps and 128 × 128 scores.

    >>> scaled({"tile": [128, 64], "warps": 8}, 400)
    6400.0
    """
    rows, columns = row["tile"]
    return count * row["warps"] * 128 * 128 / (rows * columns)


def verdict(own: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return whether a row's bound is "ahead" of another's, "behind" it, or "equal".

    >>> [verdict({"bound": bound}, {"bound": 0.66}) for bound in (0.78, 0.65, 0.64)]
    ['ahead', 'equal', 'behind']
    """
    difference = round(own["bound"] - other["bound"], 3)
    return "equal" if abs(difference) <= TOLERANCE else "ahead" if difference > 0 else "behind"


class Comparison:
    """The rows for one kernel, GPU, head dim and mask.

    own:     tritoncp's row
    default: torch's, at the tiles that it takes without autotuning
    best:    the one with the highest bound of torch's candidates that fit, with or without USE_TMA; of equal
             bounds the one with the fewest instructions
    """

    def __init__(self, own: Row, rows: Sequence[Row]) -> None:
        self.own = own
        self.default = next(row for row in rows if row["default"] and not row["tma"])
        self.best = max(filter(fits, rows), key=lambda row: (row["bound"], -row["instructions"]))


@functools.cache
def comparisons(path: Path = TABLE) -> dict[tuple[str, str, int, str], Comparison]:
    """Compare tritoncp's rows of the table with torch's: (kernel, arch, head dim, mask) -> comparison. The
    gluon route is compared as a forward kernel; "backward" is dQ and dK/dV together."""
    own, torch_rows = (_by_place(source, path) for source in ("tritoncp", "torch"))
    result = {}
    for (kernel, *rest), (row,) in own.items():
        place = "forward" if kernel == "gluon" else kernel, *rest
        result[kernel, *rest] = Comparison(row, torch_rows[place])
    return result


def _by_place(source: str, path: Path) -> dict[tuple[Any, ...], list[Row]]:
    """Sort the rows of a source by kernel, arch, head dim and mask, with "backward" rows for pairs of dQ and
    dK/dV that are launched with the same options (torch: as one kernel)."""
    places: dict[tuple[Any, ...], list[Row]] = {}
    for row in read_rows(path):
        if row["source"] == source:
            row = row | {"instructions": scaled(row, row["loop"])}
            places.setdefault((row["kernel"], row["arch"], row["head_dim"], row["mask"]), []).append(row)
    for kernel, *rest in [place for place in places if place[0] == "dq"]:
        queries, keys = places[kernel, *rest], places["dkdv", *rest]
        places["backward", *rest] = [_join(dq, dkdv) for dq, dkdv in zip(queries, keys, strict=True)]
    return places


def _join(dq: Row, dkdv: Row) -> Row:
    """Join the rows of dQ, of 3 products, and of dK/dV, of 4, where one follows the other."""
    bound = (DQ + DKDV) / (DQ / dq["bound"] + DKDV / dkdv["bound"])
    sums = {"instructions": dq["instructions"] + dkdv["instructions"], "bound": round(bound, 3)}
    return dkdv | sums | {"kernel": "backward", "shared_bytes": max(dq["shared_bytes"], dkdv["shared_bytes"])}

"""Supported versions of torch and Triton: the oldest, and the newest with which the tests have run.

`pyproject.toml` has no upper bounds: users could not lift them and would not get fixes of torch, and
installers would choose an older tritoncp without bounds. Newer versions only cause a warning at the first
call that uses them, and a line in `tritoncp doctor`.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable
from functools import cache

from tritoncp.core.caller import warn_caller

OLDEST = {"torch": "2.11", "triton": "3.6"}  # equal to pyproject.toml
NEWEST_TESTED = {"torch": "2.15.0", "triton": "3.9.0"}  # equal to constraints-newest.txt


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, else None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def minor_of(version: str) -> tuple[int, ...]:
    """Return the major and minor number of a version.

    >>> minor_of("2.13.0+cpu"), minor_of("3.8.0rc1"), minor_of("4")
    ((2, 13), (3, 8), (4,))
    """
    leading = re.match(r"\d+(\.\d+)?", version)
    return tuple(map(int, leading[0].split("."))) if leading else ()


def list_untested(packages: Iterable[str] = NEWEST_TESTED) -> list[str]:
    """Return a line for each package newer than the tested version; another patch release counts as
    tested."""
    return [
        f"{package} {installed} is newer than {tested}, the newest that tritoncp was tested with"
        for package in packages
        if (installed := installed_version(package))
        and minor_of(installed) > minor_of(tested := NEWEST_TESTED[package])
    ]


@cache
def warn_untested(*packages: str) -> None:
    """Warn once per process, on rank 0 of several, if a package that runs is newer than the tested one."""
    from tritoncp.core.log_lines import is_first_rank  # late: the command line shows its help without torch

    if is_first_rank() and (untested := list_untested(packages)):
        pins = " ".join(f"{package}=={NEWEST_TESTED[package]}" for package in packages)
        warn_caller(
            f"{'; '.join(untested)}. `tritoncp check` compares results on this machine with dense attention; "
            f"pip install {pins} installs the tested versions"
        )

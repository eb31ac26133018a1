"""Packages of the wheel, built from the sources alone; all else is in pyproject.toml.

kernels/ and perf/ at the top of the checkout are installed as tritoncp.kernels and tritoncp.perf. They have
no __init__.py: as a bare `kernels`, the name of another package, nothing is found.
"""

import shutil
from pathlib import Path

from setuptools import find_namespace_packages, find_packages, setup
from setuptools.command.build_py import build_py


class CleanBuild(build_py):
    """Copies the packages into a folder without files of earlier builds: setuptools would pack modules that
    the checkout has no longer."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib, "tritoncp"), ignore_errors=True)
        super().run()


folders = find_namespace_packages(
    include=["kernels", "kernels.*", "perf", "perf.*"], exclude=["*.configs*", "perf.benchmarks"]
)
setup(
    packages=[*find_packages(include=["tritoncp", "tritoncp.*"]), *(f"tritoncp.{name}" for name in folders)],
    package_dir={"tritoncp.kernels": "kernels", "tritoncp.perf": "perf"},
    cmdclass={"build_py": CleanBuild},
)

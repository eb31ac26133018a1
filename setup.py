"""Packages of the wheel; all else is in pyproject.toml.

kernels/ and perf/ at the top of the checkout are installed as tritoncp.kernels and tritoncp.perf. They have
no __init__.py: as a bare `kernels`, the name of another package, nothing is found.
"""

from setuptools import find_namespace_packages, find_packages, setup

folders = find_namespace_packages(include=["kernels", "kernels.*", "perf", "perf.*"], exclude=["*.configs*"])
setup(
    packages=[*find_packages(include=["tritoncp", "tritoncp.*"]), *(f"tritoncp.{name}" for name in folders)],
    package_dir={"tritoncp.kernels": "kernels", "tritoncp.perf": "perf"},
)

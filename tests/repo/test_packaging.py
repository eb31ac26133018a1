"""Wheel, sdist and editable install have the contents of the checkout, without a network."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

import tritoncp
from tests.repo.test_imports import OUTSIDE, modules

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = sorted(  # files of the wheel
    f"tritoncp/{path.relative_to(ROOT / base).as_posix()}"
    for base, folder in (("tritoncp", "tritoncp"), (".", "kernels"), (".", "perf"))
    for path in (ROOT / folder).rglob("*")
    if (path.suffix in {".py", ".typed", ".html", ".css", ".js"} and path.parent.name != "benchmarks")
    or (path.suffix == ".json" and "configs" in path.parts)
)
# Imports all modules; prints their origin, and whether a bare `kernels` was imported or could be.
PROBE = """
import importlib, importlib.util, json, sys
import tritoncp
names = json.loads(sys.argv[1])
for name in names:
    importlib.import_module(name)
bare = [name for name in ("kernels", "perf") if name in sys.modules]
specs = [importlib.util.find_spec(name) for name in ("kernels", "perf", "tests")]
visible = [place for spec in specs if spec for place in spec.submodule_search_locations or [spec.origin]]
print(json.dumps({"file": tritoncp.__file__, "bare": bare, "visible": visible}))
"""


def sh(*command, cwd=None, env=None) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Return a copy to build in, where an earlier build left files that the checkout has no longer:
    setuptools leaves build/ and egg-info beside the sources."""
    copy = tmp_path_factory.mktemp("source") / "tritoncp"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "tritoncp", "kernels", "perf"):
        sh("cp", "-a", ROOT / name, copy)
    for name in (
        "removed.py",
        "kernels/removed.py",
        "kernels/configs/sm_90/removed.json",
        "removed/__init__.py",
    ):
        path = copy / "build/lib/tritoncp" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return copy


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


def build(kind: str, source: Path, out: Path) -> Path:
    call = f"from setuptools.build_meta import build_{kind}; print(build_{kind}({str(out)!r}))"
    return out / sh(sys.executable, "-c", call, cwd=source).splitlines()[-1]


def fresh_environment(folder: Path) -> Path:
    """Make an empty virtual environment that falls back on the packages of this one."""
    sh(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    site = sh(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    site_folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (Path(site) / "parent.pth").write_text("\n".join(sorted(site_folders)) + "\n")
    return python


def install(python: Path, *arguments) -> None:
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed", "--quiet")
    sh(python, "-m", "pip", "install", *options, *arguments, env=bare_environment())


def bare_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"TRITON_INTERPRET": "1"}


def probe(python: Path, cwd: Path) -> dict:
    names = [f"tritoncp.{name}" for name in modules() if name.split(".")[0] in ("kernels", "perf")]
    return json.loads(sh(python, "-c", PROBE, json.dumps(names), cwd=cwd, env=bare_environment()))


MAX_BYTES = 1_000_000  # of the wheel


@pytest.mark.long
def test_the_wheel_holds_the_sources_and_the_licence(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.stat().st_size < MAX_BYTES
    assert sorted(name for name in names if name.startswith("tritoncp/")) == SOURCES
    assert "tritoncp/py.typed" in names and "tritoncp/kernels/configs/resources.json" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert not [name for name in names if not name.startswith(("tritoncp/", "tritoncp-"))]


@pytest.fixture(scope="module")
def wheel_python(wheel, tmp_path_factory) -> Path:
    """Return the Python of a new environment in which the wheel is installed."""
    python = fresh_environment(tmp_path_factory.mktemp("environment") / "env")
    install(python, wheel)
    return python


@pytest.mark.long
@pytest.mark.parametrize("editable", [False, True])
def test_an_install_works_and_shows_no_bare_kernels(editable, wheel_python, source, tmp_path):
    python, folder = wheel_python, wheel_python.parents[1]
    if editable:
        python, folder = fresh_environment(tmp_path / "env"), source
        install(python, "--config-settings", "editable_mode=strict", "--editable", source)
    result = probe(python, tmp_path)
    assert Path(result["file"]).is_relative_to(folder)
    assert result["bare"] == []
    assert not [place for place in result["visible"] if Path(place).is_relative_to(folder)]


# Plans and attends as a user does, on the CPU engine, and compares with torch.
USE = """
import torch, tritoncp
q, k, v = torch.randn(3, 1, 2, 512, 16, requires_grad=True)
mask = tritoncp.create_block_mask(tritoncp.causal() & tritoncp.document(lengths=[100, 412]), 1, 1, 512, 512)
world = tritoncp.simulate(2)
plan = world.make_plan(mask)
shards = [world.shard(x, plan, dim=2) for x in (q, k, v)]
out = world.unshard(world.flex_attention(*shards, plan), plan, dim=2)
document = torch.arange(512) >= 100
visible = torch.ones(512, 512).tril().bool() & (document[:, None] == document)
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, visible)
torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
out.sum().backward()
print(tritoncp.__file__)
"""


@pytest.mark.long
def test_an_installed_wheel_is_used_as_the_readme_says(wheel_python, tmp_path):
    """Attention and the commands, in a folder without a checkout."""
    environment = bare_environment() | {"TRITON_INTERPRET": "0"}

    def run(*command) -> str:
        return sh(*command, cwd=tmp_path, env=environment)

    folder, command = wheel_python.parents[1], wheel_python.parent / "tritoncp"
    assert Path(run(wheel_python, "-c", USE).strip()).is_relative_to(folder)
    assert "doctor" in run(command, "--help")
    assert "(auto: predicted ms" in run(command, "plan", "--lengths", "10K,6K", "--world-size", "2")
    (tmp_path / "perf/history").mkdir(parents=True)  # of the user, where the commands look by default
    shutil.copy(ROOT / "perf/history/2026-11-22-amd-epyc.jsonl", tmp_path / "perf/history")
    run(command, "perf", "dashboard")
    assert "tritoncp" in (tmp_path / "dashboard.html").read_text()


@pytest.mark.long
def test_the_sdist_builds_the_same_wheel(source, wheel, tmp_path):
    archive = build("sdist", source, tmp_path)
    shutil.unpack_archive(archive, tmp_path)
    second_wheel = build("wheel", tmp_path / archive.name.removesuffix(".tar.gz"), tmp_path)
    assert sorted(zipfile.ZipFile(second_wheel).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_no_init_file_makes_a_bare_kernels_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "perf" / "__init__.py").exists()
    assert not [path for path in (ROOT / "tritoncp").rglob("*") if path.is_symlink()], "zips have no links"


def test_a_package_without_its_kernels_says_so(tmp_path):
    shutil.copytree(ROOT / "tritoncp", tmp_path / "tritoncp", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-c", "import tritoncp"]
    done = subprocess.run(
        command, cwd=tmp_path, env=bare_environment(), capture_output=True, text=True, check=False
    )
    assert "ImportError" in done.stderr and str(tmp_path / "kernels") in done.stderr, done.stderr
    assert "pip install" in done.stderr


def names_of(requirements: Iterable[str]) -> set[str]:
    return {re.split(r"[<>=;\[ ]", line)[0] for line in requirements}


def test_every_layer_gets_its_packages_by_a_plain_install():
    """Only pictures, pages of the benchmark and adapters need more, which their errors name."""
    torch_brings = {"networkx", "sympy"}
    brought = names_of(PROJECT["dependencies"]) | torch_brings | {"matplotlib"}
    layers = OUTSIDE.keys() - {"perf", "edge"}
    assert {layer: OUTSIDE[layer] - brought for layer in layers if OUTSIDE[layer] - brought} == {}


def test_the_citation_is_of_this_version_and_repository():
    citation = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {tritoncp.__version__}" in citation
    assert f'repository-code: "{PROJECT["urls"]["Repository"]}"' in citation


@pytest.mark.parametrize(
    ("file", "extras"),
    [
        ("constraints.txt", PROJECT["optional-dependencies"]),
        ("constraints-newest.txt", ("plot", "demo", "perf", "test", "dev")),
        ("constraints-oldest.txt", ("plot", "demo", "perf", "test", "dev")),
    ],
)
def test_every_dependency_is_pinned_for_set_up(file, extras):
    lines = [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    expected = names_of(PROJECT["dependencies"] + lines) - {"tritoncp"}
    pins = [line for line in (ROOT / file).read_text().splitlines() if line and line[0] != "#"]
    pinned = {line.split("==")[0].replace("_", "-").lower() for line in pins}
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert f"rev: v{next(line[6:] for line in pins if line.startswith('ruff=='))}\n" in hooks
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", line) for line in pins)
    assert expected <= pinned

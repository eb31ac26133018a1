"""Tests of the command line."""

import itertools
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch

from tests.command_process import ROOT, invoke
from tritoncp import doctor
from tritoncp.cli import main
from tritoncp.measured_tiles.tile_tables import Device


def all_commands(
    command: click.Command = main, name: str = "tritoncp"
) -> Iterator[tuple[str, click.Command]]:
    """List a command and all commands in it, with their names."""
    yield name, command
    for word, inner in getattr(command, "commands", {}).items():
        yield from all_commands(inner, f"{name} {word}")


def examples_of(name: str) -> list[list[str]]:
    """Return the examples in a command's --help as words, without the program."""
    lines = invoke(*name.split()[1:], "--help", terminal_width=200).output.splitlines()
    assert "  Examples:" in lines, f"{name} --help has no examples"
    block = list(itertools.takewhile(str.strip, lines[lines.index("  Examples:") + 1 :]))
    program = re.compile(r"(torchrun --nproc-per-node \d+ -m )?tritoncp[ .]")
    assert all(program.match(line.strip()) for line in block)
    return [shlex.split(program.sub("", line.strip(), count=1), comments=True) for line in block]


@pytest.mark.parametrize("name", [name for name, _ in all_commands()])
def test_every_help_has_examples_that_parse(name, tmp_path, monkeypatch):
    (tmp_path / "perf" / "history").mkdir(parents=True)
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path)
    calls = []
    for command_name, command in all_commands():
        if not hasattr(command, "commands"):
            monkeypatch.setattr(command, "callback", lambda _=command_name, **options: calls.append(_))
    examples = examples_of(name)
    for words in examples:
        done = invoke(*words)
        assert done.exit_code == 0, done.output
    assert examples and len(calls) == len(examples) and all(call.startswith(name) for call in calls)


MODS = """
import os
def three(b, h, q): return q
def whole(b, h, q, kv): return q - kv
def plain(b, h, q, kv): return True
def fails(b, h, q, kv): return 1 / 0
def rows(b, h, q, kv): return q.new_ones(3) > 0
def loud(b, h, q, kv): print("said aloud"); return q >= kv
def near(b, h, q, kv): return (q - kv).abs() < 3
class Tree:
    def __call__(self, b, h, q, kv): return q >= kv
tree = Tree()
import torch
class Learned(torch.nn.Module):
    def forward(self, b, h, q, kv): return q >= kv
module = Learned()
from functools import partial
closer = partial(lambda width, b, h, q, kv: q - kv < width, 5)
from tritoncp import causal
both = causal() & near
"""


@pytest.fixture
def mods(tmp_path, monkeypatch):
    """Make a folder with user modules, and run commands in it."""
    for name, text in {"my_mods": MODS, "leaving": "raise SystemExit(0)"}.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITONCP_CONFIG_DIR", str(tmp_path / "configs"))
    return tmp_path


SMALL = "--seq-len=256"
REFUSED = tomllib.loads(Path(__file__).with_name("refused_options.toml").read_text())
REFUSED["plan"] += [
    (["--mask", "causal&" * 15_000 + "causal"], "nested too deeply"),
    (["--lengths", "[" * 100_000], "nested too deep"),
    (["--lengths", sys.executable], "holds no text"),
    (["--png", f"{'a' * 300}.png"], "cannot be written: File name too long"),
]
REFUSED["autotune"].append((["--shapes", f"{'9' * 5000}x1,64,64"], "HEADSxKV_HEADS"))


@pytest.mark.sample(48)
@pytest.mark.parametrize(
    ("command", "words", "said"),
    [(command, words, said) for command, rows in REFUSED.items() for words, said in rows],
    ids=lambda value: "_".join(word[:24] for word in value) if isinstance(value, list) else None,
)
def test_options_that_make_no_sense_are_refused_in_a_message(command, words, said, mods):
    done = invoke(command, *words)
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.stderr.split()) or said in done.stderr
    assert "Traceback" not in done.output and "a bug in" not in done.output and done.stdout == ""
    assert len(done.stderr) < 3000


OUTPUTS = {  # for each option that names an output: words of a command, and the function that does the work
    "plan --png": (["plan", "--png=/proc/x.png"], "report.command.collect_facts"),
    "demo --out": (["demo", "--out=/proc/x"], "demo.run.introduce"),
    "autotune --out": (["autotune", "--out=/proc/x"], "tuning.search.autotune"),
    "perf run --out": (["perf", "run", "--device=host", "--out=/proc/x"], "perf.suite.host_cases.run"),
    "perf dashboard --out": (["perf", "dashboard", "/", "--out=/proc/x.html"], "perf.cli.read"),
    "perf compare --html": (["perf", "compare", "a", "b", "--html=/proc/x.html"], "perf.cli._read_side"),
}
UNITS = {"seconds": ("90", "2m", "1.5h"), "tokens": ("1000", "1K", "2k")}


def options_of_all_commands() -> Iterator[tuple[str, click.Option]]:
    """List the options of all commands with their names, as "plan --png"."""
    for name, command in all_commands():
        for option in command.params:
            if isinstance(option, click.Option):
                longest = max(option.opts, key=len)
                yield f"{name.removeprefix('tritoncp ')} {longest}", option


def test_times_and_tokens_are_written_alike_in_all_commands():
    kinds = {"budget": "seconds", "timeout": "seconds", "seconds": "seconds", "seq_len": "tokens"}
    taken = {name: option.type.name for name, option in options_of_all_commands() if option.name in kinds}
    assert taken == {name: kinds[name.rpartition("--")[2].replace("-", "_")] for name in taken}
    for name, option in options_of_all_commands():
        for text in UNITS[taken[name]] if name in taken else ():
            assert option.type.convert(text, option, None) > 0, (name, text)


def test_every_output_is_checked():
    names = {name for name, option in options_of_all_commands() if option.name in ("out", "png", "html")}
    assert names == OUTPUTS.keys()


@pytest.mark.parametrize("words", [["autotune"], ["perf", "run", "--device=cuda"]], ids=" ".join)
@pytest.mark.usefixtures("no_gpu")
def test_commands_that_need_a_gpu_end_alike_without_one(words):
    done = invoke(*words)
    assert done.exit_code == 2 and "torch finds no GPU" in done.stderr


@pytest.mark.parametrize(
    ("words", "work", "code", "said"),
    [
        *((words, work, 2, words[-1].partition("=")[2]) for words, work in OUTPUTS.values()),
        (["plan", "--png=x.png"], "report.command.collect_facts", 1, "pip install matplotlib"),
        (["demo"], "demo.run.introduce", 1, "pip install matplotlib"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_outputs_and_packages_are_checked_before_work(words, work, code, said, mods, monkeypatch):
    def start_work(*arguments: object, **options: object) -> None:
        raise AssertionError("work began")

    device = Device("sm_90", "NVIDIA H200")
    monkeypatch.setattr("tritoncp.tuning.command.find_device", lambda: device)
    monkeypatch.setattr(f"tritoncp.{work}", start_work)
    if "matplotlib" in said:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = invoke(*words)
    assert done.exit_code == code, done.output
    assert said in done.stderr and "Traceback" not in done.output and "work began" not in done.output
    assert {path.name for path in mods.iterdir()} <= {"my_mods.py", "leaving.py", "demo-out", "configs"}


def test_checked_mods_are_not_called(mods):
    """Callables that are no functions are refused: they would be called with tensors."""
    (mods / "my_mods.py").write_text("def f(*path):\n    open('called', 'w')\n")
    assert invoke("plan", "--mask=my_mods:f").exit_code == 2
    assert not (mods / "called").exists()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["near", "tree", "module", "closer", "both", "loud"])
def test_json_of_a_users_mask_is_the_same_every_time(name, mods):
    first = invoke("plan", f"--mask=my_mods:{name}", SMALL, "--json")
    del sys.modules["my_mods"]  # functions at other addresses
    second = invoke("plan", f"--mask=my_mods:{name}", SMALL, "--json")
    assert first.exit_code == second.exit_code == 0, first.output
    assert first.stdout == second.stdout and "0x" not in first.stdout
    assert json.loads(first.stdout)["mask"]["q_len"] == 256


def test_a_bug_is_one_line_that_names_the_debug_variable(monkeypatch):
    def broken() -> None:
        raise KeyError("lost")

    monkeypatch.setattr(doctor, "examine", broken)
    monkeypatch.delenv("TRITONCP_DEBUG", raising=False)
    done = invoke("doctor")
    assert done.exit_code == 1 and len(done.stderr.splitlines()) == 1
    assert "a bug in tritoncp, KeyError: 'lost'; TRITONCP_DEBUG=1 shows the traceback" in done.stderr
    monkeypatch.setenv("TRITONCP_DEBUG", "1")
    assert isinstance(invoke("doctor").exception, KeyError)


def test_too_little_memory_is_a_message(monkeypatch):
    def large() -> None:
        torch.empty(1 << 60, dtype=torch.uint8)

    monkeypatch.setattr(doctor, "examine", large)
    done = invoke("doctor")
    assert done.exit_code == 1
    assert done.stderr == "Error: out of memory: use smaller sizes, or a machine with more memory\n"


@pytest.mark.long
def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m tritoncp plan --seq-len 4K --json | true"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr == ""

"""0 fine, 1 a regression, 2 bad usage or unreadable input, 3 nothing measured: for every perf command."""

import json
import os
import signal
import tomllib
from pathlib import Path

import pytest

from tests.perf.synthetic_history import perf, write

SIDES = {
    "base": {"c": [1.0, 1.01, 0.99], "d": [2.0, 2.02, 1.98]},
    "slow4": {"c": [1.04, 1.0504, 1.0296], "d": [2.0, 2.02, 1.98]},
    "slow15": {"c": [1.15, 1.16, 1.14], "d": [2.0, 2.02, 1.98]},
    "broke": {"c": [1.0, 1.01, None], "d": [2.0, 2.02, 1.98]},
    "less": {"c": [1.0, 1.01, 0.99]},
    "other": {"e": [1.0, 1.0, 1.0]},
    "failing": {"c": [None], "d": [None]},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """Histories to compare, by their defect."""
    folder = tmp_path_factory.mktemp("sides")
    paths = {name: write(folder / f"{name}.jsonl", **cases) for name, cases in SIDES.items()}
    texts = {
        "empty": b"\n",
        "junk": bytes(range(256)) * 40,
        "nested": b"[" * 100_000 + b"\n",
        "nan": paths["base"]
        .read_bytes()
        .replace(b'"ms":1.0,', b'"ms":NaN,')
        .replace(b'"ms":2.0,', b'"ms":-1,'),
    }
    for name, text in texts.items():
        paths[name] = folder / f"{name}.jsonl"
        paths[name].write_bytes(text)
    paths["folder"] = folder / "folder"
    (paths["folder"] / "x.jsonl").mkdir(parents=True)
    paths["link"] = folder / "link.jsonl"
    paths["link"].symlink_to(folder / "nowhere.jsonl")
    return paths | {"device": Path("/dev/null")}


ENDS = tomllib.loads(Path(__file__).with_name("exit_codes.toml").read_text())

VERDICTS = [["pass"], ["regression"], ["bad input"], ["nothing compared"]]


@pytest.mark.sample(25)
@pytest.mark.parametrize(("words", "code", "message"), ENDS["compare"])
def test_compare(words, code, message, files, tmp_path):
    named = [files.get(word, word) for word in words.split()]
    result = perf("compare", *named, "--history", tmp_path / "none")
    assert result.exit_code == code, result.output
    assert message in " ".join(result.output.split()) or message in result.output
    if "Usage:" not in result.output and message != "is a device" and "--markdown" not in words:
        facts = json.loads(perf("compare", *named, "--history", tmp_path / "none", "--json").stdout)
        assert facts["exit_code"] == code and facts["verdict"] in VERDICTS[code]


@pytest.mark.parametrize("word", ["", " ", "--help^{commit}", "x" * 5000, "a\nb"])
def test_a_word_that_names_nothing_is_bad_usage(word, files, tmp_path):
    result = perf("compare", "--history", tmp_path / "none", "--", files["base"], word)
    assert result.exit_code == 2


def test_names_of_a_history_are_text_and_no_markup(tmp_path):
    name = "[/b]|`<img>\n[red]"
    sides = [write(tmp_path / f"{i}.jsonl", **{name: times}) for i, times in enumerate(([1.0], [None]))]
    for options in ((), ("--markdown",)):
        result = perf("compare", *sides, *options)
        assert result.exit_code == 1 and "[/b]" in result.output
    assert "`[/b]/'<img> [red]`" in result.output and result.output.count("</details>") == 1


RUN = ["run", "--device", "host", "--tier", "smoke"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("words", "code", "message"), ENDS["run"])
def test_run(words, code, message, tmp_path):
    result = perf(*RUN, "--out", tmp_path, *words.split())
    assert result.exit_code == code, result.output
    assert message in " ".join(result.output.split())


@pytest.mark.long
def test_a_run_with_a_measurement_and_a_resumed_run_without_cases_exit_with_0(tmp_path):
    words = [*RUN, "--only", "mask-*", "--seconds", "0", "--out", tmp_path]
    assert perf(*words).exit_code == 0
    result = perf(*words, "--resume", "--budget", "0")
    assert result.exit_code == 0 and "1 cases are there" in result.output
    result = perf(*RUN, "--seconds", "0", "--out", tmp_path, "--resume", "--budget", "0")
    assert result.exit_code == 3 and "the first of 3 cases" in result.output


def test_the_dashboard(files, tmp_path):
    out = tmp_path / "page.html"
    assert perf("dashboard", files["base"], "-o", out).exit_code == 0
    for name, code in (("empty", 3), ("folder", 3), ("junk", 2), ("device", 2)):
        assert perf("dashboard", files[name], "-o", out).exit_code == code, name
    assert perf("dashboard", files["base"], "-o", files["base"] / "x.html").exit_code == 2


def test_ctrl_c_is_no_regression(files, tmp_path):
    """The signal comes while a pipe without a writer is read."""
    os.mkfifo(tmp_path / "pipe")
    previous_handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        result = perf("compare", tmp_path / "pipe", files["base"])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)
    assert result.exit_code == 130 and "interrupted" in result.output


def test_json_of_a_comparison_without_its_packages_is_a_verdict(files, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'scipy'", name="scipy")

    monkeypatch.setattr("tritoncp.perf.dashboard.compare.compare", refuse)
    result = perf("compare", files["base"], files["less"], "--json")
    assert (
        result.exit_code == 2 and '"verdict": "bad input"' in result.output and "pip install" in result.output
    )

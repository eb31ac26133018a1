"""The README's block of figures: it matches the history, and no text of a history can break the table."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

from click.testing import CliRunner

from tests.perf.synthetic_history import H100, H200
from tritoncp.perf.cli import perf
from tritoncp.perf.dashboard.readme_figures import BEGIN, END, format_figures
from tritoncp.perf.records.history import TUNED, Point, Series, append, read

ROOT = Path(__file__).parents[3]
ENV = {"cuda": "13.0", "torch": "2.11.0", "triton": "3.6.0", "driver": "580.1"}


def point(case, ms, day=1, series=H200, env=ENV, **rest) -> Point:
    took = {"tritoncp": {"ms": ms, "tflops": 2200.0 / ms}}
    took |= {TUNED["flex"] if name == "tuned" else name: {"ms": x} for name, x in rest.items()}
    return Point(f"r{day}", f"2026-02-0{day}T00:00:00+00:00", case, series, env, took)


def block_of(page: Path) -> str:
    return re.search(f"{BEGIN}\n(.*)\n{END}", page.read_text(), re.DOTALL)[1]


def test_the_readme_holds_the_figures_of_the_history():
    assert block_of(ROOT / "README.md") == format_figures(read(ROOT / "perf/history").points)


def test_without_a_gpu_there_is_no_figure():
    host = point("causal-16k-fwd", 5.0, series=Series("a CPU"), env={"torch": "2.11.0"})
    failed = replace(point("causal-16k-fwd", 5.0), contenders={"tritoncp": {"why": "wrong"}})
    for points in ([], [host], [failed], [point("of another version", 5.0)]):
        assert "Not yet measured on a GPU" in format_figures(points)


def test_each_gpu_has_its_newest_figures():
    points = [
        point("causal-16k-fwd", 5.0, 3),  # of tiles, without baselines
        point("causal-16k-fwd", 4.0, 2, flash=6.0, flex=8.0, tuned=7.0),
        point("full-16k-fwd", 9.0, 2, flex=8.0),
        point("causal-16k-fwd", 8.0, 1, flash=6.0, cudnn=6.0),
        point("causal-8k-fwd", 8.0, 3),
        point("causal-16k-fwd", 10.0, 1, series=H100),
    ]
    h100, h200 = format_figures(points).split("\n\nMeasured on ")
    assert "NVIDIA H100 on 2026-02-01" in h100 and "| causal-16k-fwd | 10 | 220 | – | – | – |" in h100
    assert h200.startswith("NVIDIA H200 on 2026-02-03 (torch 2.11.0, triton 3.6.0, driver 580.1)")
    assert h200.splitlines()[4:] == [
        "| causal-16k-fwd | 5 | 440 | 1.75 | 1.50 | 0.75 |",
        "| full-16k-fwd | 9 | 244 | – | – | – |",  # flex is untuned
    ]
    assert "causal-8k-fwd" not in h200
    assert "| causal-8k-fwd | 8 | 275 |" in format_figures([points[4]])


def test_text_of_a_history_cannot_break_the_table():
    poison = f"x|y\n{END}\n# [a](b) <img src=c> `d` **e** \\| " + "z" * 500
    env = dict.fromkeys(ENV, poison) | {"torch": ["a", poison], "driver": None}
    bad = replace(point("causal-16k-fwd", 5.0, series=Series(poison), env=env), time=poison)
    bad.contenders[poison] = {"ms": 1.0}
    bad.own["tflops"] = poison
    text = format_figures([bad])
    assert len(text.splitlines()) == 5 and not re.search(r"[<>\[\]`*#\\]", text) and "z" * 81 not in text
    assert text.splitlines()[-1] == "| causal-16k-fwd | 5 | – | – | – | – |"


def test_the_command_and_ingest_write_the_block(tmp_path):
    page, gpu, history = (
        Path(shutil.copy(ROOT / "README.md", tmp_path)),
        tmp_path / "gpu",
        tmp_path / "history",
    )
    gpu.mkdir()
    append(gpu / "2026-02-03-nvidia-h200.jsonl", point("causal-16k-fwd", 5.0).as_line())
    places = "--history", str(history), "--configs", str(tmp_path / "configs")
    original = page.read_text()
    assert CliRunner().invoke(perf, ["ingest", str(gpu), *places]).exit_code == 0
    assert page.read_text() == original == (ROOT / "README.md").read_text(), (
        "the README is of another history"
    )
    result = CliRunner().invoke(perf, ["ingest", str(gpu), *places, "--readme", str(page)])
    assert result.exit_code == 0 and "figures were updated" in result.output
    assert block_of(page) == format_figures(read(history).points) and "NVIDIA H200" in block_of(page)
    head, tail = original.split(BEGIN)[0], original.split(END)[1]
    assert page.read_text().startswith(head) and page.read_text().endswith(tail)
    page.write_text("no marks")
    result = CliRunner().invoke(perf, ["ingest", str(gpu), *places, "--readme", str(page)])
    assert result.exit_code == 2 and BEGIN in result.output

"""The page as a file: its size, what it holds, and that it holds nothing of others' choosing as markup."""

import json
import re
import time

import pytest
from click.testing import CliRunner

from tests.perf.made import ENV, H100, line, noisy, tags
from tritoncp.cli import main
from tritoncp.perf.dashboard import NONE, STEP, digest, page
from tritoncp.perf.record import History, append


def history(points, resources=()) -> History:
    return History(points, list(resources), [])


def test_two_hundred_cases_of_five_hundred_runs_are_below_three_megabytes():
    points = []
    for seed in range(200):
        times = 2.0 * noisy(seed, 500)
        found = line(f"case-{seed}", times, tags=tags())
        for point, flex, flash in zip(found, 2.6 * noisy(seed + 1000, 500), 2.2 * noisy(seed + 2000, 500)):
            point.contenders["flex"] = {"ms": float(flex)}
            point.contenders["flash"] = {"ms": float(flash)}
        points += found
    begin = time.process_time()
    made = page(history(points))
    assert len(made.encode()) < 3_000_000
    assert time.process_time() - begin < 60


def test_columns_hold_the_times_to_a_quarter_of_a_per_mille():
    times = [1.0, 1.5, None, 40.0]
    about, columns = digest(history(line("c", times)))
    count = len(times)
    low = columns[8 * count : 9 * count]
    high = columns[9 * count : 10 * count]
    whole = [int.from_bytes(bytes(pair), "little", signed=True) for pair in zip(low, high)]
    assert whole[2] == NONE and about["lines"][0]["fails"] == {2: "wrong: <b>out of tolerance</b>"}
    unit = about["lines"][0]["unit"]
    for ms, found in zip(times, whole):
        if ms is not None:
            assert unit * 2.718281828459045 ** (found * STEP) == pytest.approx(ms, rel=STEP)


def test_a_change_names_its_commits_its_causes_and_what_the_baselines_did():
    envs = [ENV | {"commit": f"{i:040x}", "driver": "550" if i < 30 else "560"} for i in range(60)]
    about, _ = digest(history(line("c", [1.0] * 30 + [1.1] * 30, envs=envs)))
    (change,) = about["lines"][0]["changes"]
    assert (change["from"], change["at"]) == (29, 30)
    exact = {
        cause["name"]: (cause["before"], cause["after"]) for cause in change["causes"] if not cause["away"]
    }
    assert exact == {"commit": (envs[29]["commit"], envs[30]["commit"]), "driver": ("550", "560")}
    assert change["relative"] == {"flex": pytest.approx(1 / 1.1, rel=1e-3)}


def test_failures_are_no_times_and_do_not_move_a_change():
    times = [1.0] * 20 + [None] * 3 + [1.0] * 10 + [1.2] * 20
    about, _ = digest(history(line("c", times)))
    assert [change["at"] for change in about["lines"][0]["changes"]] == [33]
    assert set(about["lines"][0]["fails"]) == {20, 21, 22}


def test_a_run_that_measured_a_case_twice_counts_its_last_figure():
    twice = line("c", [1.0, 1.0])
    twice[1] = type(twice[0])(**vars(twice[1]) | {"run": "run0"})
    about, _ = digest(history(twice))
    assert about["lines"][0]["n"] == 1 and len(about["runs"]) == 1


def test_nothing_of_a_history_can_become_markup():
    evil = "</script><img src=x onerror=alert(1)><!--"
    made = page(history(line(evil, [1.0], tags=tags(mask=evil)), [{"kind": "resources", "kernel": evil}]))
    assert "<img" not in made and made.count("<script") == made.count("</script>") == 5
    assert not re.search(r"""(src|href)=["'](?!#|data:,)""", made.split("<script>")[0])


def test_the_command_writes_the_page_and_names_broken_lines(tmp_path):
    for point in [*line("c", [1.0, 1.1]), *line("d", [2.0], H100)]:
        append(tmp_path / "a.jsonl", point.as_line())
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"kind": "ca\n')
    out = tmp_path / "sub" / "page.html"
    done = CliRunner().invoke(main, ["perf", "dashboard", str(tmp_path), "-o", str(out)])
    assert done.exit_code == 0 and "3 points" in done.output and "a.jsonl:4: not JSON" in done.output
    assert out.read_text().startswith("<!doctype html>")
    (tmp_path / "empty").mkdir()
    nothing = CliRunner().invoke(main, ["perf", "dashboard", str(tmp_path / "empty"), "-o", str(out)])
    assert nothing.exit_code == 1 and "no measurement in" in nothing.output


def test_charts_and_page_agree_on_names():
    """Every source and element that the page's code asks for is there."""
    from tritoncp.perf.dashboard import HERE

    made = page(history(line("c", [1.0])))
    script = (HERE / "page.js").read_text()
    charts = made.split('id="data-charts">')[1].split("</script>")[0]
    names = set(re.findall(r'"name":\s*"([^"]+)"', json.dumps(json.loads(charts.replace("<\\/", "</")))))
    for source in re.findall(r'put\("[\w-]+", "([\w-]+)"', script):
        assert source in names, source
    html = (HERE / "page.html").read_text()
    for element in re.findall(r'\$\("([\w-]+)"\)', script):
        assert f'id="{element}"' in html, element

"""The reusable workflow: its steps run in order, as a runner would run them, on a repository on this disk."""

import json
import os
import re
import shlex
import shutil
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command_process import invoke
from tests.perf.synthetic_history import line
from tritoncp.perf.records.history import read

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github/workflows/perf.yml"

# `tritoncp perf run` writes planted times; every other command is the real one, which runs in the process of
# the test, where everything is imported.
TRITONCP = f"""#!{sys.executable} -S
import json, os, socket, sys
if sys.argv[1:3] == ["perf", "run"] and "PLANTED" in os.environ:
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(json.dumps(sys.argv[3:]) + "\\n")
    run = sum(1 for _ in open(os.environ["CALLS"]))
    with open(sys.argv[sys.argv.index("--out") + 1], "a") as out:
        for text in json.loads(os.environ["PLANTED"]):
            out.write(text.replace("RUN", f"run{{run}}") + "\\n")
    sys.exit(int(os.environ.get("RUN_CODE", "0")))
with socket.create_connection(("127.0.0.1", int(os.environ["PORT"]))) as server:
    file = server.makefile("rw")
    file.write(json.dumps([os.getcwd(), sys.argv[1:]]) + "\\n")
    file.flush()
    code, out, messages = json.loads(file.readline())
sys.stdout.write(out)
sys.stderr.write(messages)
sys.exit(code)
"""
# The comments of pull request 7, as GitHub's command keeps them: a list in a file.
GH = f"""#!{sys.executable}
import json, os, sys
words, file = sys.argv[1:], os.environ["COMMENTS"]
comments = json.load(open(file))
address = next(word for word in words if word.startswith("repos/"))
assert words[0] == "api" and os.environ["GH_TOKEN"]
if "--method" in words:
    body = open(words[words.index("-F") + 1].removeprefix("body=@")).read()
    if words[words.index("--method") + 1] == "POST":
        assert address == "repos/group/project/issues/7/comments"
        comments.append({{"id": 100 + len(comments), "user": {{"type": "Bot"}}, "body": body}})
    else:
        number = int(address.removeprefix("repos/group/project/issues/comments/"))
        next(one for one in comments if one["id"] == number)["body"] = body
    json.dump(comments, open(file, "w"))
else:
    for one in comments:
        if one["user"]["type"] == "Bot":
            print(one["id"], one["body"].split("\\n")[0], sep="\\t")
"""


class Commands(socketserver.StreamRequestHandler):
    """Runs commands of tritoncp for the program above."""

    def handle(self) -> None:
        folder, words = json.loads(self.rfile.readline())
        before = os.getcwd()
        os.chdir(folder)
        try:
            result = invoke(*words)
        finally:
            os.chdir(before)
        self.wfile.write(json.dumps([result.exit_code, result.stdout, result.stderr]).encode() + b"\n")


class Repository:
    """A repository on this disk that calls the workflow; each event gets separate workspaces."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.remote = folder / "server/group/project"
        self.comments = folder / "comments.json"
        self.comments.write_text(json.dumps([{"id": 1, "user": {"type": "User"}, "body": "Looks good"}]))
        self.number = 0
        programs = folder / "bin"
        programs.mkdir()
        for name, text in (("tritoncp", TRITONCP), ("gh", GH)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        subprocess.run(["git", "init", "--quiet", "--bare", self.remote], check=True)

    def history(self) -> list[str]:
        """The runs of each case in the branch of the history, in order."""
        checkout = self.folder / "checkout"
        shutil.rmtree(checkout, ignore_errors=True)
        command = ["git", "clone", "--quiet", "--branch", "perf-history", self.remote, checkout]
        subprocess.run(command, check=True)
        return [f"{point.case} {point.ms}" for point in read(checkout).points]

    def run(self, event: str, inputs: dict[str, Any], env: dict[str, str], **facts: Any) -> dict[str, int]:
        """Run both jobs for an event. Returns the exit code of each step that ran, by name."""
        self.number += 1
        workflow = yaml.safe_load(WORKFLOW.read_text())
        declared = workflow[True]["workflow_call"]["inputs"]  # YAML reads the key "on" as true
        assert set(inputs) <= set(declared)
        artifact = self.folder / f"artifact{self.number}"
        names = {
            **{f"inputs.{name}": part["default"] for name, part in declared.items()},
            **{f"inputs.{name}": value for name, value in inputs.items()},
            "github.server_url": f"file://{self.folder}/server",
            "github.repository": "group/project",
            "github.token": "a token",
            "github.run_id": str(self.number),
            "github.event_name": event,
            "github.event.number": 7,
            "github.event.pull_request.head.repo.full_name": facts.get("head", "group/project"),
            "github.ref_name": facts.get("ref", "main"),
            "github.event.repository.default_branch": "main",
        }
        codes: dict[str, int] = {}
        for job in ("measure", "report"):
            space = self.folder / f"{job}{self.number}"
            space.mkdir()
            codes |= Job(self, names, space, artifact, env).run(workflow["jobs"][job]["steps"])
        return codes


class Job:
    """A job of an event, in a workspace."""

    def __init__(
        self, repository: Repository, names: dict[str, Any], space: Path, artifact: Path, env: dict[str, str]
    ) -> None:
        self.names, self.space, self.artifact = names, space, artifact
        self.env = {
            **{name: os.environ[name] for name in ("HOME", "TMPDIR") if name in os.environ},
            "PATH": f"{repository.folder / 'bin'}:{os.environ['PATH']}",
            "PORT": str(repository.port),
            "PYTHONUTF8": "1",
            "COMMENTS": str(repository.comments),
            "CALLS": str(repository.folder / "calls.jsonl"),
            "GITHUB_RUN_ID": names["github.run_id"],
            "GITHUB_RUN_ATTEMPT": "1",
            "GITHUB_SHA": "a" * 40,
            "GITHUB_STEP_SUMMARY": str(space / "summary.md"),
            **env,
        }

    def value(self, text: Any) -> Any:
        """Evaluate the expressions ${{ name }} in a value; any other expression is an error."""
        if not isinstance(text, str):
            return text
        return re.sub(r"\$\{\{ ([\w.-]+) \}\}", lambda match: str(self.names[match[1]]), text)

    def condition(self, text: str) -> bool:
        """Evaluate a condition: equations of names and texts, joined by &&."""

        def side(word: str) -> Any:
            return word[1:-1] if word.startswith("'") else self.names[word]

        return all(side(left) == side(right) for left, right in re.findall(r"(\S+) == (\S+)", text))

    def run(self, steps: list[dict[str, Any]]) -> dict[str, int]:
        codes: dict[str, int] = {}
        for step in steps:
            condition = step.get("if", "success()")
            failed = any(codes.values())
            if (failed and condition != "always()") or not (
                condition in ("success()", "always()") or self.condition(condition)
            ):
                continue
            if "uses" in step:
                self.use(step["uses"], self.value(step["with"].get("path", "")))
                continue
            script = self.space / "script.sh"
            assert "${{" not in step["run"], "a value inside of a script could be a command"
            script.write_text(step["run"])
            env = {name: str(self.value(value)) for name, value in step.get("env", {}).items()}
            done = subprocess.run(
                ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", script],
                cwd=self.space,
                env=self.env | env,
                capture_output=True,
                text=True,
            )
            codes[step["name"]] = done.returncode
            print(f"--- {step['name']}: {done.returncode}\n{done.stdout}{done.stderr}")
        return codes

    def use(self, action: str, path: str) -> None:
        name, _, version = action.partition("@")
        assert version, "actions are pinned"
        if name == "actions/upload-artifact":
            shutil.copytree(self.space / path, self.artifact)
        elif name == "actions/download-artifact":
            shutil.copytree(self.artifact, self.space / path)
        else:
            assert name == "actions/checkout"


@pytest.fixture
def repository(tmp_path) -> Iterator[Repository]:
    with socketserver.TCPServer(("127.0.0.1", 0), Commands) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield Repository(tmp_path, server.server_address[1])
        server.shutdown()
        thread.join()


def planted(**times: float | None) -> dict[str, str]:
    """The environment in which a run measures cases with these times."""
    texts = []
    for case, ms in times.items():
        (point,) = line(case.replace("_", "-"), [ms])
        texts.append(json.dumps(point.as_line() | {"run": "RUN"}))
    return {"PLANTED": json.dumps(texts)}


INPUTS = {"install": "true", "required": "causal-*", "only": "causal-* plan-*", "runs": 3}


@pytest.mark.long
def test_steps_measure_compare_comment_and_keep_a_history(repository):
    """A first push, a change that is fine, one that is slower, and the push of it."""
    codes = repository.run("push", INPUTS, planted(causal_fwd=1.0, plan_a=2.0))
    assert set(codes.values()) == {0} and "Comment" not in codes
    calls = [json.loads(text) for text in (repository.folder / "calls.jsonl").read_text().splitlines()]
    assert len(calls) == 3 and calls[0][:2] == ["--tier", "core"]
    assert calls[0][-4:] == ["--only", "causal-*", "--only", "plan-*"]
    assert repository.history() == ["causal-fwd 1.0", "plan-a 2.0"] * 3
    (first,) = json.loads(repository.comments.read_text())
    assert first["body"] == "Looks good"

    codes = repository.run("pull_request", INPUTS, planted(causal_fwd=1.0, plan_a=2.0))
    assert set(codes.values()) == {0} and "Add to the history" not in codes
    _, comment = json.loads(repository.comments.read_text())
    assert comment["body"].startswith("<!-- tritoncp perf: gpu -->\n✅ **tritoncp perf**: 2 cases")
    assert f"file://{repository.folder}/server/group/project/actions/runs/2" in comment["body"]
    assert (repository.folder / "artifact2/dashboard.html").stat().st_size > 100_000
    assert "2 cases" in (repository.folder / "artifact2/comparison.html").read_text()
    assert len(repository.history()) == 6, "a pull request adds nothing"

    codes = repository.run("pull_request", INPUTS, planted(causal_fwd=1.2, plan_a=2.0))
    assert codes["Pass or fail"] == 1 and codes["Compare"] == codes["Comment"] == 0
    _, comment = json.loads(repository.comments.read_text())
    assert "❌" in comment["body"] and "- `causal-fwd`: 20.0 % slower" in comment["body"], "edited in place"
    facts = json.loads((repository.folder / "artifact3/comparison.json").read_text())
    assert facts["verdict"] == "regression" and facts["reasons"][0]["case"] == "causal-fwd"
    assert "20.0 % slower" in (repository.folder / "measure3/summary.md").read_text()

    codes = repository.run("push", INPUTS, planted(causal_fwd=1.2, plan_a=2.0))
    assert codes["Pass or fail"] == 1 and codes["Add to the history"] == 0
    assert len(repository.history()) == 12, "the history has the regression, too"
    badge = json.loads((repository.folder / "checkout/badge.json").read_text())
    assert badge["label"] == "performance" and badge["message"], "for the README"


@pytest.mark.long
def test_a_run_without_a_required_case_or_without_any_measurement_fails(repository):
    repository.run("push", INPUTS, planted(causal_fwd=1.0, plan_a=2.0))
    codes = repository.run("pull_request", INPUTS, planted(plan_a=2.0), head="fork/project")
    assert codes["Pass or fail"] == 1 and "Comment" not in codes, "a fork's token cannot comment"
    summary = (repository.folder / "measure2/summary.md").read_text()
    assert "- `causal-*`: required, and no such case has a time after" in summary
    codes = repository.run("pull_request", INPUTS, planted(causal_fwd=1.0) | {"RUN_CODE": "3"})
    assert codes["Measure"] == 3 and "Compare" not in codes
    comment = json.loads(repository.comments.read_text())[-1]
    assert "❌ **tritoncp perf**: the measurement failed" in comment["body"]
    codes = repository.run("push", INPUTS, planted(), ref="another")
    assert codes["Compare"] == 0 and codes["Pass or fail"] == 3 and "Add to the history" not in codes


@pytest.mark.usefixtures("no_gpu", "instant")
def test_the_commands_of_the_page_run_as_printed(monkeypatch, tmp_path):
    """On a machine without a GPU, where measurements take no time."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/perf.md").read_text().partition("Everything below")[0]
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    commands = [text for block in blocks for text in block.splitlines()]
    commands += re.findall(r"`(tritoncp perf dashboard [^`]*)`", page)
    assert len(commands) == 5
    for command in commands:
        result = invoke(*shlex.split(command, comments=True)[1:])
        assert result.exit_code == 0, (command, result.output)
    assert (tmp_path / "dashboard.html").exists()


def test_the_page_calls_the_workflow_with_inputs_that_it_has():
    page = (ROOT / "docs/perf.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    call = yaml.safe_load(text)
    job, workflow = call["jobs"]["perf"], yaml.safe_load(WORKFLOW.read_text())
    assert job["uses"] == f"./{WORKFLOW.relative_to(ROOT)}"
    inputs = workflow[True]["workflow_call"]["inputs"]
    assert set(job["with"]) <= set(inputs) and set(call[True]) == {"pull_request", "push"}

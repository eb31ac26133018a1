"""The notes' table of compiled kernels: it matches the counts that `tritoncp inspect` keeps."""

import json
from pathlib import Path

from click.testing import CliRunner

from tritoncp.perf.dashboard.kernel_table import format_kernels, main

ROOT = Path(__file__).parents[3]


def test_the_notes_hold_the_counts_of_the_compiled_kernels():
    rows = json.loads((ROOT / "kernels/configs/resources.json").read_text())["rows"]
    assert f"\n{format_kernels(rows)}\n" in (ROOT / "perf/NOTES.md").read_text(), (
        "python -m tritoncp.perf.dashboard.kernel_table --write"
    )


def test_the_table_is_written_between_its_marks(tmp_path):
    notes = tmp_path / "NOTES.md"
    notes.write_text("before\n<!-- kernels: begin -->\nold\n<!-- kernels: end -->\nafter\n")
    result = CliRunner().invoke(main, ["--page", str(notes), "--write"])
    text = notes.read_text()
    assert result.exit_code == 0 and text.startswith("before\n") and text.endswith("\nafter\n")
    assert "| forward | 128 |" in text and "old" not in text
    notes.write_text("no marks")
    result = CliRunner().invoke(main, ["--page", str(notes), "--write"])
    assert result.exit_code == 2 and "<!-- kernels: begin -->" in result.output
    assert notes.read_text() == "no marks"

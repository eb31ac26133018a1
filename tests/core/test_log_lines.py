"""Log lines: which process is the first rank."""

import pytest

from tritoncp.core import log_lines


@pytest.mark.parametrize(
    ("name", "launched", "first"),
    [
        ("", None, True),
        ("", "0", True),
        ("", "1", False),
        ("rank 0 of 12", "5", True),  # the group's rank counts
        ("rank 10 of 12", "0", False),
    ],
)
def test_the_first_rank_is_read_from_the_group_or_else_from_the_launcher(
    name: str, launched: str | None, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_lines, "_rank_name", lambda: name)
    monkeypatch.delenv("RANK", raising=False)
    if launched is not None:
        monkeypatch.setenv("RANK", launched)
    assert log_lines.is_first_rank() == first

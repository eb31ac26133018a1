"""`python -m tritoncp.perf.studies.gallery`: the pictures of docs/masks.md and docs/schedules.md.

A Python block of a page that an image follows is the source of that image: it defines `mask_mod`,
`score_mod`, `options` (arguments of flex_attention) or `plan`. The other blocks run before it, in order.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
from tritoncp.perf.studies import gallery_pictures

PAGES = (Path("docs/masks.md"), Path("docs/schedules.md"))
FENCE = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n!\[[^\]]*\]\((?P<picture>[^)]+\.svg)\))?", re.M | re.S
)
RESULTS = ("mask_mod", "score_mod", "options", "plan")


class Block(NamedTuple):
    """A Python block of a page, the number of its first line, and the path of its picture from the page's
    folder."""

    code: str
    line: int
    picture: str | None


class Entry(NamedTuple):
    """A block with a picture that ran: the names that it and the blocks before it defined."""

    picture: str
    names: dict[str, Any]

    @property
    def size(self) -> tuple[int, int, int]:
        """(batch rows, heads, tokens) of the page's examples."""
        return self.names["B"], self.names["H"], self.names["S"]


def read_blocks(text: str) -> list[Block]:
    """List the Python blocks of a page.

    >>> read_blocks("Text.\\n```python\\nx = 1\\n```\\n\\n![x](pictures/x.svg)\\n")
    [Block(code='x = 1\\n', line=3, picture='pictures/x.svg')]
    """
    matches = FENCE.finditer(text)
    return [Block(m["code"], text.count("\n", 0, m.start()) + 2, m["picture"]) for m in matches]


def run_blocks(page: Path) -> Iterator[Entry]:
    """Run the blocks of a page and yield those with a picture. What such a block defines is its own; what the
    other blocks define, all later blocks see."""
    shared: dict[str, Any] = {"__name__": "page"}
    for block in read_blocks(page.read_text()):
        names = shared if block.picture is None else dict(shared)
        source = "\n" * (block.line - 1) + block.code  # line numbers of the page in tracebacks
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(source, str(page), "exec"), names)
        if block.picture is not None:
            if not any(name in names for name in RESULTS):
                raise ValueError(f"{page}:{block.line}: the block defines none of {', '.join(RESULTS)}")
            yield Entry(block.picture, names)


def draw(entry: Entry) -> str:
    """Draw the picture of an entry as SVG."""
    names = entry.names
    if "plan" in names:
        return gallery_pictures.draw_plan(names["plan"])
    mask_mod, score_mod, options = map(names.get, ("mask_mod", "score_mod", "options"))
    if options is not None:
        return gallery_pictures.draw_sinks(entry.size, options["sinks"])
    if score_mod is None:
        return gallery_pictures.draw_mask(entry.size, names["mask_mod"])
    return gallery_pictures.draw_score(entry.size, score_mod, mask_mod)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("pages", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(pages: tuple[Path, ...]) -> None:
    """Draw the pictures of PAGES (docs/masks.md and docs/schedules.md) from the Python blocks above them."""
    for page in pages or PAGES:
        if not page.is_file():
            raise click.UsageError(f"{page} is not here: run the command in a checkout, or name pages")
        for entry in run_blocks(page):
            path = page.parent / entry.picture
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(draw(entry))
            click.echo(path)


if __name__ == "__main__":
    main()

"""`python docs/gallery.py`: the pictures of docs/masks.md, docs/schedules.md and docs/selected_keys.md.

A Python block of a page that an image follows is the source of that image: it defines `mask_mod`,
`score_mod`, `options` (arguments of flex_attention), `selected` and its `plan`, or `plan` alone. The other
blocks run before it, in order.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor

from tritoncp.masks.closed_forms import causal
from tritoncp.masks.mask import create_block_mask
from tritoncp.masks.runs.block_runs import Kind
from tritoncp.planning.plan import Plan
from tritoncp.selection import Selection

Mod = Callable[..., Tensor]
Size = tuple[int, int, int]  # batch rows, heads, tokens

BLOCK = 16  # tokens of a block in pictures of masks
MOST_PANELS = 4  # heads or batch rows that a picture shows
HIDDEN, IN_MASKED_BLOCK, IN_FULL_BLOCK = "#e2e6ec", "#4477aa", "#08306b"
LOWER = ("#d9e6f2", "#a6c8e4", "#5f9fce", "#2b73b3", "#08306b")  # from little to much below 0
HIGHER = ("#fbe3d6", "#f7b799", "#e17860", "#b8222f", "#67001f")
INK = "#495057"
PAGES = (Path("docs/masks.md"), Path("docs/schedules.md"), Path("docs/selected_keys.md"))
FENCE = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n!\[[^\]]*\]\((?P<picture>[^)]+\.svg)\))?", re.M | re.S
)
RESULTS = ("mask_mod", "score_mod", "options", "selected", "plan")


# -- pages ---------------------------------------------------------------------------------------------------


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
    """Run the blocks of a page and yield the blocks with a picture, whose names are their own. Names of the
    other blocks are visible in all later blocks."""
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


def list_panels(entry: Entry) -> list[Panel]:
    """List the panels of the picture of an entry."""
    names = entry.names
    if "selected" in names:
        return of_selection(names["selected"], names["plan"])
    if "plan" in names:
        return of_plan(names["plan"])
    mask_mod, score_mod, options = map(names.get, ("mask_mod", "score_mod", "options"))
    if options is not None:
        return of_sinks(entry.size, options["sinks"])
    if score_mod is None:
        return of_mask(entry.size, names["mask_mod"])
    return of_score(entry.size, score_mod, mask_mod)


# -- panels --------------------------------------------------------------------------------------------------


class Panel(NamedTuple):
    """A square of a picture, with a caption. values: [rows, columns], numbers of ``colours``, -1 for paper;
    or [n]: heights of bars in these colours, or of a curve where there is none."""

    values: Tensor
    caption: str
    colours: Sequence[str] = ()


def of_mask(size: Size, mask_mod: Mod) -> list[Panel]:
    """Show the visible pairs, darker in full blocks; hidden pairs of masked blocks are grey, absent blocks
    white."""
    visible = evaluate(size, mask_mod)
    batch, heads, tokens = visible.shape[:3]
    mask = create_block_mask(mask_mod, batch, heads, tokens, tokens, BLOCK_SIZE=BLOCK)
    kinds = mask.runs.to_kinds().expand(batch, heads, -1, -1)
    kinds = kinds.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)
    full = (kinds == Kind.FULL) | (kinds == Kind.BOUNDED)
    cells = torch.where(visible, torch.where(full, 2, 1), torch.where(kinds == Kind.MASKED, 0, -1))
    return _split_panels(cells, (HIDDEN, IN_MASKED_BLOCK, IN_FULL_BLOCK))


def of_score(size: Size, score_mod: Mod, mask_mod: Mod | None) -> list[Panel]:
    """Show how a score_mod changes a score of 1 at each visible pair: blue lowers it, red raises it, grey
    does not change it. A score_mod that does not read positions is a curve over scores."""
    visible = evaluate(size, causal() if mask_mod is None else mask_mod).expand(size[0], size[1], -1, -1)
    change = evaluate(size, score_mod, torch.tensor(1.0)).detach().double() - 1
    if bool((change == change.flatten()[0]).all()):
        scores, index = torch.linspace(-100, 100, 65), torch.tensor(0)
        return [Panel(score_mod(scores, index, index, index, index).detach(), "scores from -100 to 100")]
    change = shared(torch.where(visible, change.expand(visible.shape), torch.nan))
    level = _find_level(change.abs() / float(change.nan_to_num().abs().max()))
    cells = torch.where(change < 0, level, level + len(LOWER))
    cells = torch.where(change == 0, len(LOWER + HIGHER), cells)
    cells = torch.where(change.isnan(), -1, cells)
    note = f"{change.nan_to_num().min():+.2g} to {change.nan_to_num().max():+.2g}"
    return _split_panels(cells, (*LOWER, *HIGHER, HIDDEN), note)


def of_sinks(size: Size, sinks: Tensor) -> list[Panel]:
    """Show the probabilities of equal scores under a causal mask, and of the sink as the first columns."""
    _, _, tokens = size
    visible = evaluate((1, 1, tokens), causal())[0, 0]
    scores = torch.where(visible, 0.0, -torch.inf)
    probabilities = torch.cat([sinks.detach()[:1].expand(tokens, 1), scores], 1).softmax(1)
    wide = torch.cat([probabilities[:, :1].expand(-1, 4), probabilities[:, 1:]], 1)[:, :tokens]
    cells = torch.where(wide > 0, _find_level((1 + wide.log2() / 6).clamp(min=0)), -1)
    return [Panel(cells, "sink: the four columns at the left", LOWER)]


def of_plan(plan: Plan) -> list[Panel]:
    """Show the listed blocks in the colours of the ranks that compute them, the work of each rank, and how
    many keys each rank reads of each other one."""
    ranks = colours_of_ranks(plan)
    kinds = plan.mask.runs.to_kinds()[0, 0]
    listed = (kinds == Kind.FULL) | (kinds == Kind.BOUNDED) | (kinds == Kind.MASKED)
    blocks = torch.where(listed, plan.owners[0][:, None].expand(kinds.shape), -1)
    reads = plan.traffic.double().fill_diagonal_(0) / max(plan.kv.lengths)
    level = (reads * len(LOWER) - 1e-6).ceil().long().clamp(max=len(LOWER)) - 1
    work = torch.tensor([float(cost) for cost in plan.work])
    return [
        Panel(blocks, "queries down, keys across", ranks),
        Panel(work, f"work: most {float(work.max() / work.mean()):.2f} of the mean", ranks),
        Panel(level, "keys: reader down, owner across", LOWER),
    ]


def of_selection(selected: Selection, plan: Plan) -> list[Panel]:
    """Show the pairs that the first head sees, in the colours of the queries' ranks, and for each rank the
    selected keys in the colours of the ranks that own them, those of its own in grey.

    selected: keys or blocks of all queries, in the order of the sequence
    """
    ranks, length = colours_of_ranks(plan), plan.kv.length
    shown = (selected.to_dense(length) & plan.mask.to_dense()[..., :length, :length])[0]
    owner = plan.owners[0].repeat_interleave(plan.mask.q_block)[:length]
    needed = torch.stack([shown[:, owner == rank].any(0).any(0) for rank in range(plan.world_size)])
    own = owner == torch.arange(plan.world_size)[:, None]
    keys = torch.where(needed, torch.where(own, len(ranks), owner), -1)
    part = float((needed & ~own).sum() / (~own).sum())
    return [
        Panel(torch.where(shown[0], owner[:, None], -1), "queries down, keys across", ranks),
        Panel(keys, f"ranks down: {part:.0%} of others' keys", (*ranks, HIDDEN)),
    ]


def colours_of_ranks(plan: Plan) -> list[str]:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    paint = colormaps["tab10" if plan.world_size <= 10 else "tab20"]
    return [to_hex(paint(rank % paint.N)) for rank in range(plan.world_size)]


def evaluate(size: Size, mod: Mod, *score: Tensor) -> Tensor:
    """Evaluate a mask_mod, or a score_mod on a score, for every pair: [B or 1, H or 1, S, S], one batch
    row or head where all are equal."""
    batch, heads, tokens = size
    b, h = torch.arange(batch).view(-1, 1, 1, 1), torch.arange(heads).view(1, -1, 1, 1)
    q, kv = torch.arange(tokens).view(1, 1, -1, 1), torch.arange(tokens).view(1, 1, 1, -1)
    return shared(mod(*score, b, h, q, kv).expand(batch, heads, tokens, tokens))


def shared(values: Tensor) -> Tensor:
    """Return one batch row, and one head, of values [B, H, S, S] where all are equal."""
    for dim in (0, 1):
        first = values.narrow(dim, 0, 1)
        same = (values == first) | (values.isnan() & first.isnan())
        values = first if bool(same.all()) else values
    return values


def _find_level(part: Tensor) -> Tensor:
    """Return the number of the shade for parts from 0 to 1."""
    return (part * len(LOWER) + 1e-6).floor().clamp(max=len(LOWER) - 1).nan_to_num().long()


def _split_panels(cells: Tensor, colours: Sequence[str], note: str = "") -> list[Panel]:
    """Return the panels of cells [B, H, S, S]: each batch row, or each head of the first row."""
    batch, heads = cells.shape[:2]
    if batch > 1:
        return [Panel(cells[b, 0], f"b = {b}", colours) for b in range(min(batch, MOST_PANELS))]
    if heads > 1:
        return [Panel(cells[0, h], f"h = {h}", colours) for h in range(min(heads, MOST_PANELS))]
    return [Panel(cells[0, 0], note, colours)]


def digest_of(panels: Sequence[Panel]) -> str:
    """Return a digest of the cells of panels, which is written into the picture."""
    cells = [panel.values.to(torch.float32).numpy().tobytes() for panel in panels]
    return hashlib.sha256(b"".join(cells)).hexdigest()[:16]


def write(panels: Sequence[Panel], path: Path) -> None:
    """Draw panels side by side, as an SVG file."""
    import matplotlib
    from matplotlib.figure import Figure

    captions = any(panel.caption for panel in panels)
    figure = Figure(figsize=(2.15 * len(panels), 2.35 if captions else 2.15), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, panel in zip(axes, panels):
        _draw_panel(axis, panel)
    with matplotlib.rc_context({"svg.hashsalt": "tritoncp", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", dpi=144, metadata={"Date": None, "Description": digest_of(panels)})


def _draw_panel(axis: Any, panel: Panel) -> None:
    from matplotlib.colors import ListedColormap

    values = panel.values.numpy()
    if values.ndim == 2:
        colours = ListedColormap(["#ffffff", *panel.colours])
        axis.imshow(
            values, colours, vmin=-1.5, vmax=len(panel.colours) - 0.5, interpolation="nearest", aspect="auto"
        )
    elif panel.colours:
        axis.bar(range(len(values)), values, color=panel.colours)
        axis.axhline(values.mean(), color=INK, linestyle="dashed", linewidth=1)
    else:
        axis.plot([-100, 100], [-100, 100], color="#adb5bd", linestyle="dashed")
        axis.plot(torch.linspace(-100, 100, len(values)), values, color=IN_MASKED_BLOCK, linewidth=2)
        axis.axhline(0, color="#adb5bd", linewidth=0.8)
        axis.axvline(0, color="#adb5bd", linewidth=0.8)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set_xlabel(panel.caption, fontsize=7.5, color=INK)
    for spine in axis.spines.values():
        spine.set_color("#adb5bd")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("pages", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(pages: tuple[Path, ...]) -> None:
    """Draw the pictures of PAGES (all pages with pictures) from the Python blocks above them."""
    for page in pages or PAGES:
        if not page.is_file():
            raise click.UsageError(f"{page} is not here: run the command in a checkout, or name pages")
        for entry in run_blocks(page):
            path = page.parent / entry.picture
            path.parent.mkdir(parents=True, exist_ok=True)
            write(list_panels(entry), path)
            click.echo(path)


if __name__ == "__main__":
    main()

"""Pictures of masks, score_mods and plans as small SVG files: the same bytes on every machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritoncp.masks.block_runs import Kind
from tritoncp.masks.closed_forms import causal
from tritoncp.masks.mask import Mask, create_block_mask
from tritoncp.planning.plan import Plan
from tritoncp.planning.report import colours

Mod = Callable[..., Tensor]

BLOCK = 16  # tokens of a block in pictures of masks
PANELS = 4  # most heads or batch rows that a picture shows
SIDE, GAP = 192, 16  # pixels of a panel, and between two
HIDDEN, IN_MASKED_BLOCK, IN_FULL_BLOCK = "#e2e6ec", "#4477aa", "#08306b"
LOWER = ("#d9e6f2", "#a6c8e4", "#5f9fce", "#2b73b3", "#08306b")  # from little to much below 0
HIGHER = ("#fbe3d6", "#f7b799", "#e17860", "#b8222f", "#67001f")
FRAME, INK = "#adb5bd", "#495057"


class Panel(NamedTuple):
    """A square of cells [rows, columns], each with the number of a colour, and a caption; -1 is paper."""

    cells: Tensor
    caption: str


def draw_mask(size: tuple[int, int, int], mask_mod: Mod) -> str:
    """Draw the visible pairs, darker in full blocks; hidden pairs of masked blocks are grey, absent blocks
    white."""
    visible = evaluate(size, mask_mod)
    batch, heads, tokens = visible.shape[:3]
    mask = create_block_mask(mask_mod, batch, heads, tokens, tokens, BLOCK_SIZE=BLOCK)
    kinds = block_kinds(mask).expand(batch, heads, -1, -1)
    kinds = kinds.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)
    full = (kinds == Kind.FULL) | (kinds == Kind.BOUNDED)
    cells = torch.where(visible, torch.where(full, 2, 1), torch.where(kinds == Kind.MASKED, 0, -1))
    return render(list_panels(cells), (HIDDEN, IN_MASKED_BLOCK, IN_FULL_BLOCK))


def block_kinds(mask: Mask) -> Tensor:
    """Return the kind of each block: int [B, H, rows, columns]."""
    return mask.runs.to_kinds()


def draw_score(size: tuple[int, int, int], score_mod: Mod, mask_mod: Mod | None) -> str:
    """Draw how a score_mod changes a score of 1 at each visible pair: blue lowers it, red raises it, grey
    does not change it. A score_mod that does not read positions is drawn as a curve."""
    visible = evaluate(size, mask_mod or causal()).expand(size[0], size[1], -1, -1)
    change = evaluate(size, score_mod, torch.tensor(1.0)).detach().double() - 1
    if bool((change == change.flatten()[0]).all()):
        return draw_curve(score_mod)
    change = shared(torch.where(visible, change.expand(visible.shape), torch.nan))
    most = float(change.nan_to_num().abs().max())
    level = (change.abs() / most * len(LOWER) + 1e-6).floor().clamp(max=len(LOWER) - 1)
    cells = torch.where(change < 0, level, level + len(LOWER))
    cells = torch.where(change == 0, len(LOWER + HIGHER), cells)
    cells = torch.where(change.isnan(), -1, cells).long()
    note = f"{change.nan_to_num().min():+.2g} to {change.nan_to_num().max():+.2g}"
    return render(list_panels(cells, note), (*LOWER, *HIGHER, HIDDEN))


def draw_curve(score_mod: Mod) -> str:
    """Draw the changed score over scores from -100 to 100."""
    index = torch.tensor(0)
    scores = torch.linspace(-100, 100, 65)
    changed = score_mod(scores, index, index, index, index).tolist()
    at = " ".join(
        f"{SIDE * (x + 100) / 200:.1f},{SIDE * (100 - y) / 200:.1f}" for x, y in zip(scores.tolist(), changed)
    )
    middle = SIDE / 2
    lines = (
        f"<path d='M0 {middle}H{SIDE}M{middle} 0V{SIDE}' stroke='{FRAME}'/><path d='M0 {SIDE}L{SIDE} 0' "
        f"stroke='{FRAME}' stroke-dasharray='4'/><polyline points='{at}' fill='none' "
        f"stroke='{IN_MASKED_BLOCK}' stroke-width='2'/>"
    )
    return wrap(SIDE, SIDE + 18, lines + frame(0) + text(middle, SIDE + 13, "scores from -100 to 100"))


def draw_sinks(size: tuple[int, int, int], sinks: Tensor) -> str:
    """Draw the probabilities of equal scores under a causal mask, and of the sink as the first columns."""
    _, _, tokens = size
    visible = evaluate((1, 1, tokens), causal())[0, 0]
    scores = torch.where(visible, 0.0, -torch.inf)
    probabilities = torch.cat([sinks.detach()[:1].expand(tokens, 1), scores], 1).softmax(1)
    wide = torch.cat([probabilities[:, :1].expand(-1, 4), probabilities[:, 1:]], 1)[:, :tokens]
    level = ((1 + wide.log2() / 6).clamp(min=0) * len(LOWER) + 1e-6).floor().clamp(max=len(LOWER) - 1)
    cells = torch.where(wide > 0, level, -1).long()
    return render([Panel(cells, "sink: the four columns at the left")], LOWER)


def draw_plan(plan: Plan) -> str:
    """Draw the listed blocks in the colours of the ranks that compute them, the work of each rank, and how
    many keys each rank reads of each other one."""
    kinds = block_kinds(plan.mask)[0, 0]
    owners = plan.owners[0][:, None].expand(kinds.shape)
    listed = (kinds == Kind.FULL) | (kinds == Kind.BOUNDED) | (kinds == Kind.MASKED)
    paint = ["#{:02x}{:02x}{:02x}".format(*colour) for colour in colours(plan.world_size)]
    reads = plan.traffic.double()
    own = torch.eye(len(reads), dtype=torch.bool)
    reads = reads.masked_fill(own, 0)
    level = (reads / max(plan.kv.lengths) * len(LOWER) - 1e-6).ceil().long().clamp(max=len(LOWER)) - 1
    blocks = draw_panel(Panel(torch.where(listed, owners, -1), "queries down, keys across"), paint, 0)
    bars = draw_bars(plan.work, paint, SIDE + GAP)
    traffic = draw_panel(Panel(level, "keys read: reader down, owner across"), LOWER, 2)
    return wrap(3 * SIDE + 2 * GAP, SIDE + 18, blocks + bars + traffic)


def draw_bars(work: Sequence[float], paint: Sequence[str], left: int) -> str:
    """Draw the work of each rank as bars, the mean as a dashed line."""
    wide, most, mean = SIDE / len(work), max(work), sum(work) / len(work)
    bars = "".join(
        f"<rect x='{left + wide * rank + wide / 10:.1f}' y='{SIDE - (SIDE - 8) * cost / most:.1f}' "
        f"width='{wide * 0.8:.1f}' height='{(SIDE - 8) * cost / most:.1f}' fill='{paint[rank]}'/>"
        for rank, cost in enumerate(work)
    )
    level = SIDE - (SIDE - 8) * mean / most
    line = f"<path d='M{left} {level:.1f}h{SIDE}' stroke='{INK}' stroke-dasharray='4'/>"
    return bars + line + text(left + SIDE / 2, SIDE + 13, f"work: most {most / mean:.2f} of the mean")


def evaluate(size: tuple[int, int, int], mod: Mod, *score: Tensor) -> Tensor:
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


def list_panels(cells: Tensor, note: str = "") -> list[Panel]:
    """List the panels of cells [B, H, S, S]: each batch row, or each head of the first row."""
    batch, heads = cells.shape[:2]
    if batch > 1:
        return [Panel(cells[b, 0], f"b = {b}") for b in range(min(batch, PANELS))]
    if heads > 1:
        return [Panel(cells[0, h], f"h = {h}") for h in range(min(heads, PANELS))]
    return [Panel(cells[0, 0], note)]


def render(panels: Sequence[Panel], paint: Sequence[str]) -> str:
    """Draw panels side by side."""
    parts = [draw_panel(panel, paint, place) for place, panel in enumerate(panels)]
    captions = any(panel.caption for panel in panels)
    return wrap(len(panels) * (SIDE + GAP) - GAP, SIDE + 18 * captions, "".join(parts))


def draw_panel(panel: Panel, paint: Sequence[str], place: int) -> str:
    """Draw one panel: a path of horizontal strokes for each colour."""
    rows, columns = panel.cells.shape
    strokes: dict[int, list[str]] = {}
    for row, line in enumerate(panel.cells.tolist()):
        column = 0
        for colour, cells in groupby(line):
            count = len(list(cells))
            if colour >= 0:
                strokes.setdefault(colour, []).append(f"M{column} {row}.5h{count}")
            column += count
    left = place * (SIDE + GAP)
    paths = "".join(f"<path d='{''.join(strokes[c])}' stroke='{paint[c]}'/>" for c in sorted(strokes))
    scale = f"translate({left} 0) scale({SIDE / columns:g} {SIDE / rows:g})"
    square = f"<g transform='{scale}' shape-rendering='crispEdges'>{paths}</g>" + frame(left)
    return square + (text(left + SIDE / 2, SIDE + 13, panel.caption) if panel.caption else "")


def frame(left: float) -> str:
    """Draw the border of a panel."""
    return (
        f"<rect x='{left + 0.5}' y='.5' width='{SIDE - 1}' height='{SIDE - 1}' fill='none' stroke='{FRAME}'/>"
    )


def text(x: float, y: float, words: str) -> str:
    """Write words, centred."""
    return f"<text x='{x:g}' y='{y:g}' text-anchor='middle' fill='{INK}'>{words}</text>"


def wrap(wide: float, high: float, content: Any) -> str:
    """Return a whole SVG file."""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{wide:g}' height='{high:g}' "
        f"viewBox='0 0 {wide:g} {high:g}' font-family='sans-serif' font-size='12'>"
        f"<rect width='100%' height='100%' fill='#fff'/>{content}</svg>\n"
    )

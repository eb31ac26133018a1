"""Self-contained pages of tables and charts: Bokeh's models and code, a style sheet and text in one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bokeh.document import Document
from bokeh.embed import components
from bokeh.models import CDSView, ColumnDataSource, CustomJS, InlineStyleSheet
from bokeh.models.widgets import DataTable, HTMLTemplateFormatter, TableColumn
from bokeh.resources import Resources
from jinja2 import Environment, FileSystemLoader

ASSETS = Path(__file__).parent / "assets"
TEMPLATES = Environment(
    loader=FileSystemLoader(ASSETS), autoescape=True, trim_blocks=True, lstrip_blocks=True
)
ROW, HEAD = 30, 34  # pixels of a table's rows and of its head
MOST_ROWS = 14  # visible rows of a table; more scroll
# Templates of cells: `value` is the cell's value, other columns are available by name; <%- escapes, <%= does
# not.
NUMBER = '<%= Number.isFinite(value) ? value.toPrecision(4) : "–" %>'
PERCENT = (
    '<%= Number.isFinite(value) ? (value < 0 ? "−" : "+") + Math.abs(100 * value).toFixed(1) + " %" : "–" %>'
)


class Column(NamedTuple):
    """A column of a table: its head, its values, the template of its cells, its width in pixels."""

    title: str
    values: Sequence[Any]
    width: int = 90
    template: str = "<%- value %>"


def make_table(
    columns: Mapping[str, Column], more: dict[str, Any] | None = None, row_filter: Any = None
) -> DataTable:
    """Make a table that is sorted by a click on a column's head. more: hidden columns for templates and
    scripts; row_filter: a Bokeh filter"""
    source = ColumnDataSource({name: [*column.values] for name, column in columns.items()} | (more or {}))
    heads = [
        TableColumn(
            field=name,
            title=column.title,
            width=column.width,
            formatter=HTMLTemplateFormatter(template=column.template),
        )
        for name, column in columns.items()
    ]
    rows = len(next(iter(columns.values())).values)
    return DataTable(
        source=source,
        columns=heads,
        view=CDSView() if row_filter is None else CDSView(filter=row_filter),
        index_position=None,
        autosize_mode="none",
        reorderable=False,
        sizing_mode="stretch_width",
        row_height=ROW,
        height=HEAD + ROW * max(1, min(rows, MOST_ROWS)) + 12,
        stylesheets=[style_sheet("widgets.css")],
    )


def style_sheet(name: str) -> InlineStyleSheet:
    return InlineStyleSheet(css=(ASSETS / name).read_text())


def render(template: str, models: Mapping[str, Any], script: CustomJS, **values: Any) -> str:
    """Return a page as HTML: a template in assets/, with ``values`` and, in ``places``, the models by name.
    script: runs when the models are loaded"""
    document = Document()
    for model in models.values():
        document.add_root(model)
    document.js_on_event("document_ready", script)
    code, places = components(dict(models), wrap_script=False)
    bokeh = Resources(mode="inline", components=["bokeh", "bokeh-widgets", "bokeh-tables"]).js_raw
    return fill(template, places=places, scripts=[*bokeh, code], **values)


def fill(template: str, **values: Any) -> str:
    """Return a template in assets/ with these values, which are escaped."""
    return TEMPLATES.get_template(template).render(**values)


def percent(part: float) -> str:
    """
    >>> percent(0.0123), percent(-0.5)
    ('+1.2 %', '−50.0 %')
    """
    return f"{'−' if part < 0 else '+'}{abs(100 * part):.1f} %"


def format_number(value: Any, unit: float = 1.0) -> str:
    """Format a number to four digits, in a unit; "–" for any other value."""
    return f"{value / unit:.4g}" if isinstance(value, int | float) else "–"


TEMPLATES.filters.update(percent=percent, number=format_number)

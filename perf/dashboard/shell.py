"""Self-contained pages of tables and charts: text, a style sheet, Bokeh's charts and code in one file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bokeh.document import Document
from bokeh.embed import components
from bokeh.models import CustomJS
from bokeh.resources import Resources
from jinja2 import Environment, FileSystemLoader

ASSETS = Path(__file__).parent / "assets"
TEMPLATES = Environment(
    loader=FileSystemLoader(ASSETS), autoescape=True, trim_blocks=True, lstrip_blocks=True
)


def render(template: str, models: Mapping[str, Any], script: CustomJS, **values: Any) -> str:
    """Return a page as HTML: a template in assets/, with ``values`` and, in ``places``, the models by name.
    script: runs when the models are loaded"""
    document = Document()
    for model in models.values():
        document.add_root(model)
    document.js_on_event("document_ready", script)
    code, places = components(dict(models), wrap_script=False)
    bokeh = Resources(mode="inline", components=["bokeh"]).js_raw
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

"""Sphinx's settings of the documentation site: `make docs`. Pages are Markdown (MyST), the API reference
comes from docstrings."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging

ROOT = Path(__file__).parents[1]
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
sys.path.insert(0, str(ROOT))  # docstrings of this checkout, whatever is installed

from tritoncp import __version__  # noqa: E402

logger = logging.getLogger(__name__)

project = "tritoncp"
author = "tritoncp contributors"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4  # anchors of headings, as GitHub makes them
myst_enable_extensions = ["attrs_block"]
nitpicky = False  # types of torch in signatures have no page here; links between pages are always checked

copybutton_prompt_text = r"\$ |>>> |\.\.\. "  # left out of what is copied, and so is output below prompts
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_theme_options = {
    "source_repository": REPOSITORY,  # "edit this page" and "view source" of each page
    "source_branch": "main",
    "source_directory": "docs/",
    "footer_icons": [{"name": "Repository", "url": REPOSITORY, "html": "Repository", "class": ""}],
}
html_title = f"tritoncp {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_show_copyright = False

autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_display_short_literal_types = True
maximum_signature_line_length = 90

linkcheck_timeout = 20
linkcheck_anchors = False  # GitHub and arXiv make anchors by scripts

default_role = "code"  # `name` in docstrings

# Classes whose objects functions of the package make: their constructors are not for users.
MADE_BY_FUNCTIONS = {"Mask", "Plan", "Runs", "Kind", "MaskMod", "World", "Report", "Timeline"}

# Pages of the site in the place of files at the top of the checkout, which links of pages name for readers of
# the files.
TOP_FILES = {"README": "index", "CHANGELOG": "changelog", "CONTRIBUTING": "contributing"}
LINK_UP = re.compile(r"\]\((?P<up>(?:\.\./)+)(?P<file>[\w./-]+)\.md(?:#[\w-]*)?\)")


def link_pages(app: Sphinx, page: str, source: list[str]) -> None:
    """Link pages of the site in the place of files at the top of the checkout; other Markdown files outside
    of docs/ become downloads."""

    def link(match: re.Match[str]) -> str:
        if match["up"].count("/") <= page.count("/"):
            return match[0]
        top = TOP_FILES.get(match["file"])
        return f"](/{top}.md)" if top else f"](path:{match['up']}{match['file']}.md)"

    source[0] = LINK_UP.sub(link, source[0])


OPTIONAL_PART = re.compile(r"<!-- where importable: (.*?) -->\n(.*?)<!-- end -->\n", re.DOTALL)


def leave_out_parts(app: Sphinx, page: str, source: list[str]) -> None:
    """Leave out the parts of a page about modules of packages that are not installed."""

    def part(match: re.Match[str]) -> str:
        return match[2] if all(map(importlib.util.find_spec, match[1].split(", "))) else ""

    source[0] = OPTIONAL_PART.sub(part, source[0])


def mark_parameters(app: Sphinx, what: str, name: str, item: Any, options: Any, lines: list[str]) -> None:
    """Begin a paragraph where a docstring describes parameters, `query, key: [B, H, S, D]; value: ...`, with
    their names as code."""
    parameters = parameter_names(item) if what in ("function", "method", "class") else set()

    def mark(match: re.Match[str]) -> str:
        names = match["names"].replace("`", "").split(", ")
        if not parameters.issuperset(names):
            return match[0]
        return ("." if match["before"] else "") + "\n\n" + ", ".join(f"``{name}``" for name in names) + ": "

    text = "\n".join(lines)
    head, example, tail = text.partition("\n>>> ")
    head = re.sub(r"(?P<before>^|[;.] )(?P<names>`*\w+`*(?:, `*\w+`*)*): +(?=\S)", mark, head, flags=re.M)
    if parameters:
        head = join_continuations(head)
    lines[:] = (head + example + tail).splitlines()


def join_continuations(text: str) -> str:
    """Remove the indentation of lines that continue a line which is not indented."""
    lines, in_paragraph = [], False
    for line in text.split("\n"):
        indented, item = line.startswith(" "), line.lstrip().startswith(("-", "*", "..", ":"))
        lines.append(line.lstrip() if in_paragraph and indented and not item else line)
        in_paragraph = bool(line.strip()) and (in_paragraph or not indented) and not item
    return "\n".join(lines)


def parameter_names(item: Any) -> set[str]:
    """Return the names of the parameters of a function or class."""
    try:
        return set(inspect.signature(item).parameters)
    except (TypeError, ValueError):
        return set()


def hide_constructors(
    app: Sphinx, what: str, name: str, item: Any, options: Any, signature: str, returns: str
) -> tuple[str, str | None] | None:
    """Show classes that functions make without the parameters of their constructors."""
    return ("", None) if what == "class" and name.rpartition(".")[2] in MADE_BY_FUNCTIONS else None


def check_addresses(app: Sphinx, page: nodes.document) -> None:
    """Warn about malformed addresses of external links; `make docs LINKCHECK=1` requests them."""
    for link in page.findall(nodes.reference):
        address = link.get("refuri", "")
        if "://" in address and not is_well_formed(address):
            logger.warning("malformed address %r", address, location=link, type="address")


def is_well_formed(address: str) -> bool:
    """Return whether an external address is https, with a host name and without blanks."""
    parts = urlsplit(address)
    host = bool(re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.hostname or ""))
    return parts.scheme == "https" and host and not re.search(r"[\s<>]", address)


def leave_out_overloads(app: Sphinx, *args: Any) -> None:
    """Have the API page begin functions with one signature and the description, not with all overloads."""
    for module in ("attention", "plans", "varlen"):
        analyzer = ModuleAnalyzer.for_module(f"tritoncp.api.{module}")
        analyzer.analyze()
        analyzer.overloads.clear()


# Pages that became sections of others, for links from elsewhere.
MOVED = {
    "balance": "schedules.html#balancers-compared",
    "checkpointing": "torch_compile.html#selective-checkpointing",
    "environment": "commands.html#environment-variables",
    "scaling": "schedules.html#plans-at-scale",
    "state": "torch_compile.html#state-that-a-mask-mod-or-score-mod-reads",
}


def write_redirects(app: Sphinx, error: Exception | None) -> None:
    """Write a page that leads to the new place of each page that moved."""
    if error is None and app.builder.name == "html":
        for page, place in MOVED.items():
            link = f'<meta http-equiv="refresh" content="0; url={place}"><a href="{place}">moved</a>'
            Path(app.outdir, f"{page}.html").write_text(f"<!doctype html><title>tritoncp</title>{link}\n")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("env-before-read-docs", leave_out_overloads)
    app.connect("source-read", link_pages)
    app.connect("source-read", leave_out_parts)
    app.connect("autodoc-process-docstring", mark_parameters)
    app.connect("autodoc-process-signature", hide_constructors)
    app.connect("doctree-read", check_addresses)
    app.connect("build-finished", write_redirects)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

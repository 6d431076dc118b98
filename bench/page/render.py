"""Renders a page as HTML, or as Markdown; the templates only place what it holds."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..common.text import escape_markdown as escaped
from . import drawing
from .page import Cell, Page

_TEMPLATES = FileSystemLoader(Path(__file__).parent / "templates")
"""Templates by their path: a name of ours may be a package of the user's by now."""


def render_html(page: Page) -> str:
    """Return the page as one self-contained HTML document."""
    environment = _make_environment(html=True)
    # The policy lets this one script run, by its hash; no text of a run can become another.
    script, _, _ = _TEMPLATES.get_source(environment, "report.js")
    sha256 = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template, left = environment.get_template("report.html.j2"), dict(page.terms)

    def explain_terms(terms: Iterable[str]) -> list[str]:
        return [f"{term}: {left.pop(term)}." for term in dict.fromkeys(terms) if term in left]

    # The template places from top to bottom: each term is defined where it first stands.
    return template.render(page=page, explain=explain_terms, script=script, script_sha256=sha256)


def render_markdown(page: Page) -> str:
    """Return a summary for a pull request, in GitHub's dialect: answers first, numbers folded."""
    rendered = _make_environment(html=False).get_template("report.md.j2").render(page=page)
    return re.sub(r"\n{3,}", "\n\n", rendered).strip("\n") + "\n"


def _make_environment(*, html: bool) -> Environment:
    environment = Environment(
        loader=_TEMPLATES,
        autoescape=html,  # noqa: S701 - Markdown is escaped by a filter of its own
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"options": _split_options, "css": _quote_css, "unbroken": _keep_unbroken}
    environment.filters |= {"md": escaped, "md_cell": _format_markdown_cell, "svg": drawing.render_svg}
    return environment


def _split_options(command: str) -> list[str]:
    """Split a command before its options, where a line may break."""
    return re.split(r" (?=--)", command)


def _keep_unbroken(shown: str) -> str:
    """Escape a text, in which an interval stays on one line by a word joiner, and an option by a span."""
    text = html.escape(shown).replace("\N{EN DASH}", "\N{EN DASH}\N{WORD JOINER}")
    return re.sub(r"--[a-z][\w-]*", r'<span class="option">\g<0></span>', text)


def _quote_css(text: str) -> str:
    """Write a string of CSS in which no character has a meaning."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\{ord(c):x} " for c in text)


def _format_markdown_cell(cell: Cell) -> str:
    return escaped(cell if isinstance(cell, str) else " ".join(link.label for link in cell))

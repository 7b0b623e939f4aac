"""Results as one HTML file that needs nothing else: no script, no remote asset, light and dark, screen and print.

Every value is escaped by the template engine, and a content policy inside the page forbids scripts and
requests, so a hostile class name stays text."""

from __future__ import annotations

import os
from pathlib import Path

from gradfix._version import __version__
from gradfix.methods.results import Results
from gradfix.report.sections import sections


def render_html(results: Results, title: str = "What to ship") -> str:
    """The page as text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("gradfix.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("report.html.j2")
    return template.render(results=results, sections=sections(results), title=title, version=__version__)


def write_report(results: Results, path: str | os.PathLike[str], title: str = "What to ship") -> Path:
    """Write the page, and the same in Markdown beside it; returns the page's path."""
    from gradfix.checkpoints.write import write_text
    from gradfix.report.markdown import to_markdown

    page = Path(path)
    write_text(page, render_html(results, title))
    write_text(page.with_suffix(".md"), to_markdown(results, title))
    return page

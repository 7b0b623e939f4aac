"""Reports: results as one self-contained HTML page, and as Markdown."""

from gradfix.report.html import render_html, write_report
from gradfix.report.markdown import to_markdown

__all__ = ["render_html", "to_markdown", "write_report"]

"""Hooks of `make site`: a link to what lies outside docs/, and so has no page, becomes a path.

One to a report of benchmarks/results leads to the page that scripts/site_reports.py makes of it.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)[^)]*\)")
_REPORT = re.compile(r"benchmarks/results/([\w-]+)\.json")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace links that leave the documentation."""
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, match[2]))
        if report := _REPORT.fullmatch(path):  # as HTML, because mkdocs knows of no such page
            address = posixpath.relpath(f"reports/{report[1]}.html", folder or ".")
            return f'<a href="{address}">{match[1]}</a>'
        return match[0] if path.startswith("docs/") else f"{match[1]} (`{path}`)"

    return _LINK.sub(replaced, markdown)

"""Hooks of `make site`: a link to what lies outside docs/, and so has no page, becomes a path."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)[^)]*\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace links that leave the documentation."""
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, match[2]))
        return match[0] if path.startswith("docs/") else f"{match[1]} (`{path}`)"

    return _LINK.sub(replaced, markdown)

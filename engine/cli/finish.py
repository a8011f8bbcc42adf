"""How every evaluation ends: the report written, the journal gone, a table shown, one JSON line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from engine.cli.reports import store


def finish(
    report: Any,
    path: Path | None,
    as_json: bool,
    table: Callable[[dict[str, Any]], None],
    journals: Any,
    **more: Any,
) -> None:
    """Write the report, delete the journal, show the table, end with the JSON line and ``more`` in it."""
    from engine.cli.tables import figures

    stored = store(report, path)
    journals.opened.remove()
    if not as_json:
        table(report.document)
    click.echo(json.dumps(figures(report.document) | more | {"report": str(stored)}))

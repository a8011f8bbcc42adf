"""Commands called in this process, as the edge calls them: arguments in, exit code and texts out."""

from __future__ import annotations

import click
import pytest

from bridge.cli import run_edge
from tests.fixtures.repo import Done


def call(command: click.Command, capsys: pytest.CaptureFixture[str], *args: str) -> Done:
    """Run one command and return what it said."""
    capsys.readouterr()
    code = run_edge(command, list(args))
    said = capsys.readouterr()
    return Done(code, said.out, said.err)

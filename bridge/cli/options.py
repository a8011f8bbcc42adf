"""Options that several commands share."""

from __future__ import annotations

import click

allow_unsigned_option = click.option(
    "--allow-unsigned",
    is_flag=True,
    help="Where runners are trusted: show a result that none of them signed all the same, and say so.",
)

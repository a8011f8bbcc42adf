"""``kakeya_mac result``: fetch a result, check it, and show or save it."""

from __future__ import annotations

from pathlib import Path

import click

from bridge.cli.options import allow_unsigned_option, output_option
from bridge.cli.output import Connection, Presentation, present, request_command


@click.command(
    epilog="""\b
Examples:
  kakeya_mac result 20260301t120000z0123456789ab
  kakeya_mac result mac-bridge/probe-20260301t120000z0123456789ab -o out/ --json
  kakeya_mac result 20260301t12 --verify 6 -o out/

Exit code: that of the result's status; 3 when it cannot be believed, answers something else, this client's
gate rejects it, or --verify refutes it; 4 no result yet; 6 it cannot be replayed; 7 it passed, unsigned."""
)
@request_command
@output_option("Save every published file in this new or empty folder.")
@click.option(
    "--verify", type=click.IntRange(1), metavar="N", help="Draw N rows of the report and replay them here."
)
@allow_unsigned_option
def result(link: Connection, handle: str, as_json: bool, output: Path | None, verify: int | None) -> int:
    """Fetch the result of HANDLE, check digests and signature, judge its evidence, and show or save it.

    Nothing is checked out, nothing is left in this clone. With --verify the report of a result that passed is
    replayed by the engine that is installed here, with the models it names; -o then saves verification.json,
    too, signed with this client's key where there is one.
    """
    return present(link, link.look_up_result(handle)[1], Presentation(as_json, output, verify=verify))

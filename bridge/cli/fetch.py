"""``kakeya_mac fetch``: the published files of requests, checked, into folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bridge.bus.results import believe
from bridge.cli import show, show_error
from bridge.cli.completion import complete_handle
from bridge.cli.options import allow_unsigned_option, path_option
from bridge.cli.output import Connection, bus_command
from bridge.client.save import save
from bridge.errors import BridgeError, RemoteUnreachable
from bridge.protocol.sanitize import clean_line


@click.command(
    epilog="""\b
Examples:
  kakeya_mac fetch 20260301t120000z0123456789ab
  kakeya_mac fetch 20260301t12 20260302t09 -o results/ --json

JSON: {"requests": [...], "exit_code": N}; each request has handle, nonce, status, signature, authenticity,
output, files, error (null when it was fetched) and exit_code.

Exit code: 0 when all were fetched and believed, whatever their status; else that of the first that was not:
2 no such request, or a folder that is not empty; 3 not to be believed, 4 no result yet, 6 git
or the network."""
)
@click.argument("handles", metavar="HANDLE...", nargs=-1, required=True, shell_complete=complete_handle)
@path_option("-o", "--output", default=Path(), text="Where the folders named by nonce go (default: here).")
@bus_command
@allow_unsigned_option
def fetch(link: Connection, handles: tuple[str, ...], output: Path, as_json: bool) -> int:
    """Check the results of HANDLE... and save every published file into DIR/<nonce>/.

    Digests, identity and signature are checked; the evidence is not judged: `kakeya_mac result` or
    `kakeya_mac gate` do that.
    """
    rows: list[dict[str, Any]] = []
    for handle in handles:
        row: dict[str, Any] = dict.fromkeys(("nonce", "status", "signature", "authenticity", "output"))
        rows.append(row | {"handle": handle, "files": [], "error": None, "exit_code": 0})
        try:
            nonce, answer = link.look_up_result(handle)
            trusted, allow = link.config.trusted_runners, link.config.allow_unsigned
            believed = believe(answer, trusted=trusted, allow_unsigned=allow)
            folder = output / nonce
            written = save(believed, answer, folder)
            rows[-1] |= {
                "nonce": nonce,
                "status": believed.result.verdict.status,
                "signature": believed.signature,
                "authenticity": clean_line(believed.sentence),
                "output": str(folder),
                "files": [str(path.relative_to(folder)) for path in written],
            }
        except RemoteUnreachable:
            raise
        except BridgeError as error:
            rows[-1] |= {"error": error.message, "exit_code": error.exit_code}
            if not as_json:
                show_error(error, label=f"error: {handle}: ")
    lines = (
        f"{row['nonce']}  {row['status']}, {row['authenticity']}: files are in {row['output']}"
        for row in rows
        if row["error"] is None
    )
    code = next((row["exit_code"] for row in rows if row["exit_code"]), 0)
    return show(as_json, {"requests": rows, "exit_code": code}, lines, untrusted=("requests",))

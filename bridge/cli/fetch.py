"""``kakeya_mac fetch``: the published files of requests, checked, into folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bridge.bus.results import believe
from bridge.cli import echo_json, show_error
from bridge.cli.options import allow_unsigned_option, json_option, remote_option
from bridge.cli.output import Connection, connect
from bridge.client.save import save
from bridge.errors import BridgeError, RemoteUnreachable
from bridge.protocol.sanitize import clean_line


@click.command(
    epilog="""\b
Examples:
  kakeya_mac fetch 20260301t120000z0123456789ab
  kakeya_mac fetch 20260301t12 20260302t09 -o results/ --json

JSON: one line {"requests": [...], "exit_code": N}. Each request has handle, nonce, status (null when it was
not fetched), signature, authenticity, output, files, error (null when it was) and exit_code.

Exit code: 0 when all were fetched and believed, whatever their status; otherwise that of the first one that
was not: 3 not to be believed, 4 no result yet, 6 no such request, or a folder that cannot be written."""
)
@click.argument("handles", metavar="HANDLE...", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    metavar="DIR",
    help="Where the folders named by nonce go (default: here).",
)
@json_option
@remote_option
@allow_unsigned_option
def fetch(
    handles: tuple[str, ...], output: Path, as_json: bool, remote: str | None, allow_unsigned: bool
) -> int:
    """Check the results of HANDLE... and save every published file into DIR/<nonce>/.

    Digests, identity and signature are checked; the evidence is not judged: `kakeya_mac result` or
    `kakeya_mac gate` do that.
    """
    link = connect(remote)
    rows: list[dict[str, Any]] = []
    for handle in handles:
        row: dict[str, Any] = dict.fromkeys(("nonce", "status", "signature", "authenticity", "output"))
        row |= {"handle": handle, "files": [], "error": None, "exit_code": 0}
        rows.append(row)
        try:
            row |= _fetch(handle, link, output, allow_unsigned)
        except RemoteUnreachable:
            raise
        except BridgeError as error:
            row |= {"error": error.message, "exit_code": error.exit_code}
            if not as_json:
                show_error(error, label=f"error: {handle}: ")
            continue
        if not as_json:
            said = f"{row['status']}, {row['authenticity']}: {len(row['files'])} files in {row['output']}"
            click.echo(f"{row['nonce']}  {said}")
    code = next((row["exit_code"] for row in rows if row["exit_code"]), 0)
    if as_json:
        echo_json({"requests": rows, "exit_code": code}, untrusted=("requests",))
    return int(code)


def _fetch(handle: str, link: Connection, output: Path, allow_unsigned: bool) -> dict[str, Any]:
    nonce, answer = link.look_up_result(handle)
    allow = allow_unsigned or link.config.allow_unsigned
    believed = believe(answer, trusted=link.config.trusted_runners, allow_unsigned=allow)
    folder = output / nonce
    written = save(believed, answer, folder)
    return {
        "nonce": nonce,
        "status": believed.result.verdict.status,
        "signature": believed.signature,
        "authenticity": clean_line(believed.sentence),
        "output": str(folder),
        "files": [str(path.relative_to(folder)) for path in written],
    }

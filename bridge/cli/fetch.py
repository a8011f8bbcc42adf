"""``kakeya_mac fetch``: the published files of requests, checked, into folders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bridge.cli import echo_json
from bridge.cli.options import allow_unsigned_option, remote_option

if TYPE_CHECKING:
    from bridge.client.remotes import Remote
    from bridge.errors import BridgeError
    from bridge.git.repo import GitRepo
    from bridge.settings import Settings


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
@click.option("--json", "as_json", is_flag=True, help="One JSON line instead of text.")
@remote_option
@allow_unsigned_option
def fetch(
    handles: tuple[str, ...], output: Path, as_json: bool, remote: str | None, allow_unsigned: bool
) -> int:
    """Check the results of HANDLE... and save every published file into DIR/<nonce>/.

    Digests, identity and signature are checked; the evidence is not judged: `kakeya_mac result` or
    `kakeya_mac gate` do that.
    """
    from bridge.cli.output import connect
    from bridge.errors import BridgeError, RemoteUnreachable

    config, git, bus = connect(remote)
    allow_unsigned = allow_unsigned or config.allow_unsigned
    documents: list[dict[str, Any]] = []
    for handle in handles:
        try:
            document = _fetch(handle, git, bus, config, output, allow_unsigned)
        except RemoteUnreachable:
            raise
        except BridgeError as error:
            document = _failure(handle, error)
        documents.append(document)
        if not as_json:
            _show(document)
    code = next((int(one["exit_code"]) for one in documents if one["exit_code"]), 0)
    if as_json:
        for one in documents:
            one.pop("remedy", None)
        echo_json({"requests": documents, "exit_code": code}, untrusted=("requests",))
    return code


def _fetch(
    handle: str, git: GitRepo, bus: Remote, config: Settings, output: Path, allow_unsigned: bool
) -> dict[str, Any]:
    from bridge.bus.results import believe
    from bridge.client.fetch import look_up
    from bridge.client.save import save
    from bridge.errors import WaitTimeout
    from bridge.protocol.sanitize import clean_line

    found = look_up(git, bus, handle, config.state_dir)
    if found.answer is None:
        raise WaitTimeout(f"{found.nonce} has no result yet", f"kakeya_mac wait {found.nonce}")
    believed = believe(found.answer, trusted=config.trusted_runners, allow_unsigned=allow_unsigned)
    folder = output / found.nonce
    written = save(believed, found.answer, folder)
    return {
        "handle": handle,
        "nonce": found.nonce,
        "status": believed.result.verdict.status,
        "signature": believed.signature,
        "authenticity": clean_line(believed.sentence),
        "output": str(folder),
        "files": [str(path.relative_to(folder)) for path in written],
        "error": None,
        "exit_code": 0,
    }


def _failure(handle: str, error: BridgeError) -> dict[str, Any]:
    unknown = dict.fromkeys(("nonce", "status", "signature", "authenticity", "output"))
    return {
        **unknown,
        "handle": handle,
        "files": [],
        "error": error.message,
        "remedy": error.remedy,
        "exit_code": error.exit_code,
    }


def _show(document: dict[str, Any]) -> None:
    if document["error"] is None:
        count = len(document["files"])
        click.echo(
            f"{document['nonce']}  {document['status']}, {document['authenticity']}:"
            f" {count} files in {document['output']}"
        )
        return
    click.echo(f"error: {document['handle']}: {document['error']}", err=True)
    if document["remedy"]:
        click.echo(f"  {document['remedy']}", err=True)

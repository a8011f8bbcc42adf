"""``kakeya_mac result``: fetch a result, check it, and show or save it."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from bridge.bus.results import Believed
from bridge.cli import warn
from bridge.cli.options import allow_unsigned_option, handle_options, output_option
from bridge.cli.output import Presentation, connect, present
from bridge.client.fetch import Verified, verify
from bridge.client.signing_key import choose


@click.command(
    epilog="""\b
Examples:
  kakeya_mac result 20260301t120000z0123456789ab
  kakeya_mac result mac-bridge/probe-20260301t120000z0123456789ab -o out/ --json
  kakeya_mac result 20260301t12 --verify 6 -o out/

Exit code: that of the result's status; 3 when it cannot be believed, answers something else than was asked,
this client's gate rejects its evidence, or --verify refutes it; 4 when there is none yet; 6 when it cannot be
replayed here; 7 when it passed and no key that is trusted here signed it."""
)
@handle_options
@output_option("Save every published file.")
@click.option(
    "--verify",
    "sample",
    type=click.IntRange(min=1),
    metavar="N",
    help="Replay the report here: draw N rows, and run the models it names over them.",
)
@allow_unsigned_option
def result(
    handle: str,
    remote: str | None,
    as_json: bool,
    output: Path | None,
    sample: int | None,
    allow_unsigned: bool,
) -> int:
    """Fetch the result of HANDLE, check digests and signature, judge its evidence, and show or save it.

    Results are files of git commits; nothing is checked out, nothing is left in this clone. With --verify the
    report of a result that passed is replayed by the engine that is installed here, with the models it names;
    -o then saves verification.json, too, signed with this client's key where there is one.
    """
    link = connect(remote)
    _, answer = link.look_up_result(handle)

    def replay(believed: Believed) -> Verified:
        signer = choose(link.config, link.git)
        verified = verify(believed, sample or 1, signer, output=sys.stderr.fileno())
        warn(signer.warnings)
        return verified

    how = Presentation(as_json, output, allow_unsigned)
    return present(link.config, answer, how, replay=None if sample is None else replay)

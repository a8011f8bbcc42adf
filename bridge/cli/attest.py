"""``kakeya_mac attest``: signed statements about a result, for verifiers that are not ours."""

from __future__ import annotations

from pathlib import Path

import click

from bridge.bus.results import believe
from bridge.cli import show
from bridge.cli.options import path_option
from bridge.cli.output import Connection, request_command
from bridge.client.attest import attest as collect
from bridge.client.save import save
from bridge.protocol.sanitize import clean_line


@click.command(
    epilog="""\b
Examples:
  kakeya_mac attest 20260301t120000z0123456789ab -o out/
  kakeya_mac attest 20260301t12 -o out/ --json

DIR gets the files of the result and attestations/: svr.json (the gate's verdict), test-result.json (the job),
provenance.json (how it came about), DSSE envelopes each; the same as *.sigstore.json, which cosign reads; and
key.pem, the key that the signed result names. docs/attestations.md shows how others verify them.

Exit code: 0 whatever the result's verdict is; 2 an attestation's signature does not verify; 3 no trusted key
signed the result, or it has no attestations; 4 no result yet; 6 the extra `attest` is not installed."""
)
@request_command
@path_option("-o", "--output", required=True, text="A new or empty folder.")
def attest(link: Connection, handle: str, output: Path, as_json: bool) -> int:
    """Check the attestations of HANDLE's result and write them into DIR.

    They are published where the Mac's owner sets `attestations = true` in policy.toml. On the Mac itself,
    with its key, they are made here for a result that its runner signed.
    """
    nonce, answer = link.look_up_result(handle)
    believed = believe(answer, trusted=link.config.trusted_runners, allow_unsigned=True)
    found = collect(believed, answer, link.config.state_dir)
    written = save(believed, answer, output, attestations=found.files)
    document = {
        "nonce": nonce,
        "status": believed.result.verdict.status,
        "runner": believed.result.runner.name,
        "signer": believed.signer,
        "fingerprint": found.fingerprint,
        "key": found.key.decode(),
        "source": found.source,
        "output": str(output),
        "files": [str(path.relative_to(output)) for path in written],
        "exit_code": 0,
    }
    how = "published by the runner and checked" if found.source == "published" else "made and signed here"
    lines = [
        f"{nonce}  {believed.result.verdict.status}, {clean_line(believed.sentence)}",
        f"  attestations  {how}; key {found.fingerprint}",
        f"  saved         {output}",
        "others verify them as docs/attestations.md says, with the key that they have from the Mac's owner",
    ]
    return show(as_json, document, lines, untrusted=("runner", "files"))

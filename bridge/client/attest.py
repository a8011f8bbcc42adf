"""The attestations of a result: published by its runner and checked, or made here, on that Mac itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bridge import signing
from bridge.bus.results import Believed, FetchedResult
from bridge.errors import ResultError, SignatureError
from bridge.evidence import attestation
from bridge.protocol.result import (
    ATTESTATION_KEY_FACT,
    ATTESTATION_NAMES,
    ATTESTATIONS,
    RESULT_NAME,
    RESULT_SIGNATURE_NAME,
)
from bridge.runner.config import attestation_key_path, key_path
from bridge.signing import dsse
from bridge.signing.trust import TrustLevel

if TYPE_CHECKING:
    from securesystemslib.signer import SSlibKey


@dataclass(frozen=True)
class AttestationBundle:
    """Envelopes that verify, and what others need to verify them."""

    source: str  # ``published``, or ``made_here``
    fingerprint: str  # of the public key, as ``ssh-keygen -l`` would show it
    key: bytes  # the public key in PEM
    files: Mapping[str, bytes]  # the envelopes, the same as Sigstore bundles, and the key, by path


def attest(believed: Believed, fetched: FetchedResult, state_dir: Path) -> AttestationBundle:
    """The attestations of a believed result, all three or an error.

    Raises:
        ResultError: No key signed it that counts here, it has no attestations, or they are about another.
        SignatureError: An attestation is not signed by the key that the signed result names.
        MachineError: The library for it is not installed.
    """
    nonce = believed.result.nonce
    own = _own_key(believed, fetched, state_dir)
    if believed.signature is not TrustLevel.TRUSTED and own is None:
        raise ResultError(
            f"the result of {nonce} is {believed.sentence}; attestations need a trusted runner's signature",
            "if that runner is yours, trust its key: kakeya_mac runners trust",
        )
    data = fetched.files[RESULT_NAME]
    published = {path: fetched.files[path] for path in ATTESTATION_NAMES if path in fetched.files}
    if published:
        return _published(believed, published, data)
    if own is None or (signer := dsse.load_key(own)) is None:
        raise ResultError(
            f"the result of {nonce} has no attestations",
            "its Mac's owner can make them there with the same command, and publish those of later results:"
            f" kakeya_mac runner key --attestation --make --name {believed.result.runner.name}, and"
            " attestations = true in policy.toml",
        )
    made = attestation.statements(data, believed.files)
    return _attested("made_here", signer.public_key, {path: dsse.sign(signer, made[path]) for path in made})


def _published(believed: Believed, published: Mapping[str, bytes], data: bytes) -> AttestationBundle:
    missing = [path for path in ATTESTATION_NAMES if path not in published]
    named = believed.result.runner.machine.get(ATTESTATION_KEY_FACT)
    if missing or not isinstance(named, str):
        what = f"lacks {', '.join(missing)}" if missing else f"names no key for them ({ATTESTATION_KEY_FACT})"
        raise ResultError(f"the result of {believed.result.nonce} has attestations, and {what}")
    key = dsse.public_key(named)
    for path, envelope in published.items():
        try:
            attestation.check(path, dsse.verify(envelope, key), data)
        except SignatureError as error:
            raise SignatureError(f"{path}: {error.message}") from None
    return _attested("published", key, published)


def _own_key(believed: Believed, fetched: FetchedResult, state_dir: Path) -> Path | None:
    """Where the attestation key of the runner lies that signed a result, if it is one of this machine's."""
    name, signature = believed.result.runner.name, fetched.files.get(RESULT_SIGNATURE_NAME)
    key = key_path(state_dir, name)
    checked = (TrustLevel.TRUSTED, TrustLevel.UNTRUSTED_KEY)  # a revoked key attests nothing
    if signature is None or believed.signature not in checked or not key.is_file():
        return None
    is_own = signing.public_half(key).fingerprint == signing.signing_key(signature).fingerprint
    return attestation_key_path(state_dir, name) if is_own else None


def _attested(source: str, key: SSlibKey, envelopes: Mapping[str, bytes]) -> AttestationBundle:
    pem = dsse.public_pem(key)
    files = {**envelopes, f"{ATTESTATIONS}/key.pem": pem}
    for path, envelope in envelopes.items():
        files[path.removesuffix(".json") + ".sigstore.json"] = _bundle(json.loads(envelope), key.keyid)
    return AttestationBundle(source, key.keyid, pem, files)


def _bundle(envelope: object, keyid: str) -> bytes:
    """A Sigstore bundle around an envelope, whose key the verifier has (docs.sigstore.dev/about/bundle)."""
    bundle = {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": {"publicKey": {"hint": keyid}},
        "dsseEnvelope": envelope,
    }
    return (json.dumps(bundle, indent=2) + "\n").encode()

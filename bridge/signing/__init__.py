"""Detached SSH signatures of requests, cancels, results, claims, runner cards and verification records.

A signature covers the exact bytes of a file under a namespace of its own, so that one for a request can never
pass for a result. `keygen` is the door to ``ssh-keygen``, which does all cryptography; `listed` reads and
edits lists of keys (allowed-signers files), `revoked` lists of revoked ones; `judged` says whose signature
it is, at the verifier's *now*. Where ``ssh-keygen`` is missing everything works unsigned; callers ask
`available` and say so.
"""

from bridge.signing.judged import Signer, identify, verify
from bridge.signing.keygen import (
    MAX_SIGNATURE_BYTES,
    allowed_line,
    available,
    ensure_key,
    fingerprint,
    public_half,
    public_key,
    sign,
    signer_fingerprint,
)
from bridge.signing.listed import Listed, read_keys

REQUEST_NAMESPACE = "kakeya-mac-request"
RESULT_NAMESPACE = "kakeya-mac-result"
CANCEL_NAMESPACE = "kakeya-mac-cancel"
CLAIM_NAMESPACE = "kakeya-mac-claim"
RUNNER_NAMESPACE = "kakeya-mac-runner"
VERIFICATION_NAMESPACE = "kakeya-mac-verification"

__all__ = [
    "CANCEL_NAMESPACE",
    "CLAIM_NAMESPACE",
    "MAX_SIGNATURE_BYTES",
    "REQUEST_NAMESPACE",
    "RESULT_NAMESPACE",
    "RUNNER_NAMESPACE",
    "VERIFICATION_NAMESPACE",
    "Listed",
    "Signer",
    "allowed_line",
    "available",
    "ensure_key",
    "fingerprint",
    "identify",
    "public_half",
    "public_key",
    "read_keys",
    "sign",
    "signer_fingerprint",
    "verify",
]

"""Detached SSH signatures of requests, cancels, results, claims, registrations and verification records.

A signature covers the exact bytes of a file under a namespace, so that one for a request can never pass for a
result. `ssh` calls ``ssh-keygen``, which does all cryptography; `keyfiles` reads and changes the lists of
keys; `trust` says whose signature it is, at the verifier's time. Where ``ssh-keygen`` is missing everything
works unsigned; callers ask `available` and say so.
"""

from bridge.signing.keyfiles import AllowedSigner, allowed_line, read_keys
from bridge.signing.ssh import (
    MAX_SIGNATURE_BYTES,
    available,
    ensure_key,
    fingerprint,
    public_half,
    public_key,
    sign,
    signer_fingerprint,
)
from bridge.signing.trust import (
    CANCEL_NAMESPACE,
    CLAIM_NAMESPACE,
    REQUEST_NAMESPACE,
    RESULT_NAMESPACE,
    RUNNER_NAMESPACE,
    VERIFICATION_NAMESPACE,
    Signer,
    identify,
)

__all__ = [
    "CANCEL_NAMESPACE",
    "CLAIM_NAMESPACE",
    "MAX_SIGNATURE_BYTES",
    "REQUEST_NAMESPACE",
    "RESULT_NAMESPACE",
    "RUNNER_NAMESPACE",
    "VERIFICATION_NAMESPACE",
    "AllowedSigner",
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
]

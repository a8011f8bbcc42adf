"""Detached SSH signatures of requests, cancels, results, claims, registrations and verification records.

A signature covers the exact bytes of a file under a namespace, so that one for a request can never pass for a
result. `ssh` calls ``ssh-keygen``, which does all cryptography; `keyfiles` reads and changes the lists of
keys; `trust` says whose signature it is, at the verifier's time. Where ``ssh-keygen`` is missing everything
works unsigned; callers ask `available` and say so.
"""

from bridge.signing.keyfiles import allowed_line as allowed_line
from bridge.signing.keyfiles import read_keys as read_keys
from bridge.signing.ssh import MAX_SIGNATURE_BYTES as MAX_SIGNATURE_BYTES
from bridge.signing.ssh import available as available
from bridge.signing.ssh import ensure_key as ensure_key
from bridge.signing.ssh import fingerprint as fingerprint
from bridge.signing.ssh import public_half as public_half
from bridge.signing.ssh import public_key as public_key
from bridge.signing.ssh import sign as sign
from bridge.signing.ssh import signer_fingerprint as signer_fingerprint
from bridge.signing.trust import CANCEL_NAMESPACE as CANCEL_NAMESPACE
from bridge.signing.trust import CLAIM_NAMESPACE as CLAIM_NAMESPACE
from bridge.signing.trust import REQUEST_NAMESPACE as REQUEST_NAMESPACE
from bridge.signing.trust import RESULT_NAMESPACE as RESULT_NAMESPACE
from bridge.signing.trust import RUNNER_NAMESPACE as RUNNER_NAMESPACE
from bridge.signing.trust import VERIFICATION_NAMESPACE as VERIFICATION_NAMESPACE
from bridge.signing.trust import Signer as Signer
from bridge.signing.trust import identify as identify

"""Detached SSH signatures over the exact bytes of a file under a namespace.

Where ``ssh-keygen`` is missing everything works unsigned; callers ask `available` and say so.
"""

from bridge.signing.keyfiles import read_keys as read_keys
from bridge.signing.ssh import MAX_SIGNATURE_BYTES as MAX_SIGNATURE_BYTES
from bridge.signing.ssh import available as available
from bridge.signing.ssh import ensure_key as ensure_key
from bridge.signing.ssh import fingerprint as fingerprint
from bridge.signing.ssh import public_half as public_half
from bridge.signing.ssh import public_key as public_key
from bridge.signing.ssh import read_key as read_key
from bridge.signing.ssh import sign as sign
from bridge.signing.ssh import signer_fingerprint as signer_fingerprint
from bridge.signing.ssh import signing_key as signing_key
from bridge.signing.trust import CANCEL_NAMESPACE as CANCEL_NAMESPACE
from bridge.signing.trust import CLAIM_NAMESPACE as CLAIM_NAMESPACE
from bridge.signing.trust import REQUEST_NAMESPACE as REQUEST_NAMESPACE
from bridge.signing.trust import RESULT_NAMESPACE as RESULT_NAMESPACE
from bridge.signing.trust import RUNNER_NAMESPACE as RUNNER_NAMESPACE
from bridge.signing.trust import VERIFICATION_NAMESPACE as VERIFICATION_NAMESPACE
from bridge.signing.trust import Signature as Signature
from bridge.signing.trust import identify as identify

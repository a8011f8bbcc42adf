"""DSSE envelopes of in-toto statements, signed with an Ed25519 key in a PEM file.

Needs the extra ``attest`` (securesystemslib and cryptography).
Source: https://github.com/secure-systems-lab/dsse, version 1.0.2.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.errors import MachineError, SignatureError
from bridge.proc import write_atomic
from bridge.settings import read_owned_file
from bridge.signing.ssh import PublicKey

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner, SSlibKey

PAYLOAD_TYPE = "application/vnd.in-toto+json"
MAX_ENVELOPE_BYTES = 1 << 20
_SSH_KIND = b"ssh-ed25519"


def require_library() -> None:
    """Raise a `MachineError` where the extra ``attest`` is not installed."""
    try:
        import cryptography  # noqa: F401
        import securesystemslib  # noqa: F401
    except ImportError as error:
        missing = f"attestations need the package {error.name}, which is not installed here"
        remedy = "in the checkout of kakeya-mac: make setup, or scripts/install_client.sh VENV attest"
        raise MachineError(missing, remedy) from None


def make_key(path: Path) -> None:
    """Write a new private key (PKCS#8 in PEM, readable by its owner only) in the place of an older one."""
    require_library()
    from securesystemslib.signer import CryptoSigner

    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(path, CryptoSigner.generate_ed25519().private_bytes)
    except OSError as error:
        raise MachineError(f"cannot write the key {path}: {error.strerror or error}") from None


def load_key(path: Path) -> CryptoSigner | None:
    """The private key in a PEM file; None: there is no file.

    Raises:
        MachineError: The library is not installed, others may read the file, or it holds no Ed25519 key.
    """
    data = read_owned_file(path, MachineError, private=True)
    if data is None:
        return None
    require_library()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from securesystemslib.signer import CryptoSigner

    try:
        key = load_pem_private_key(data, None)
    except (ValueError, TypeError):  # the latter: it has a passphrase
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise MachineError(f"{path} holds no Ed25519 key in PEM without a passphrase", "make a new one")
    return CryptoSigner(key, public_key(key.public_key().public_bytes_raw().hex()))


def public_pem(key: SSlibKey) -> bytes:
    """A public key as others read it: PEM of its SubjectPublicKeyInfo."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    loaded = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_hex(key)))
    return loaded.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def public_hex(key: SSlibKey) -> str:
    """The 32 bytes of a public key (RFC 8032) as hex digits."""
    return str(key.keyval["public"])


def public_key(digits: str) -> SSlibKey:
    """The public key that `public_hex` wrote; a `SignatureError`: it is none.

    Its id in envelopes is what ``ssh-keygen -l`` would show of it: cosign, like all users of
    go-securesystemslib, skips a signature with another id.
    """
    require_library()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from securesystemslib.signer import SSlibKey

    try:
        raw = bytes.fromhex(digits)
        key = Ed25519PublicKey.from_public_bytes(raw)
    except ValueError:
        raise SignatureError(f"{digits[:80]!r} is no Ed25519 public key") from None
    blob = b"".join(len(part).to_bytes(4) + part for part in (_SSH_KIND, raw))  # RFC 8709, section 4
    line = PublicKey(_SSH_KIND.decode(), base64.b64encode(blob).decode())
    return SSlibKey.from_crypto(key, line.fingerprint)


def sign(key: CryptoSigner, payload: bytes) -> bytes:
    """The envelope of a statement."""
    from securesystemslib.dsse import Envelope

    envelope = Envelope(payload, PAYLOAD_TYPE, {})
    envelope.sign(key)
    return _encode(envelope.to_dict())


def verify(data: bytes, key: SSlibKey) -> bytes:
    """The statement in an envelope that `sign` made with this key's private half.

    Raises:
        SignatureError: It is another key's, was altered in any byte, or is no such envelope.
    """
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import FormatError, VerificationError
    from securesystemslib.signer import Signature

    if len(data) > MAX_ENVELOPE_BYTES:
        raise SignatureError(f"an envelope has at most {MAX_ENVELOPE_BYTES} bytes, this one {len(data)}")
    try:
        envelope = Envelope.from_dict(json.loads(data))
        envelope.verify([key], 1)
    except VerificationError:
        raise SignatureError(f"the signature does not verify with the key {key.keyid}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, FormatError) as error:
        raise SignatureError(f"not a DSSE envelope: {type(error).__name__}") from None
    # JSON and base64 can write the same content in several ways, and leave room for more; `sign` wrote one.
    signature = Signature(key.keyid, envelope.signatures[key.keyid].signature)
    if data != _encode(Envelope(envelope.payload, PAYLOAD_TYPE, {key.keyid: signature}).to_dict()):
        raise SignatureError("the envelope is signed, but not written as a runner writes it")
    return envelope.payload


def _encode(document: object) -> bytes:
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()

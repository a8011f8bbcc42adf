"""Detached SSH signatures of requests, results, cancels, claims and runner cards, by ``ssh-keygen -Y``.

A signature covers the exact bytes of a file under a namespace of its own, so that one for a request can never
pass for a result. Keys are judged by an allowed-signers file on the verifier's machine, at the verifier's
*now*. Where ``ssh-keygen`` is missing everything works unsigned; callers ask `available` and say so.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bridge.errors import MachineError, SignatureError
from bridge.process import Finished, run_program

REQUEST_NAMESPACE = "kakeya-mac-request"
RESULT_NAMESPACE = "kakeya-mac-result"
CANCEL_NAMESPACE = "kakeya-mac-cancel"
RUNNER_NAMESPACE = "kakeya-mac-runner"
CLAIM_NAMESPACE = "kakeya-mac-claim"
MAX_SIGNATURE_BYTES = 16 * 1024

_PROGRAM = "ssh-keygen"
_TIMEOUT_S = 20.0
_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")
_HEADER = b"-----BEGIN SSH SIGNATURE-----"


def available() -> bool:
    """Whether this machine can sign and verify."""
    return shutil.which(_PROGRAM) is not None


def sign(key: Path, namespace: str, data: bytes) -> bytes:
    """Sign bytes with a private key, or with a public key whose private half the SSH agent holds.

    Raises:
        SignatureError: The key is missing, needs a passphrase, or cannot sign.
        MachineError: There is no ``ssh-keygen``.
    """
    if not key.is_file():
        raise SignatureError(f"the signing key {key} does not exist", "unset it, or make one with ssh-keygen")
    done = _run("-Y", "sign", "-q", "-n", namespace, "-f", str(key), input_bytes=data)
    if not done.ok or not done.stdout.startswith(_HEADER):
        raise SignatureError(
            f"cannot sign with {key}: {_said(done)}",
            "the key must be usable without a prompt: without a passphrase, or loaded into the SSH agent",
        )
    return done.stdout


def signer_fingerprint(data: bytes, signature: bytes, namespace: str) -> str:
    """The fingerprint (``SHA256:…``) of the key that made a signature, whoever's it is.

    Raises:
        SignatureError: The signature is not one, or does not fit these bytes and this namespace.
        MachineError: There is no ``ssh-keygen``.
    """
    with _signature_file(signature) as path:
        done = _run("-Y", "check-novalidate", "-n", namespace, "-s", str(path), input_bytes=data)
    match = _FINGERPRINT.search(done.stdout.decode("utf-8", "replace"))
    if not done.ok or match is None:
        raise SignatureError(f"the signature does not verify: {_said(done)}")
    return match.group()


def verify(data: bytes, signature: bytes, namespace: str, allowed: Path) -> str | None:
    """The principal whose key made a signature, by an allowed-signers file; None: nobody in it.

    Raises:
        SignatureError: The signature is not one, or does not fit these bytes and this namespace.
        MachineError: There is no ``ssh-keygen``.
    """
    with _signature_file(signature) as path:
        if allowed.is_file():
            found = _run("-Y", "find-principals", "-s", str(path), "-f", str(allowed))
            for principal in found.stdout.decode("utf-8", "replace").splitlines() if found.ok else ():
                options = ("-n", namespace, "-I", principal, "-s", str(path), "-f", str(allowed))
                if _run("-Y", "verify", *options, input_bytes=data).ok:
                    return principal
    signer_fingerprint(data, signature, namespace)  # nobody's in the file; is it a signature of these bytes?
    return None


def ensure_key(path: Path, comment: str) -> Path:
    """The private key at this path, made on first use (ed25519, no passphrase, readable by its owner only).

    Two processes may ask at once: a key appears whole or not at all, and the first one stays.

    Raises:
        MachineError: There is no ``ssh-keygen``, or it failed.
    """
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".key-") as folder:
        fresh = Path(folder) / "key"
        done = _run("-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(fresh))
        if not done.ok:
            raise MachineError(f"cannot make the key {path}: {_said(done)}")
        fresh.chmod(0o600)
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)
            fresh.with_name("key.pub").replace(public_key(path))
    return path


def public_key(path: Path) -> Path:
    """Where the public half of a private key lies."""
    return path.with_name(path.name + ".pub")


def fingerprint(key: str) -> str:
    """The fingerprint (``SHA256:…``) of a public key line, as ``ssh-keygen -l`` shows it.

    Raises:
        SignatureError: It is no public key line.
    """
    words = key.split()
    try:
        blob = base64.b64decode(words[1], validate=True)
    except (IndexError, ValueError, binascii.Error):
        raise SignatureError(
            f"{key[:60]!r} is not a public key", "a key is written: ssh-ed25519 AAAA…"
        ) from None
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def allowed_line(public: Path, principal: str, namespace: str) -> str:
    """The allowed-signers line that lets one public key speak as `principal` in one namespace."""
    kind, key = public.read_text(encoding="utf-8").split()[:2]
    return f'{principal} namespaces="{namespace}" {kind} {key}\n'


@contextlib.contextmanager
def _signature_file(signature: bytes) -> Iterator[Path]:
    if len(signature) > MAX_SIGNATURE_BYTES or not signature.startswith(_HEADER):
        raise SignatureError(
            f"the signature does not verify: {len(signature)} bytes that are no SSH signature"
        )
    with tempfile.TemporaryDirectory(prefix="kakeya-mac-") as folder:
        path = Path(folder) / "signature"
        path.write_bytes(signature)
        yield path


def _run(*args: str, input_bytes: bytes = b"") -> Finished:
    return run_program([_PROGRAM, *args], input=input_bytes, timeout_s=_TIMEOUT_S)


def _said(done: Finished) -> str:
    if done.timed_out:
        return "ssh-keygen did not answer in time"
    words = (done.stderr or done.stdout).decode("utf-8", "replace").split("\n")
    return "; ".join(word.strip() for word in words if word.strip())[:300] or f"exit code {done.exit_code}"

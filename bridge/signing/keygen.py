"""The door to ``ssh-keygen``: keys made, bytes signed, signatures checked. Whose keys count is elsewhere."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bridge.errors import MachineError, SignatureError
from bridge.proc import Finished, helper_environment, run_program
from bridge.signing.keys import PublicKey, parse_key, read_key

MAX_SIGNATURE_BYTES = 16 * 1024

_PROGRAM = "ssh-keygen"
_TIMEOUT_S = 20.0
_GOOD = re.compile(
    r'Good "(?P<namespace>[^"]+)" signature with (?P<kind>\S+) key (?P<print>SHA256:[A-Za-z0-9+/]{43})'
)
_HEADER = b"-----BEGIN SSH SIGNATURE-----"


def available() -> bool:
    """Whether this machine can sign and verify."""
    return shutil.which(_PROGRAM) is not None


def sign(key: Path | str, namespace: str, data: bytes) -> bytes:
    """Sign bytes. Never asks for a passphrase.

    Args:
        key: The file of a private key, or of a public key whose private half the SSH agent holds; or such a
            public key itself, ``ssh-ed25519 AAAA…``.
        namespace: What they are signed as.
        data: The bytes.

    Raises:
        SignatureError: The key is missing, needs a passphrase, is not in the agent, or cannot sign.
        MachineError: There is no ``ssh-keygen``.
    """
    if isinstance(key, str):
        line = parse_key(key).line
        with tempfile.TemporaryDirectory(prefix="kakeya-mac-") as folder:
            public = Path(folder) / "key.pub"
            public.write_text(line + "\n")
            return _sign(public, line, namespace, data)
    if not key.is_file():
        raise SignatureError(f"the signing key {key} does not exist", "unset it, or make one with ssh-keygen")
    return _sign(key, str(key), namespace, data)


def signer_fingerprint(data: bytes, signature: bytes, namespace: str) -> str:
    """The fingerprint (``SHA256:…``) of the key that made a signature, whoever's it is.

    Raises:
        SignatureError: The signature is not one, does not fit these bytes and this namespace, or was made
            with a certificate.
        MachineError: There is no ``ssh-keygen``.
    """
    with _signature_file(signature) as path:
        done = run("-Y", "check-novalidate", "-n", namespace, "-s", str(path), input_bytes=data)
    match = _GOOD.match(done.stdout.decode("utf-8", "replace"))
    if not done.ok or match is None or match["namespace"] != namespace:
        raise SignatureError(f"the signature does not verify: {said(done)}")
    if match["kind"].endswith("-CERT"):
        raise SignatureError(
            f"the signature was made with a certificate of the key {match['print']}, and certificates do not"
            " count",
            "sign with the plain key",
        )
    return match["print"]


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
        done = run("-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(fresh))
        if not done.ok:
            raise MachineError(f"cannot make the key {path}: {said(done)}")
        fresh.chmod(0o600)
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)
            fresh.with_name("key.pub").replace(public_key(path))
    return path


def public_half(path: Path) -> PublicKey:
    """The public key in a file, or of the private key in it.

    Raises:
        SignatureError: There is no file, it holds no key, or only one under a passphrase and none beside it.
        MachineError: There is no ``ssh-keygen``.
    """
    if not path.is_file():
        raise SignatureError(f"the signing key {path} does not exist", "correct the path, or unset it")
    for file in (path, public_key(path)):
        with contextlib.suppress(SignatureError):
            return read_key(str(file))
    done = run("-y", "-P", "", "-f", str(path))
    if not done.ok:
        raise SignatureError(f"{path} holds no key that can be used without a prompt: {said(done)}")
    return parse_key(done.stdout.decode("utf-8", "replace"))


def public_key(path: Path) -> Path:
    """Where the public half of a private key lies."""
    return path.with_name(path.name + ".pub")


def fingerprint(key: str) -> str:
    """The fingerprint (``SHA256:…``) of a public key line, as ``ssh-keygen -l`` shows it.

    Raises:
        SignatureError: It is no public key line.
    """
    return parse_key(key).fingerprint


def allowed_line(public: Path, principal: str, namespace: str) -> str:
    """The allowed-signers line that lets one public key speak as `principal` in one namespace."""
    return f'{principal} namespaces="{namespace}" {parse_key(public.read_text(encoding="utf-8")).line}\n'


def _sign(file: Path, shown: str, namespace: str, data: bytes) -> bytes:
    # An empty passphrase is given, so that there is nothing to ask for.
    done = run("-Y", "sign", "-q", "-P", "", "-n", namespace, "-f", str(file), input_bytes=data)
    if not done.ok or not done.stdout.startswith(_HEADER):
        raise SignatureError(
            f"cannot sign with {shown}: {said(done)}",
            "the key must be usable without a prompt: without a passphrase, or loaded into the SSH agent",
        )
    return done.stdout


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


def run(*args: str, input_bytes: bytes = b"") -> Finished:
    """Run ``ssh-keygen`` without a terminal, a display or anything else it could ask through.

    Raises:
        MachineError: There is none.
    """
    quiet = helper_environment({"SSH_ASKPASS_REQUIRE": "never"})
    return run_program([_PROGRAM, *args], input=input_bytes, timeout_s=_TIMEOUT_S, env=quiet)


def said(done: Finished) -> str:
    """What ``ssh-keygen`` had to say, on one line."""
    if done.timed_out:
        return "ssh-keygen did not answer in time"
    words = (done.stderr or done.stdout).decode("utf-8", "replace").split("\n")
    return "; ".join(word.strip() for word in words if word.strip())[:300] or f"exit code {done.exit_code}"

"""Which key signs the requests of this client.

In order: what the user names; the key that ``kakeya_mac key --make`` made; git's own ``user.signingkey``; the
first plain key in the SSH agent. Nothing asks for a passphrase, and no program of git's configuration is run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from bridge import signing
from bridge.errors import SignatureError
from bridge.git.repo import GitRepo
from bridge.proc import find_program, helper_environment, run_program
from bridge.protocol.sanitize import clean_line
from bridge.settings import Settings
from bridge.signing.ssh import PublicKey, parse_key

# In place of a key: nothing is signed.
NO_KEY = "none"

_GIT_KEYS = r"^(gpg\.format|gpg\.ssh\.(program|defaultkeycommand)|user\.signingkey)$"
_LITERAL = "key::"
_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class SigningKey:
    """A key that is to sign."""

    material: Path | str  # its file, or a public key whose private half the SSH agent holds
    source: str  # where it was found
    named: bool  # the user named it, so it is an error when it cannot sign

    @property
    def shown(self) -> str:
        """The key for people: its file, or its kind and fingerprint."""
        if isinstance(self.material, Path):
            return str(self.material)
        key = parse_key(self.material)
        return f"{key.kind} {key.fingerprint}"


@dataclass
class RequestSigner:
    """Signs with the chosen key; where one that was found, not named, cannot sign, nothing is signed."""

    key: SigningKey | None  # None: nothing is signed
    notes: tuple[str, ...] = ()  # one sentence for each key that was found and is not used
    warnings: list[str] = field(default_factory=list)  # why nothing was signed although there is a key

    def sign(self, namespace: str, data: bytes) -> bytes | None:
        """A detached signature; None: there is no key, or one that was found, not named, cannot sign."""
        if self.key is None:
            return None
        if not signing.available():
            self.key = None
            self.warnings.append("nothing is signed: ssh-keygen is not installed")
            return None
        try:
            return signing.sign(self.key.material, namespace, data)
        except SignatureError as error:
            if self.key.named:
                raise
            source, self.key = self.key.source, None
            self.warnings.append(f"nothing is signed: the key of {source} cannot be used ({error.message})")
            return None


def choose(settings: Settings, git: GitRepo) -> RequestSigner:
    """The key that signs what is sent from a checkout. Starts at most two short programs."""
    if settings.signing_key == NO_KEY:
        return RequestSigner(None, ("signing is switched off: the key is named 'none'",))
    if settings.signing_key is not None:
        source = "--signing-key, KAKEYA_SIGNING_KEY or config.toml"
        return RequestSigner(SigningKey(_material(settings.signing_key, Path()), source, named=True))
    if settings.own_key.is_file():
        return RequestSigner(SigningKey(settings.own_key, "kakeya_mac key --make", named=True))
    notes = list[str]()
    key = _of_git(git, notes) or _of_agent(notes)
    return RequestSigner(key, tuple(notes))


def _material(given: str, folder: Path) -> Path | str:
    """A key as git names it: a public key in place of a file's name, or a file."""
    if given.startswith(_LITERAL) or (given.startswith("ssh-") and " " in given):
        return parse_key(given.removeprefix(_LITERAL)).line
    return folder / Path(given).expanduser()


def _of_git(git: GitRepo, notes: list[str]) -> SigningKey | None:
    said = dict(git.settings(_GIT_KEYS))
    given, source = said.get("user.signingkey"), "git's user.signingkey"
    if said.get("gpg.format") != "ssh":
        if given is not None:
            notes.append(f"{source} is left alone: gpg.format is not ssh")
        return None
    for program in ("gpg.ssh.program", "gpg.ssh.defaultKeyCommand"):
        if program.lower() in said:
            notes.append(f"git's {program} is not run: a key is used from a file or the SSH agent")
    try:
        return SigningKey(_material(given, git.directory), source, named=False) if given else None
    except SignatureError as error:
        notes.append(f"{source} is not used: {error.message}")
        return None


def _of_agent(notes: list[str]) -> SigningKey | None:
    if not os.environ.get("SSH_AUTH_SOCK") or find_program("ssh-add") is None:
        return None
    done = run_program(["ssh-add", "-L"], timeout_s=_TIMEOUT_S, env=helper_environment())
    usable = list[PublicKey]()
    for line in done.stdout.decode("utf-8", "replace").splitlines() if done.ok else ():
        try:
            key = parse_key(line)
        except SignatureError as error:
            notes.append(f"skipped in the SSH agent: {error.message}")
            continue
        if key.in_hardware:
            shown = f"{key.fingerprint} {clean_line(key.comment, limit=60)}".strip()
            notes.append(f"skipped in the SSH agent: {shown} waits for a touch; name it to use it")
        else:
            usable.append(key)
    if len(usable) > 1:
        notes.append(f"the SSH agent holds {len(usable)} usable keys; the first signs unless one is named")
    return SigningKey(usable[0].line, "the SSH agent", named=False) if usable else None

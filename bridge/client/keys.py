"""Which key signs what this client sends: named by its user, else found where git or ssh have one.

In order: what the user names (``--signing-key``, ``KAKEYA_SIGNING_KEY``, ``signing_key`` in ``config.toml``);
the key that ``kakeya_mac key --make`` made; git's own ``user.signingkey``, where ``gpg.format`` is ``ssh``;
the first plain key in the SSH agent. Nothing asks for a passphrase, and no program of git's configuration is
run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from bridge import signing
from bridge.bus.git import Git
from bridge.errors import SignatureError
from bridge.proc import find_program, helper_environment, run_program
from bridge.protocol.sanitize import clean_line
from bridge.settings import Settings
from bridge.signing.keys import PublicKey, parse_key

# In place of a key: nothing is signed.
NO_KEY = "none"

_GIT_KEYS = ("gpg.format", "gpg.ssh.program", "gpg.ssh.defaultkeycommand", "user.signingkey")
_LITERAL = "key::"
_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class SigningKey:
    """A key that is to sign.

    Attributes:
        material: Its file, or a public key whose private half the SSH agent holds.
        source: Where it was found.
        named: The user named it, so that it is an error when it cannot sign.
    """

    material: Path | str
    source: str
    named: bool

    @property
    def shown(self) -> str:
        """The key for people: its file, or its kind and fingerprint."""
        if isinstance(self.material, Path):
            return str(self.material)
        key = parse_key(self.material)
        return f"{key.kind} {key.fingerprint}"

    def public(self) -> PublicKey:
        """Its public half.

        Raises:
            SignatureError: It is no key, or its public half cannot be had without a passphrase.
            MachineError: There is no ``ssh-keygen``.
        """
        if isinstance(self.material, str):
            return parse_key(self.material)
        return signing.public_half(self.material)


@dataclass(frozen=True)
class Choice:
    """Which key signs, if any, and what else was looked at.

    Attributes:
        key: None: nothing is signed.
        notes: One sentence each on what was found and is not used.
    """

    key: SigningKey | None
    notes: tuple[str, ...] = ()


class Pen:
    """Signs with the chosen key.

    A key that was found rather than named may turn out to need a passphrase: then nothing is signed, which
    `warnings` says, since most machines take unsigned requests, too.
    """

    def __init__(self, choice: Choice) -> None:
        self.key = choice.key
        self.warnings: list[str] = []
        if self.key is not None and not signing.available():
            self.key = None
            self.warnings.append("nothing is signed: ssh-keygen is not installed")

    def sign(self, namespace: str, data: bytes) -> bytes | None:
        """A detached signature; None: there is no key, or the one that was found cannot sign.

        Raises:
            SignatureError: The key that the user named cannot sign.
            MachineError: There is no ``ssh-keygen``.
        """
        if self.key is None:
            return None
        try:
            return signing.sign(self.key.material, namespace, data)
        except SignatureError as error:
            if self.key.named:
                raise
            source, self.key = self.key.source, None
            self.warnings.append(f"nothing is signed: the key of {source} cannot be used ({error.message})")
            return None


def choose(settings: Settings, git: Git) -> Choice:
    """The key that signs what is sent from a checkout. Starts at most two short programs.

    Raises:
        SignatureError: The user named a key that is not one.
    """
    if settings.signing_key is not None:
        return _named(settings.signing_key)
    if settings.own_key.is_file():
        return Choice(SigningKey(settings.own_key, "kakeya_mac key --make", named=True))
    key, notes = _of_git(git)
    if key is not None:
        return Choice(key, notes)
    key, more = _of_agent()
    return Choice(key, (*notes, *more))


def _named(given: str) -> Choice:
    if given == NO_KEY:
        return Choice(None, ("signing is switched off: the key is named 'none'",))
    source = "--signing-key, KAKEYA_SIGNING_KEY or config.toml"
    if (line := _literal(given)) is not None:
        return Choice(SigningKey(parse_key(line).line, source, named=True))
    return Choice(SigningKey(Path(given).expanduser(), source, named=True))


def _literal(given: str) -> str | None:
    """The public key that stands in place of a file's name, as git has it; None: it is a file's name."""
    if given.startswith(_LITERAL):
        return given.removeprefix(_LITERAL)
    return given if given.startswith("ssh-") and " " in given else None


def _of_git(git: Git) -> tuple[SigningKey | None, tuple[str, ...]]:
    names = "|".join(name.replace(".", r"\.") for name in _GIT_KEYS)
    done = git.attempt("config", "-z", "--get-regexp", f"^({names})$", timeout_s=_TIMEOUT_S)
    pairs = (entry.partition("\n") for entry in done.stdout.decode("utf-8", "replace").split("\0") if entry)
    said = {name: value for name, _, value in pairs}
    given = said.get("user.signingkey")
    if said.get("gpg.format") != "ssh":
        return None, () if given is None else ("git's user.signingkey is left alone: gpg.format is not ssh",)
    notes = tuple(
        f"git's {shown} is not run: a key is used from a file or the SSH agent"
        for name, shown in (
            ("gpg.ssh.program", "gpg.ssh.program"),
            ("gpg.ssh.defaultkeycommand", "gpg.ssh.defaultKeyCommand"),
        )
        if name in said
    )
    if not given:
        return None, notes
    line = _literal(given)
    if line is None:
        return SigningKey(
            git.directory / Path(given).expanduser(), "git's user.signingkey", named=False
        ), notes
    try:
        return SigningKey(parse_key(line).line, "git's user.signingkey", named=False), notes
    except SignatureError as error:
        return None, (*notes, f"git's user.signingkey is not used: {error.message}")


def _of_agent() -> tuple[SigningKey | None, tuple[str, ...]]:
    if not os.environ.get("SSH_AUTH_SOCK") or find_program("ssh-add") is None:
        return None, ()
    done = run_program(["ssh-add", "-L"], timeout_s=_TIMEOUT_S, env=helper_environment())
    if not done.ok:
        return None, ()
    usable, notes = list[PublicKey](), []
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        try:
            key = parse_key(line)
        except SignatureError as error:
            notes.append(f"passed over in the SSH agent: {error.message}")
            continue
        if key.in_hardware:
            shown = f"{key.fingerprint} {clean_line(key.comment, limit=60)}".strip()
            notes.append(f"passed over in the SSH agent: {shown} wants to be touched; name it to use it")
        else:
            usable.append(key)
    if not usable:
        return None, tuple(notes)
    if len(usable) > 1:
        notes.append(
            f"the SSH agent holds {len(usable)} usable keys; the first one signs unless one is named"
        )
    return SigningKey(usable[0].line, "the SSH agent", named=False), tuple(notes)

"""How the hook reads a repository: from the address and with the deploy key that the policy names.

`probe` looks whether it can, without a job; it is what setup and doctor ask.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bridge.bus.git import Git
from bridge.errors import BusError, RequestRefused
from bridge.protocol.sanitize import without_credentials
from bridge.runner.policy.types import FILE_NAME, ActionsRule
from bridge.runner.station import survey_station

KNOWN_HOSTS = "known_hosts"
_SERVER = "https://github.com"
_TABLE = f"[actions] in {FILE_NAME}"
_TIMEOUT_S = 30.0
_OF_LOGIN = ("SSH_AUTH_SOCK", "SSH_AGENT_PID", "SSH_ASKPASS", "GIT_ASKPASS")


@dataclass(frozen=True)
class Access:
    """Whose runs may begin, and from where and with what the hook reads.

    Attributes:
        repository: ``owner/name``; None: the policy names none.
        fetch: Address, without credentials; None: likewise.
        key: Private SSH key; None: as git is set up.
        refs: How many refs were seen there; None: it was not to be read.
        message: Why not; None: it was read.
        remedy: What the owner can do.
    """

    repository: str | None
    fetch: str | None
    key: Path | None
    refs: int | None = None
    message: str | None = None
    remedy: str | None = None

    @property
    def reads(self) -> bool:
        """Whether the hook can read there."""
        return self.refs is not None

    @property
    def said(self) -> str:
        """What was found, in words."""
        if self.message is not None:
            return self.message
        with_what = "as git is set up" if self.key is None else f"with {self.key}"
        return f"runs of {self.repository}: {self.fetch} can be read {with_what} ({self.refs} refs)"


def probe(*, state_dir: Path, config_dir: Path) -> Access:
    """Look whether the hook can read the repository that the policy names.

    Args:
        state_dir: Where this machine keeps runners' state.
        config_dir: Where the owner's files lie.

    Raises:
        BridgeError: The policy is wrong.
    """
    rule = survey_station("none", state_dir=state_dir, config_dir=config_dir).policy.actions
    if rule.repository is None:
        return Access(
            None,
            None,
            rule.key,
            message="this machine's policy names no repository, so no workflow run may begin",
            remedy=f'repository = "OWNER/NAME" under {_TABLE}, with fetch and key where it is private',
        )
    address = rule.fetch or f"{_SERVER}/{rule.repository}"
    shown = without_credentials(address)
    try:
        with using_key(rule), _without_login():
            refs = Git(Path("/")).ls_remote(address, timeout_s=_TIMEOUT_S)
    except (BusError, RequestRefused) as error:
        return Access(rule.repository, shown, rule.key, None, error.message, error.remedy)
    return Access(rule.repository, shown, rule.key, len(refs))


@contextmanager
def using_key(rule: ActionsRule) -> Iterator[None]:
    """Have git use the deploy key, and no other.

    Raises:
        RequestRefused: It is not there.
    """
    if rule.key is None:
        yield
        return
    if not rule.key.is_file():
        raise RequestRefused(
            f"the key {rule.key} is not there", f"its owner names it with key under {_TABLE}"
        )
    before = os.environ.get("GIT_SSH_COMMAND")
    os.environ["GIT_SSH_COMMAND"] = ssh_command(rule.key)
    try:
        yield
    finally:
        if before is None:
            del os.environ["GIT_SSH_COMMAND"]
        else:
            os.environ["GIT_SSH_COMMAND"] = before


@contextmanager
def _without_login() -> Iterator[None]:
    """Leave out what a person's login has and the hook has not: agents, and programs that ask."""
    held = {name: os.environ.pop(name) for name in _OF_LOGIN if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(held)


def ssh_command(key: Path) -> str:
    """The command line for git: this key and no other, the server's from the list beside it, no question."""
    known = key.with_name(KNOWN_HOSTS)
    # A file of ssh's options takes blanks in quotes; a list that is not there is begun with the first answer.
    trust = f'UserKnownHostsFile="{known}"' if known.is_file() else "StrictHostKeyChecking=accept-new"
    # -F: a configuration may name other keys.
    options = ("IdentitiesOnly=yes", "IdentityAgent=none", "BatchMode=yes", trust)
    words = [word for option in options for word in ("-o", option)]
    return shlex.join(["ssh", "-F", "/dev/null", "-i", str(key), *words])

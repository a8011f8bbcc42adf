"""List the refs of a remote below some prefixes, by the ``ls-refs`` command of git's protocol version 2.

``git ls-remote PATTERN`` downloads the names of all refs and filters them here, and a fetch by pattern would
turn names that others chose into local refs. So the one command that filters on the server is spoken
directly, over connections that git's own programs make: ``git upload-pack`` for a folder, ``ssh`` as git
calls it, and the ``git remote-http`` helper with the user's proxies and credentials. See gitprotocol-v2(5)
and gitremote-helpers(7).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from bridge.git import errors
from bridge.protocol.refs import is_url

if TYPE_CHECKING:
    from bridge.git.repo import GitRepo

_FLUSH, _DELIMITER = b"0000", b"0001"
_VERSION_2 = {"GIT_PROTOCOL": "version=2"}
_LINE = re.compile(rb"([0-9a-f]{40}) ([^ \n]+)(?: [^\n]*)?\n?")
_HELPER = re.compile(r"[A-Za-z0-9][A-Za-z0-9+.-]*::")  # names a program that git starts
_SCP = re.compile(r"(?P<host>[^/:]+|[^/:]*\[[^\]]*\]):(?P<path>.*)", re.DOTALL)


def list_refs(
    repo: GitRepo, address: str, prefixes: Sequence[str], *, timeout_s: float, env: Mapping[str, str]
) -> dict[bytes, str] | None:
    """The refs whose full names begin with one of the prefixes.

    Args:
        repo: Gives the folder and environment that git runs in.
        address: Of the remote, without credentials.
        prefixes: Beginnings of full ref names.
        timeout_s: Deadline.
        env: Variables that bring the credentials.

    Returns:
        Shas by name; None: not available over this connection (another scheme, an older server, an error), so
        the caller asks ``git ls-remote``, which also says what is wrong.
    """
    request = _packet("command=ls-refs\n") + _DELIMITER
    request += b"".join(_packet(f"ref-prefix {prefix}\n") for prefix in prefixes) + _FLUSH
    if address.startswith(("http://", "https://")):
        scheme = address.partition(":")[0]
        done = repo.attempt(
            f"remote-{scheme}",
            address,
            address,
            input=[b"stateless-connect git-upload-pack\n", request],
            timeout_s=timeout_s,
            env=env,
        )
        answer = done.stdout[1:] if done.stdout.startswith(b"\n") else b""
    elif (argv := _upload_pack(repo, address)) is not None:
        done = repo.attempt(*argv, input=request + _FLUSH, timeout_s=timeout_s, env=_VERSION_2)
        answer = done.stdout
    else:
        return None
    if done.timed_out:
        raise errors.timed_out(address, timeout_s)
    return _parse(answer) if done.exit_code == 0 else None


def _upload_pack(repo: GitRepo, address: str) -> list[str] | None:
    """Arguments of git that connect to ``upload-pack`` of a folder or over SSH; None: another scheme."""
    if _HELPER.match(address):
        return None
    if not is_url(address):
        return ["upload-pack", "--", address]
    parts = urlsplit(address) if "://" in address else None
    if parts is not None and parts.scheme == "file":
        return ["upload-pack", "--", unquote(parts.path)]
    if parts is None:
        match = _SCP.fullmatch(address)
        return None if match is None else _ssh(repo, match["host"], None, match["path"])
    if parts.scheme in ("ssh", "git+ssh", "ssh+git") and parts.hostname:
        user = f"{unquote(parts.username)}@" if parts.username else ""
        path = unquote(parts.path)
        return _ssh(repo, user + parts.hostname, parts.port, path[1:] if path.startswith("/~") else path)
    return None


def _ssh(repo: GitRepo, host: str, port: int | None, path: str) -> list[str] | None:
    """As git itself calls SSH; None: a program whose options are not OpenSSH's."""
    if host.startswith("-") or os.environ.get("GIT_SSH_VARIANT", "ssh") not in ("ssh", "auto"):
        return None
    command = os.environ.get("GIT_SSH_COMMAND")
    if not command:
        configured = repo.settings(r"^core\.sshcommand$")
        command = configured[-1][1] if configured else os.environ.get("GIT_SSH", "ssh")
    quoted = "'" + path.replace("'", "'\\''").replace("!", "'\\!'") + "'"
    options = ["-o", "SendEnv=GIT_PROTOCOL", *(["-p", str(port)] if port else [])]
    # An alias of git runs a shell command with the arguments behind it, as git runs GIT_SSH_COMMAND.
    alias = ["-c", f"alias.kakeya-ssh=!{command}"]
    return [*alias, "kakeya-ssh", *options, host.strip("[]"), f"git-upload-pack {quoted}"]


def _packet(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return b"%04x" % (len(data) + 4) + data


def _parse(answer: bytes) -> dict[bytes, str] | None:
    """Refs from the server's greeting and its answer; None: it does not speak version 2, or broke off."""
    sections: list[list[bytes]] = [[]]
    at = 0
    while at + 4 <= len(answer):
        try:
            length = int(answer[at : at + 4], 16)
        except ValueError:
            return None
        if length < 4:  # a flush, or the end of a response
            sections.append([])
            at += 4
            continue
        sections[-1].append(answer[at + 4 : at + length])
        at += length
    if len(sections) < 3 or not sections[0] or sections[0][0].strip() != b"version 2":
        return None
    found = {}
    for line in sections[1]:
        match = _LINE.fullmatch(line)
        if match is None:
            return None
        found[match[2]] = match[1].decode()
    return found

"""A remote's address as git may be given it, without credentials; and the refs below some prefixes of it.

``git ls-remote PATTERN`` downloads every name, and a fetch by pattern makes local refs of others' names. So
``ls-refs`` of protocol version 2 is spoken here: gitprotocol-v2(5), gitremote-helpers(7).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from bridge.errors import BusError
from bridge.git import errors
from bridge.protocol.refs import is_url

if TYPE_CHECKING:
    from bridge.git.repo import GitRepo

_USERNAME = "KAKEYA_REMOTE_USERNAME"
_PASSWORD = "KAKEYA_REMOTE_PASSWORD"  # noqa: S105 - the name of a variable
_SSH_SCHEMES = ("ssh", "git+ssh", "ssh+git")
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?#]*)(?P<rest>.*)", re.DOTALL)
_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:[0-9]*)?")
_UNENCODED = re.compile(r"[\x00-\x20\x7f]")
# Git asks a helper with the argument `get`.
_HELPER = (
    f'!f() {{ test "$1" = get && printf "username=%s\\npassword=%s\\n" "${_USERNAME}" "${_PASSWORD}"; }}; f'
)

_BYTES = ("utf-8", "surrogateescape")
_FLUSH, _DELIMITER = b"0000", b"0001"
_REF_LINE = re.compile(rb"([0-9a-f]{40}) ([^ \n]+)(?: [^\n]*)?\n?")
_FOREIGN = re.compile(r"[A-Za-z0-9][A-Za-z0-9+.-]*::")  # names a program that git starts
_SCP = re.compile(r"(?P<host>[^/:]+|[^/:]*\[[^\]]*\]):(?P<path>.*)", re.DOTALL)


def for_git(remote: str, environ: Mapping[str, str] | None = None) -> tuple[str, dict[str, str]]:
    """What git's arguments may hold, and the environment variables that bring the credentials.

    ``https://user:password@host/path`` becomes ``https://host/path`` and a credential helper for that host
    alone. ``https://user@host/path`` becomes the same address and a user name, for which git asks the user's
    own helpers. From ``ssh://user:password@host`` the password goes. Everything else is unchanged. The
    variables go on counting where those of `environ` (None: our environment) end.
    """
    match = _URL.fullmatch(remote)
    scheme = match["scheme"].lower() if match else ""
    if match is None or scheme not in ("http", "https", *_SSH_SCHEMES):
        return remote, {}
    # A raw @ belongs to the password: the host begins after the last one.
    userinfo, at, host = match["authority"].rpartition("@")
    name, colon, word = (unquote_to_bytes(part) for part in userinfo.encode(*_BYTES).partition(b":"))
    split_wrongly = not _HOST.fullmatch(host) and (at or "@" in match["rest"])
    if split_wrongly or _UNENCODED.search(userinfo) or set(name + word) & set(b"\n\r\0"):
        raise BusError(
            f"the user name or password in the {scheme} address of the remote is not percent-encoded,"
            " or holds a line break",
            "in it, write / as %2F, ? as %3F, # as %23, a blank as %20 and % as %25",
        )
    if scheme in _SSH_SCHEMES:
        kept = userinfo.partition(":")[0]
        return f"{scheme}://{kept}@{host}{match['rest']}" if colon else remote, {}
    plain = f"{scheme}://{host}{match['rest']}" if at else remote
    if not name and not colon:
        return plain, {}
    key = f"credential.{scheme}://{host}"
    # What the user's insteadOf makes of the address without credentials is not what was asked for; of all
    # rules git takes the longest.
    settings = [(f"url.{plain}.insteadOf", plain), (f"url.{plain}.pushInsteadOf", plain)]
    secrets = {}
    if colon:
        settings += [(f"{key}.helper", ""), (f"{key}.helper", _HELPER)]
        secrets = {_USERNAME: os.fsdecode(name), _PASSWORD: os.fsdecode(word)}
    else:
        settings += [(f"{key}.username", os.fsdecode(name))]
    return plain, config_variables(settings, os.environ if environ is None else environ) | secrets


def config_variables(settings: Sequence[tuple[str, str]], environ: Mapping[str, str]) -> dict[str, str]:
    """Settings of git as environment variables, after those that the environment brings already."""
    count = environ.get("GIT_CONFIG_COUNT", "")
    first = int(count) if re.fullmatch(r"[0-9]{1,6}", count) else 0
    variables = {"GIT_CONFIG_COUNT": str(first + len(settings))}
    for index, (key, value) in enumerate(settings, start=first):
        variables[f"GIT_CONFIG_KEY_{index}"] = key
        variables[f"GIT_CONFIG_VALUE_{index}"] = value
    return variables


def list_refs(
    repo: GitRepo, address: str, prefixes: Sequence[str], *, timeout_s: float, env: Mapping[str, str]
) -> dict[bytes, str] | None:
    """The refs whose full names begin with one of the prefixes: shas by name.

    None: not available over this connection (another scheme, an older server, an error), so the caller asks
    ``git ls-remote``, which also says what is wrong.
    """
    request = _packet("command=ls-refs\n") + _DELIMITER
    request += b"".join(_packet(f"ref-prefix {prefix}\n") for prefix in prefixes) + _FLUSH
    if address.startswith(("http://", "https://")):
        argv = [f"remote-{address.partition(':')[0]}", address, address]
        parts = [b"stateless-connect git-upload-pack\n", request]
        done = repo.attempt(*argv, input=parts, timeout_s=timeout_s, env=env)
    elif (connect := _upload_pack(repo, address)) is not None:
        version = {"GIT_PROTOCOL": "version=2"}
        done = repo.attempt(*connect, input=request + _FLUSH, timeout_s=timeout_s, env=version)
    else:
        return None
    if done.timed_out:
        raise errors.timed_out(address, timeout_s)
    return _parse_refs(done.stdout.removeprefix(b"\n")) if done.exit_code == 0 else None


def _upload_pack(repo: GitRepo, address: str) -> list[str] | None:
    """Arguments of git that connect to ``upload-pack`` of a folder or over SSH; None: another scheme."""
    if _FOREIGN.match(address):
        return None
    if not is_url(address):
        return ["upload-pack", "--", address]
    if "://" not in address:
        match = _SCP.fullmatch(address)
        return None if match is None else _ssh(repo, match["host"], None, match["path"])
    parts = urlsplit(address)
    path = unquote(parts.path)
    if parts.scheme == "file":
        return ["upload-pack", "--", path]
    if parts.scheme in _SSH_SCHEMES and parts.hostname:
        user = f"{unquote(parts.username)}@" if parts.username else ""
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
    data = text.encode(*_BYTES)
    return b"%04x" % (len(data) + 4) + data


def _parse_refs(answer: bytes) -> dict[bytes, str] | None:
    """Refs from the server's greeting and its answer; None: it does not speak version 2, or broke off."""
    sections: list[list[bytes]] = [[]]
    at = 0
    while size := re.fullmatch(rb"[0-9a-f]{4}", answer[at : at + 4]):
        length = int(size[0], 16)
        if length < 4:  # a flush, or the end of a response
            sections.append([])
        else:
            sections[-1].append(answer[at + 4 : at + length])
        at += max(length, 4)
    if len(sections) < 3 or not sections[0] or sections[0][0].strip() != b"version 2":
        return None
    lines = [_REF_LINE.fullmatch(line) for line in sections[1]]
    return None if None in lines else {line[2]: line[1].decode() for line in lines if line}

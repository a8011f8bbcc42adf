"""A request asked for again: the same preset, parameters and workload as a new request, some of it changed.

What was asked is read from the request's own branch, so any clone will do, also long after the answer; for
one in the archive, where the workload is not, the error says how to ask the same anew. The workload is
fetched into a scratch store where this clone lacks it. Nothing of the old request is trusted: the new one is
checked as if it had been typed, and a key signs it only where the old one carries a signature of the same
key, or its workload is named by the caller.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from bridge import presets, signing
from bridge.bus import refs
from bridge.bus.answers import FetchedResult
from bridge.bus.git import Git
from bridge.bus.handles import Held, resolve_handle
from bridge.bus.requests import ReadRequest, bound_manifest, read_request
from bridge.bus.untrusted import clean_line
from bridge.client.lookup import look_up
from bridge.client.remotes import Remote
from bridge.client.submit import Plan, plan_request
from bridge.errors import BusError, ManifestError, ResultError, SignatureError, UnknownHandle
from bridge.manifest import Manifest, ParamValue
from bridge.result import RESULT_NAME, Result, parse_result
from bridge.settings import Settings

# How many commits may lie on top of a request that is still found.
_WALK = 32
# Of one word of a command shown, at most so many characters.
_WORD = 4000


@dataclass(frozen=True)
class Original:
    """A request that was asked before.

    Attributes:
        request: Its commit, with the exact bytes and signature.
        manifest: What was asked.
        git: Has the workload: the checkout, or a view of it with what was fetched; for as long as the context
            of `recall` is open.
    """

    request: ReadRequest
    manifest: Manifest
    git: Git


@contextlib.contextmanager
def recall(git: Git, remote: Remote, handle: str, folder: Path) -> Generator[Original, None, None]:
    """Find a request as it was asked.

    Args:
        git: Any checkout; nothing is left in it.
        remote: The bus.
        handle: Nonce, branch name or a unique prefix.
        folder: Where caches live (the state folder), for the archive.

    Raises:
        UnknownHandle: It names no request, or the remote no longer has what was asked.
        ResultError: Only a result of it is left, and it cannot be read.
        RemoteUnreachable: The remote did not answer.
    """
    nonce, place = _place(git, remote, handle, folder)
    with git.scratch() as scratch:
        if not _has_workload(scratch, place.commit):
            scratch.fetch(remote.address, [place.ref])
        found = _find(scratch, place.commit, nonce)
        if found is None:
            raise UnknownHandle(
                f"{place.ref} holds no request {nonce} that can be read",
                "it cannot be repeated; ask anew with `kakeya_mac run`",
            )
        request, manifest = found
        yield Original(request, manifest, git if git.exists(manifest.workload_sha) else scratch)


def plan_again(
    settings: Settings,
    original: Original,
    *,
    remote: str | None = None,
    params: Mapping[str, object] | None = None,
    ref: str | None = None,
    timeout_s: int | None = None,
    expires: timedelta | None = None,
) -> Plan:
    """Check the same request as a new one. Push it with `submit_request` while `recall` is open.

    Args:
        settings: The client's settings.
        original: From `recall`.
        remote: As given to `plan_request`.
        params: Parameters to change; the others stay.
        ref: Another workload; None: the same commit.
        timeout_s: Another limit of the job; None: the same.
        expires: How long the new request may wait; None: the setting.

    Raises:
        SignatureError: It would be signed, and nobody vouched for its workload.
        RequestRefused: It can no longer be asked like this; see `plan_request`.
        NoRemote: There is no remote to talk to.
    """
    old = original.manifest
    if ref is None:
        _require_vouched(settings, original)
    return plan_request(
        settings,
        repository=original.git,
        preset=old.preset,
        params={**old.params, **(params or {})},
        ref=ref or old.workload_sha,
        remote=remote,
        expires=expires,
        against=old.against_sha,
        timeout_s=timeout_s or old.timeout_s,
        transport=old.transport,
    )


def changed_params(settings: Settings, original: Original, words: Sequence[str]) -> dict[str, ParamValue]:
    """``key=value`` words typed for this request, by its preset's types.

    Raises:
        PresetError: This client no longer knows the preset.
        ParameterError: A word does not fit it.
    """
    return presets.parse_cli(presets.get(original.manifest.preset, settings.presets), words)


def _place(git: Git, remote: Remote, handle: str, folder: Path) -> tuple[str, Held]:
    """The nonce, and where the request can be read: the inbox while it waits, its branch ever after.

    Raises:
        UnknownHandle: It names no request, or one of which only the result is left.
    """
    try:
        state = resolve_handle(git, remote.address, handle)
    except UnknownHandle:
        found = look_up(git, remote.address, handle, folder)
        if found.answer is None:
            raise
        raise _retired(found.answer) from None
    if state.inbox is not None:
        return state.nonce, Held(refs.inbox_ref(state.nonce), state.inbox)
    if state.branch is not None:
        return state.nonce, state.branch
    answer = look_up(git, remote.address, state.nonce, folder).answer
    if answer is not None and answer.ref == refs.ARCHIVE:
        raise _retired(answer)
    raise UnknownHandle(
        f"the branch of the request {state.nonce} is gone, and with it the workload and what was asked",
        "ask anew with `kakeya_mac run`",
    )


def _retired(answer: FetchedResult) -> UnknownHandle:
    """That a request is in the archive, and how to ask the same anew by what its result says was asked."""
    said = f"the request {answer.nonce} is in the archive, which keeps no workloads"
    try:
        command = _command(parse_result(answer.files.get(RESULT_NAME, b"")))
    except ResultError:
        command = None
    if command is None:
        return UnknownHandle(said, "its result does not say what was asked; ask anew with `kakeya_mac run`")
    return UnknownHandle(said, f"in a clone that has the commit, by what its result says: {command}")


def _command(result: Result) -> str | None:
    """What to type to ask anew for what a result says it answers; None: it does not say.

    Its texts may be anybody's: each word is quoted for the shell, and on one line.
    """
    if result.preset is None or result.workload_sha is None:
        return None
    words = ["kakeya_mac", "run", "--preset", result.preset]
    for name, value in result.params.items():
        words += ["-p", f"{name}={str(value).lower() if isinstance(value, bool) else value}"]
    return shlex.join(clean_line(word, limit=_WORD) for word in [*words, "--ref", result.workload_sha])


def _has_workload(git: Git, commit: str) -> bool:
    """Whether a commit and what it stands on are here already."""
    return git.exists(commit) and all(git.exists(parent) for parent in git.commit(commit).parents)


def _find(git: Git, tip: str, nonce: str) -> tuple[ReadRequest, Manifest] | None:
    """The request itself, at the tip or under what was put on top of it."""
    at = tip
    for _ in range(_WALK):
        if git.kind_and_size(at)[0] != "commit":
            return None
        try:
            request = read_request(git, at)
            return request, bound_manifest(request, nonce)
        except (ManifestError, BusError):
            parents = git.commit(at).parents
        if not parents:
            return None
        at = parents[0]
    return None


def _require_vouched(settings: Settings, original: Original) -> None:
    """Refuse to sign what only somebody with push rights says was asked.

    Raises:
        SignatureError: The request is not signed with this client's key.
    """
    key, old = settings.signing_key, original.request
    if key is None or not signing.available():
        return
    namespace = signing.REQUEST_NAMESPACE
    if old.signature is not None:
        own = signing.signer_fingerprint(old.data, signing.sign(key, namespace, old.data), namespace)
        if signing.signer_fingerprint(old.data, old.signature, namespace) == own:
            return
    workload = original.manifest.workload_sha
    raise SignatureError(
        f"the request {original.manifest.nonce} is not signed with your key {key}; repeating it would sign"
        f" its workload {workload[:12]} in your name",
        f"look at that commit, then name it: --ref {workload}",
    )

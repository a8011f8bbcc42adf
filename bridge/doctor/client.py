"""Can this checkout use the bridge? Each check says what it looked at, what it found, and how to fix it.

Checks read; what touches a write side changes nothing: a push with ``--dry-run``, a start of the run 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bridge import signing
from bridge.bus.failures import summary
from bridge.bus.git import Git
from bridge.client.keys import choose
from bridge.client.remotes import Remote, resolve_remote
from bridge.doctor import actions, basics
from bridge.doctor.finding import Check, Level
from bridge.errors import BridgeError, BusError
from bridge.protocol.refs import request_ref
from bridge.settings import Settings

NETWORK_TIMEOUT_S = 15.0


def examine(settings: Settings, repository: Path, *, allow_public: bool = False) -> Iterator[Check]:
    """Every check in turn; later ones are left out when an earlier one makes them meaningless.

    Args:
        settings: The client's settings.
        repository: Where it is asked from.
        allow_public: A public repository is meant.
    """
    yield basics.python()
    git = Git(repository)
    version = basics.git_version(git)
    yield version
    if version.level is Level.FAIL:
        return
    inside = checkout(git)
    yield inside
    yield basics.ssh_keygen()
    yield _signing_key(settings, git)
    yield trusted_runners(settings)
    yield basics.engine()
    if basics.has_engine():
        yield from basics.isolation()
    if inside.level is Level.FAIL:
        return
    yield work_tree(git)
    yield from on_remote(settings, git, allow_public=allow_public)


def on_remote(settings: Settings, git: Git, *, allow_public: bool) -> Iterator[Check]:
    """The remote, what it takes, and GitHub's side of it where it has one."""
    try:
        remote = resolve_remote(git, settings.remote)
    except BridgeError as error:
        where = "--remote, KAKEYA_REMOTE, config.toml, origin"
        yield Check("remote", Level.FAIL, where, error.message, error.remedy or "")
        return
    answer = reachable(git, remote)
    yield answer
    if answer.level is Level.FAIL:
        return
    yield pushing(git, remote)
    yield from actions.examine(settings, git, remote, allow_public=allow_public)


def checkout(git: Git) -> Check:
    """Whether there is a commit to ask for."""
    where = str(git.directory)
    done = git.attempt("rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    if done.exit_code == 0:
        return Check("repository", Level.OK, where, f"HEAD is {done.stdout.decode().strip()[:12]}")
    if git.attempt("rev-parse", "--git-dir").exit_code != 0:
        return Check("repository", Level.FAIL, where, "not inside a git repository", "change into a clone")
    return Check(
        "repository", Level.FAIL, where, "the repository has no commit yet", "commit something first"
    )


def work_tree(git: Git) -> Check:
    """Whether what the job should see is committed."""
    done = git.attempt("diff-index", "--quiet", "HEAD", "--", timeout_s=5)
    if done.exit_code == 0 and not done.timed_out:
        return Check("work tree", Level.OK, "git diff-index HEAD", "no uncommitted changes to tracked files")
    return Check(
        "work tree",
        Level.WARN,
        "git diff-index HEAD",
        "there may be uncommitted changes; a request carries only commits",
        "commit what the job should see",
    )


def _signing_key(settings: Settings, git: Git) -> Check:
    where = "KAKEYA_SIGNING_KEY, config.toml, git config, SSH agent"
    try:
        key = choose(settings, git).key
        if key is None:
            found = "none: requests are unsigned; where a machine wants a signature: kakeya_mac key --make"
            return Check("request key", Level.OK, where, found)
        public = key.public()
    except BridgeError as error:
        return Check("request key", Level.FAIL, where, error.message, error.remedy or "correct the path")
    found = f"requests are signed with {public.fingerprint} ({key.source})"
    return Check("request key", Level.OK, where, found)


def trusted_runners(settings: Settings) -> Check:
    """Whose results are believed here."""
    path = settings.trusted_runners
    try:
        known = signing.read_keys(path)
    except BridgeError as error:
        return Check(
            "trusted runners", Level.FAIL, str(path), error.message, error.remedy or "mend that line"
        )
    if known:
        return Check(
            "trusted runners",
            Level.OK,
            str(path),
            f"{len(known)} key(s); a result that none of them signed is not believed",
        )
    return Check(
        "trusted runners",
        Level.WARN,
        str(path),
        "none: every result is shown as one that anyone with push rights could have written; one that passed"
        " ends in exit code 7",
        "kakeya_mac runners trust NAME --key 'ssh-ed25519 …' (the runner prints the line when it starts),"
        " or kakeya_mac runners trust --first",
    )


def reachable(git: Git, remote: Remote) -> Check:
    """Whether the remote answers."""
    try:
        refs = git.ls_remote(remote.address, timeout_s=NETWORK_TIMEOUT_S)
    except BusError as error:
        fix = error.remedy or "check the address, the network and your credentials"
        return Check("remote", Level.FAIL, remote.shown, error.message, fix)
    pending = sum(ref.startswith("refs/mac-bridge/inbox/") for ref in refs)
    return Check(
        "remote", Level.OK, remote.shown, f"reachable, {len(refs)} refs, {pending} request(s) pending"
    )


def pushing(git: Git, remote: Remote) -> Check:
    """Whether it takes pushes, as far as a dry run tells."""
    nonce = "20000101t000000z000000000000"
    branch = request_ref("probe", nonce, None)
    done = git.talk(
        remote.address,
        *("push", "--dry-run", "--porcelain", "--no-verify"),
        specs=[f"HEAD:{branch}"],
        timeout_s=NETWORK_TIMEOUT_S,
    )
    where = f"git push --dry-run {remote.shown}"
    if done.exit_code == 0:
        return Check(
            "push", Level.OK, where, "the remote takes pushes (server-side rules are not run by a dry run)"
        )
    said = summary(done.stderr)[:300] or "no answer"
    return Check(
        "push", Level.FAIL, where, f"cannot push: {said}", "ask for push rights, or use another --remote"
    )

"""Can this checkout use the bridge? Each check says what it looked at, what it found, and how to fix it.

Checks read; the one that touches the remote's write side is a push with ``--dry-run``. Checks of a Mac's
set-up and of a continuous-integration role are not here.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from bridge import __version__, signing
from bridge.bus.failures import summary
from bridge.bus.git import Git
from bridge.bus.refs import request_ref
from bridge.client.keys import choose
from bridge.client.remotes import Remote, resolve_remote
from bridge.errors import BridgeError, BusError
from bridge.runner.isolation import trial
from bridge.runner.isolation.enforced import NOT_ENFORCED
from bridge.settings import Settings

NETWORK_TIMEOUT_S = 15.0
OLDEST_GIT = (2, 31)


class Level(StrEnum):
    """How bad a finding is: `fail` means that requests cannot be made from here."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One finding: what was looked at, how bad it is, what was found, and the fix (empty when ok)."""

    name: str
    level: Level
    looked_at: str
    finding: str
    fix: str = ""


def examine(settings: Settings, repository: Path) -> Iterator[Check]:
    """Every check in turn; later ones are left out when an earlier one makes them meaningless."""
    yield _python()
    git = Git(repository)
    version = _git_version(git)
    yield version
    if version.level is Level.FAIL:
        return
    inside = _repository(git)
    yield inside
    yield _ssh_keygen()
    yield _signing_key(settings, git)
    yield _trusted_runners(settings)
    yield _engine()
    if _has_engine():
        yield from _isolation()
    if inside.level is Level.FAIL:
        return
    yield _work_tree(git)
    try:
        remote = resolve_remote(git, settings.remote)
    except BridgeError as error:
        yield Check(
            "remote",
            Level.FAIL,
            "--remote, KAKEYA_REMOTE, config.toml, origin",
            error.message,
            error.remedy or "",
        )
        return
    reachable = _remote(git, remote)
    yield reachable
    if reachable.level is not Level.FAIL:
        yield _push(git, remote)


def _python() -> Check:
    version = ".".join(str(part) for part in sys.version_info[:3])
    return Check("kakeya-mac", Level.OK, sys.executable, f"kakeya-mac {__version__} on Python {version}")


def _git_version(git: Git) -> Check:
    try:
        text = git.run("--version").decode().split()[2]
    except BridgeError as error:
        return Check(
            "git", Level.FAIL, "git --version", error.message, error.remedy or "install git 2.31 or later"
        )
    numbers = tuple(int(part) for part in text.split(".")[:2])
    if numbers < OLDEST_GIT:
        return Check(
            "git", Level.FAIL, "git --version", f"git {text} is too old", "install git 2.31 or later"
        )
    return Check("git", Level.OK, "git --version", f"git {text}")


def _repository(git: Git) -> Check:
    where = str(git.directory)
    done = git.attempt("rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    if done.exit_code == 0:
        return Check("repository", Level.OK, where, f"HEAD is {done.stdout.decode().strip()[:12]}")
    if git.attempt("rev-parse", "--git-dir").exit_code != 0:
        return Check("repository", Level.FAIL, where, "not inside a git repository", "change into a clone")
    return Check(
        "repository", Level.FAIL, where, "the repository has no commit yet", "commit something first"
    )


def _work_tree(git: Git) -> Check:
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


def _ssh_keygen() -> Check:
    if signing.available():
        return Check("ssh-keygen", Level.OK, "PATH", "signatures can be made and verified")
    return Check(
        "ssh-keygen",
        Level.WARN,
        "PATH",
        "not found: requests go out unsigned and no result can be verified",
        "install OpenSSH's client (openssh-client)",
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


def _trusted_runners(settings: Settings) -> Check:
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
        "none: every result will be shown as one that anyone with push rights could have written",
        "kakeya_mac runners trust NAME --key 'ssh-ed25519 …' (the runner prints the line when it starts)",
    )


def _has_engine() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("mlx", "mlx_lm"))


def _isolation() -> Iterator[Check]:
    """What a runner on this machine keeps its jobs from, one check an item."""
    where = "a supervisor without a job"
    try:
        enforced = asdict(trial.enforced_here())
    except BridgeError as error:
        yield Check("jobs", Level.WARN, where, error.message, error.remedy or "no runner can serve here")
        return
    for item, what in trial.ITEMS.items():
        how = enforced[item]
        if how == NOT_ENFORCED:
            finding = f"nothing here keeps a job from {what}"
            yield Check(f"jobs: {item}", Level.WARN, where, finding, trial.REMEDY)
        else:
            yield Check(f"jobs: {item}", Level.OK, where, f"{how}: keeps a job from {what}")


def _engine() -> Check:
    if not _has_engine():
        return Check(
            "engine",
            Level.OK,
            "mlx, mlx-lm",
            "not installed: this is a client only; runners need the extra `engine`",
        )
    return Check(
        "engine", Level.OK, "mlx, mlx-lm", "installed: this machine can run kakeya_engine and a runner"
    )


def _remote(git: Git, remote: Remote) -> Check:
    try:
        refs = git.ls_remote(remote.address, timeout_s=NETWORK_TIMEOUT_S)
    except BusError as error:
        fix = error.remedy or "check the address, the network and your credentials"
        return Check("remote", Level.FAIL, remote.shown, error.message, fix)
    pending = sum(ref.startswith("refs/mac-bridge/inbox/") for ref in refs)
    return Check(
        "remote", Level.OK, remote.shown, f"reachable, {len(refs)} refs, {pending} request(s) pending"
    )


def _push(git: Git, remote: Remote) -> Check:
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

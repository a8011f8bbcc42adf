"""A remote full of what strangers pushed: a signed request waits for it 20 s at most."""

from __future__ import annotations

import subprocess
import time

import pytest

from bridge.protocol import refs
from bridge.protocol.manifest import REQUEST_PATH
from bridge.protocol.result import Status
from tests.adversary.attacked import AttackedRunner, attacked_runner
from tests.fixtures.repo import RepoFixture, wait_for

MOST_S = 20.0
HUGE_BYTES = 96 << 20


def crowd(attacked: AttackedRunner, count: int) -> None:
    """Refs by the ten thousand: requests, claims, cancels and results of no one, and branches of users."""
    main = attacked.repo.git("rev-parse", "main")
    names = (
        "refs/mac-bridge/inbox/{n:016d}",
        "refs/mac-bridge/inbox/20260301t120000z{n:012x}",
        "refs/mac-bridge/claims/20260301t120000z{n:012x}",
        "refs/mac-bridge/cancels/20260301t120000z{n:012x}",
        "refs/mac-bridge/anything/{n}",
        "refs/heads/mac-bridge/echo-20260301t120000z{n:012x}",
        "refs/heads/mac-bridge/INBOX-{n}",
        "refs/heads/user/{n}",
        "refs/kakeya/{n}",
        "refs/tags/v{n}",
    )
    lines = [f"create {name.format(n=n)} {main}\n" for name in names for n in range(count // len(names))]
    attacked.repo.git("update-ref", "--stdin", cwd=attacked.repo.remote, input="".join(lines))


def odd_names(attacked: AttackedRunner) -> None:
    """Names that no file system or encoding can hold; git's server reads them from packed-refs."""
    main = attacked.repo.git("rev-parse", "main")
    packed = attacked.repo.remote / "packed-refs"
    attacked.repo.git("pack-refs", "--all", cwd=attacked.repo.remote)
    names = [refs.INBOX.encode() + tail for tail in (b"x" * 4000, b"\xff\xfe\xe2\x80\xa8", b"CASE", b"case")]
    head, *rows = packed.read_bytes().splitlines()
    rows = [row for row in rows if not row.startswith(b"^")] + [main.encode() + b" " + name for name in names]
    packed.write_bytes(b"\n".join([head, *sorted(rows, key=lambda row: row.split(b" ", 1)[1])]) + b"\n")


def huge(attacked: AttackedRunner) -> None:
    """Request commits with a manifest that hardly compresses, and with one that is nothing once it does."""
    for number, source in enumerate(("/dev/urandom", "/dev/zero")):
        nonce = f"20260301t120000zffffffffff{number:02d}"
        script = (
            f"blob=$(head -c {HUGE_BYTES} {source} | git hash-object -w --stdin) &&"
            f" tree=$(printf '100644 blob %s\\t{REQUEST_PATH.rpartition('/')[2]}\\n' $blob | git mktree) &&"
            f" tree=$(printf '040000 tree %s\\t.mac-bridge\\n' $tree | git mktree) &&"
            " commit=$(git -c user.name=m -c user.email=m@x commit-tree $tree -p main -m huge) &&"
            f" git update-ref {refs.INBOX + nonce} $commit"
        )
        subprocess.run(["sh", "-c", script], cwd=attacked.repo.remote, env=attacked.repo.env, check=True)


def seconds_to_answer(attacked: AttackedRunner) -> float:
    """From its push until a signed request is answered."""
    asked, began = attacked.runner.ask_signed(attacked.repo.root / "keys" / "ann"), time.monotonic()
    inbox = refs.INBOX + asked.nonce
    wait_for(lambda: attacked.runner.tip(inbox) is None, 100, f"the answer: {attacked.said()[-2000:]}")
    seconds = time.monotonic() - began
    assert attacked.result(asked.nonce, asked.result_ref).verdict.status is Status.PASSED
    return seconds


@pytest.mark.e2e
@pytest.mark.quiet
@pytest.mark.parametrize("first", [pytest.param("runner", marks=pytest.mark.exhaustive), "crowd"])
def test_signed_request_waits_20_seconds_at_most(repo: RepoFixture, first: str):
    with attacked_runner(repo, lambda attacked: attacked.runner.list_signer("ann") and None) as attacked:
        if first == "crowd":
            push_all(attacked)
        with repo.runner("--idle", "0.2", trusted=False):
            if first == "runner":
                seconds_to_answer(attacked)
                push_all(attacked)
            waited = [seconds_to_answer(attacked) for _ in range(2)]
        assert max(waited) < MOST_S, attacked.said()[-3000:]
        assert "a bug of kakeya-mac" not in attacked.said()


def push_all(attacked: AttackedRunner) -> None:
    crowd(attacked, 40_000)
    huge(attacked)
    odd_names(attacked)

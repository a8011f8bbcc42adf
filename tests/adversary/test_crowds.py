"""A remote full of what strangers pushed: a signed request waits for it 20 s at most."""

from __future__ import annotations

import subprocess
import time

import pytest

from bridge.protocol import refs
from bridge.protocol.manifest import REQUEST_PATH
from bridge.protocol.result import Status
from tests.adversary.siege import Siege, besieged
from tests.houses import House, wait_for

MOST_S = 20.0
HUGE_BYTES = 96 << 20


def crowd(siege: Siege, count: int) -> None:
    """Refs by the ten thousand: requests, claims, cancels and results of nobody, and branches of users."""
    main = siege.house.git("rev-parse", "main")
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
    siege.house.git("update-ref", "--stdin", cwd=siege.house.remote, input="".join(lines))


def odd_names(siege: Siege) -> None:
    """Names that no file system or encoding has room for; git's server takes them from packed-refs."""
    main = siege.house.git("rev-parse", "main")
    packed = siege.house.remote / "packed-refs"
    siege.house.git("pack-refs", "--all", cwd=siege.house.remote)
    names = [refs.INBOX.encode() + tail for tail in (b"x" * 4000, b"\xff\xfe\xe2\x80\xa8", b"CASE", b"case")]
    head, *rows = packed.read_bytes().splitlines()
    rows = [row for row in rows if not row.startswith(b"^")] + [main.encode() + b" " + name for name in names]
    packed.write_bytes(b"\n".join([head, *sorted(rows, key=lambda row: row.split(b" ", 1)[1])]) + b"\n")


def huge(siege: Siege) -> None:
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
        subprocess.run(["sh", "-c", script], cwd=siege.house.remote, env=siege.house.env, check=True)


def seconds_to_answer(siege: Siege) -> float:
    """From its push until a signed request is answered."""
    asked, began = siege.bench.ask_signed(siege.house.root / "keys" / "ann"), time.monotonic()
    inbox = refs.INBOX + asked.nonce
    wait_for(lambda: siege.bench.tip(inbox) is None, 100, f"the answer: {siege.said()[-2000:]}")
    seconds = time.monotonic() - began
    assert siege.result(asked.nonce, asked.result_ref).verdict.status is Status.PASSED
    return seconds


@pytest.mark.e2e
@pytest.mark.quiet
@pytest.mark.parametrize("first", ["runner", "crowd"])
def test_signed_request_waits_20_seconds_at_most(house: House, first: str):
    with besieged(house, lambda siege: siege.bench.list_signer("ann") and None) as siege:
        if first == "crowd":
            push_all(siege)
        with house.runner("--idle", "0.2", trusted=False):
            if first == "runner":
                seconds_to_answer(siege)
                push_all(siege)
            waited = [seconds_to_answer(siege) for _ in range(2)]
        assert max(waited) < MOST_S, siege.said()[-3000:]
        assert "a bug of kakeya-mac" not in siege.said()


def push_all(siege: Siege) -> None:
    crowd(siege, 40_000)
    huge(siege)
    odd_names(siege)

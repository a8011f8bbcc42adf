"""What git says becomes one message that a person can act on; the texts are those of git 2.39, OpenSSH 9."""

from __future__ import annotations

import pytest

from bridge.errors import AccessDenied, BusError, LeaseLost, PushRejected, RemoteUnreachable
from bridge.git.errors import command_error, push_error, summary, timed_out, unreachable

HTTP = "https://me:secret@example.org/r.git"
SSH = "ssh://git@example.org/r.git"
FILE = "/srv/r.git"
ACCESS = (
    b"fatal: Could not read from remote repository.\n\n"
    b"Please make sure you have the correct access rights\nand the repository exists.\n"
)
HUNG_UP = (
    b"send-pack: unexpected disconnect while reading sideband packet\n"
    b"fatal: the remote end hung up unexpectedly\n"
)
UNREACHABLE = {
    "wrong token": (
        b"remote: Invalid username or token.\nfatal: Authentication failed for 'https://example.org/r.git/'\n",
        "https://example.org/r.git refused the user name or password; it says: Invalid username or token.",
    ),
    "no password": (
        b"fatal: could not read Password for 'https://secret@example.org': terminal prompts disabled\n",
        "https://example.org/r.git wants a user name and password, and git knows none",
    ),
    "refused key": (
        b"git@example.org: Permission denied (publickey,password).\n" + ACCESS,
        "https://example.org/r.git refused the SSH key",
    ),
    "host key": (
        b"@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\nHost key verification failed.\n"
        + ACCESS,
        "https://example.org/r.git shows an unknown SSH host key",
    ),
    "no repository": (
        b"fatal: '/srv/r.git' does not appear to be a git repository\n" + ACCESS,
        "cannot reach https://example.org/r.git: '/srv/r.git' does not appear to be a git repository",
    ),
    "nothing listens": (
        b"ssh: connect to host h port 22: Connection refused\n" + ACCESS,
        "cannot reach https://example.org/r.git: ssh: connect to host h port 22: Connection refused",
    ),
    "silence": (b"", "cannot reach https://example.org/r.git: no answer"),
    "vanished": (
        b"error: RPC failed; curl 55 Send failure: Broken pipe\n" + HUNG_UP,
        "cannot reach https://example.org/r.git: error: RPC failed; curl 55 Send failure: Broken pipe",
    ),
    "vanished after a hook's words": (
        b"remote: authentication failed for this policy\n" + HUNG_UP,
        "cannot reach https://example.org/r.git: ",
    ),
}


@pytest.mark.parametrize("case", UNREACHABLE)
def test_message_says_what_is_wrong_and_what_to_do(case: str):
    stderr, message = UNREACHABLE[case]
    for error in (unreachable(HTTP, stderr), push_error(HTTP, b"Done\n", stderr)):
        assert isinstance(error, RemoteUnreachable)
        assert isinstance(error, AccessDenied) == (case in list(UNREACHABLE)[:4])
        assert error.message.startswith(message)
        assert "\n" not in error.message
        assert error.remedy
        assert "secret" not in f"{error.message}{error.remedy}"


def ref(name: str, why: str) -> bytes:
    return f"!\tHEAD:{name}\t{why}\n".encode()


REJECTED = {
    "a hook": (
        ref("refs/heads/x", "[remote rejected] (atomic push failure)")
        + ref("refs/kk/x", "[remote rejected] (hook declined)"),
        b"remote: only branches, \x1b[31mask https://me:secret@example.org/        \n",
        ["refs/kk/x [remote rejected] (hook declined)", "the server says: only branches, ask"],
    ),
    "git daemon": (
        b"",
        b"fatal: remote error: access denied or repository not exported: /r.git\n",
        ["access denied or repository not exported"],
    ),
    "HTTP 403": (
        b"",
        b"remote: Permission to a/r.git denied to me.\n"
        b"fatal: unable to access 'https://example.org/r.git/': The requested URL returned error: 403\n",
        ["Permission to a/r.git denied to me."],
    ),
    "HTTP 413": (
        b"Done\n",
        b"error: RPC failed; HTTP 413 curl 22 The requested URL returned error: 413\n" + HUNG_UP,
        ["HTTP 413"],
    ),
    "a forge over SSH": (
        b"",
        b"remote: ERROR: You are not allowed to push code to this project.\n" + ACCESS,
        ["You are not allowed to push code to this project."],
    ),
}


@pytest.mark.parametrize("case", REJECTED)
def test_server_that_says_no_is_quoted(case: str):
    stdout, stderr, words = REJECTED[case]
    error = push_error(HTTP, stdout, stderr)
    assert isinstance(error, PushRejected)
    assert error.message.startswith("https://example.org/r.git refused the push")
    assert all(word in error.message for word in words)
    assert "secret" not in f"{error.message}{error.remedy}"
    assert "\x1b" not in error.message


ECHO = "[remote rejected] (atomic transaction failed)"
STALE = ref("refs/a", "[rejected] (stale info)")
LOST = {
    "alone": (STALE, b"", LeaseLost),
    "with an echo": (STALE + ref("refs/b", "[rejected] (atomic push failed)"), b"", LeaseLost),
    "with a refusal": (STALE + ref("refs/b", "[remote rejected] (hook declined)"), b"", PushRejected),
    "echoes alone": (ref("refs/a", ECHO) + ref("refs/b", ECHO), b"", LeaseLost),
    "echoes of a lock": (
        ref("refs/a", ECHO),
        b"remote: error: cannot lock ref 'refs/a': is at 1234 but expected 5678        \n",
        LeaseLost,
    ),
    "echoes of a hook": (
        ref("refs/a", ECHO),
        b"remote: error: in 'prepared' phase, update aborted by the reference-transaction hook        \n",
        PushRejected,
    ),
    "echoes of a clash": (
        ref("refs/a/b", ECHO),
        b"remote: error: cannot lock ref 'refs/a/b': 'refs/a' exists; cannot create 'refs/a/b'        \n",
        PushRejected,
    ),
    "no report": (
        ref("refs/a", "[remote failure] (remote failed to report status)"),
        HUNG_UP,
        RemoteUnreachable,
    ),
    "no refusal": (b"*\tHEAD:refs/a\t[new branch]\n", HUNG_UP, RemoteUnreachable),
}


@pytest.mark.parametrize("case", LOST)
def test_refused_refs_tell_a_lost_lease_from_a_refusal(case: str):
    stdout, stderr, expected = LOST[case]
    assert type(push_error(SSH, stdout, stderr)) is expected


def test_no_message_is_long_or_shows_credentials():
    flood = b"remote: " + b"https://me:secret@h/ \x1b[31m" * 200_000
    rejected = ref("refs/a", "[remote rejected] (" + "no " * 5000 + ")")
    for error in (
        unreachable(HTTP, flood),
        push_error(HTTP, b"", flood),
        push_error(HTTP, rejected, flood),
        unreachable(HTTP, CORRUPT * 500),
        timed_out(HTTP, 5),
        command_error("fetch", "/x", 128, b"fatal: bad https://me:secret@example.org/"),
        command_error("fetch", "/x", 128, b""),
    ):
        assert len(error.message) <= 800
        assert "secret" not in f"{error.message}{error.remedy}"
    assert summary(b"ssh: no route\n" + ACCESS).startswith("ssh: no route; fatal: Could not read")


# Whose fault it is

SHA = b"0a09e0d3e804e6952554c3648b0db0dda2a4090a"
CORRUPT = (
    b"error: unable to unpack " + SHA + b" header\n"
    b"fatal: loose object " + SHA + b" (stored in ./objects/0a/09e0) is corrupt\n"
)
UNREAD = b"error: Could not read " + SHA + b"\nfatal: Failed to traverse parents of commit " + SHA + b"\n"
CONFIG = b"fatal: bad config line 5 in file ./config\n"
NO_PACK = b"error: remote unpack failed: eof before pack header was fully read\n"
UNPACKER = b"!\tHEAD:refs/heads/x\t[remote rejected] (unpacker error)\n"

OURS = {
    "no repository": (SSH, b"fatal: not a git repository (or any of the parent directories): .git\n"),
    "no folder": (SSH, b"fatal: cannot change to '/state/mirror.git': No such file or directory\n"),
    "configuration": (FILE, CONFIG),
    "objects over HTTP": (HTTP, UNREAD + b"fatal: the remote end hung up unexpectedly\n" + HUNG_UP),
    "broken object after a fetch": (SSH, CORRUPT + b"error: remote did not send all necessary objects\n"),
    "broken index": (
        FILE,
        b"error: index file ./objects/pack/pack-1.idx is too small\nfatal: bad object " + SHA + b"\n"
        b"error: /srv/r.git did not send all necessary objects\n",
    ),
    "full disk": (
        SSH,
        b"fatal: write error: No space left on device\nfatal: fetch-pack: invalid index-pack output\n",
    ),
    "no permission": (HTTP, b"error: Unable to create './refs/x.lock': Permission denied\n"),
}
THEIRS = {
    "configuration over SSH": (SSH, CONFIG + ACCESS),
    "broken object over SSH": (SSH, CORRUPT + HUNG_UP),
    "broken object in a fetch": (FILE, CORRUPT + b"fatal: the remote end hung up unexpectedly\n"),
    "no such object": (SSH, b"fatal: bad object refs/heads/main\nfatal: remote error: not our ref\n"),
    "too little sent": (
        HTTP,
        b"error: Could not read " + SHA + b"\nerror: remote did not send all necessary objects\n",
    ),
    "its own words": (HTTP, b"remote: fatal: not a git repository\n" + HUNG_UP),
    "nothing listens": (HTTP, b"fatal: unable to access 'https://example.org/r.git/': Failed to connect\n"),
    "no password": (HTTP, b"error: unable to read askpass response\nfatal: could not read Username\n"),
}


@pytest.mark.parametrize("case", OURS)
def test_fault_on_this_machine_is_not_the_remotes(case: str):
    remote, stderr = OURS[case]
    for error in (unreachable(remote, stderr), push_error(remote, b"", stderr)):
        assert type(error) is BusError
        assert error.message.startswith("git failed on this machine, before ")
        assert "hung up" not in error.message


@pytest.mark.parametrize("case", THEIRS)
def test_fault_of_the_remote_is_not_ours(case: str):
    remote, stderr = THEIRS[case]
    assert isinstance(unreachable(remote, stderr), RemoteUnreachable)


KILLED = b"error: pack-objects died of signal 9\n"
PACKS: dict[str, tuple[bytes, type[BusError]]] = {
    "broken here": (UNREAD + NO_PACK, BusError),
    "not sent": (NO_PACK, PushRejected),
    "full disk there": (
        b"remote: fatal: write error: No space left on device\nerror: remote unpack failed: abnormal exit\n",
        PushRejected,
    ),
    "killed before the pack": (KILLED + NO_PACK, RemoteUnreachable),
    "killed amid the pack": (KILLED + b"error: remote unpack failed: abnormal exit\n", RemoteUnreachable),
}


@pytest.mark.parametrize("case", PACKS)
def test_pack_that_did_not_arrive_is_told_from_a_refusal(case: str):
    said, expected = PACKS[case]
    assert type(push_error(FILE, UNPACKER, said)) is expected

"""What git says becomes one message that a person can act on; the texts are those of git 2.39, OpenSSH 9."""

from __future__ import annotations

import pytest

from bridge.errors import BusError, LeaseLost, PushRejected, RemoteUnreachable
from bridge.git.errors import command_error, push_error, summary, timed_out, unreachable

REMOTE = "https://me:secret@example.org/r.git"
ACCESS = (
    b"fatal: Could not read from remote repository.\n\n"
    b"Please make sure you have the correct access rights\nand the repository exists.\n"
)
HUNG_UP = (
    b"send-pack: unexpected disconnect while reading sideband packet\n"
    b"fatal: the remote end hung up unexpectedly\n"
)
HOST_KEY = (
    b"@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@\n@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\n"
    b"IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!\n"
    b"Host key for [127.0.0.1]:39023 has changed and you have requested strict checking.\n"
    b"Host key verification failed.\n"
)
REFUSED = {
    "wrong password": (
        b"fatal: Authentication failed for 'https://example.org/r.git/'\n",
        "https://example.org/r.git refused the user name or password",
        "git ls-remote https://example.org/r.git",
    ),
    "wrong token at a forge": (
        b"remote: Invalid username or token.\nfatal: Authentication failed for 'https://example.org/r.git/'\n",
        "https://example.org/r.git refused the user name or password; it says: Invalid username or token.",
        "git ls-remote",
    ),
    "no password": (
        b"fatal: could not read Password for 'https://secret@example.org': terminal prompts disabled\n",
        "https://example.org/r.git wants a user name and password, and git knows none",
        "credential helper",
    ),
    "refused key": (
        b"git@example.org: Permission denied (publickey,password).\n" + ACCESS,
        "https://example.org/r.git refused the SSH key",
        "public key",
    ),
    "host key": (
        HOST_KEY + ACCESS,
        "the SSH host key of https://example.org/r.git is not known here, or is another than before",
        "known_hosts",
    ),
    "no repository": (
        b"fatal: '/srv/r.git' does not appear to be a git repository\n" + ACCESS,
        "there is no repository at https://example.org/r.git, or none that this user may see",
        "check the address",
    ),
    "no repository over HTTP": (
        b"fatal: repository 'https://me:secret@example.org/r.git/' not found\n",
        "there is no repository at https://example.org/r.git, or none that this user may see",
        "check the address",
    ),
    "nobody listens": (
        b"fatal: unable to access 'https://example.org/r.git/': Failed to connect to example.org port 443\n",
        "cannot reach https://example.org/r.git: Failed to connect to example.org port 443",
        "check the address",
    ),
    "nobody listens to SSH": (
        b"ssh: connect to host h port 22: Connection refused\n" + ACCESS,
        "cannot reach https://example.org/r.git: ssh: connect to host h port 22: Connection refused",
        "check the address",
    ),
    "silence": (b"", "cannot reach https://example.org/r.git: no answer", "check the address"),
    "vanished": (
        b"error: RPC failed; curl 55 Send failure: Broken pipe\n" + HUNG_UP,
        "https://example.org/r.git broke off in the middle: error: RPC failed; curl 55 Send failure: "
        "Broken pipe",
        "try again",
    ),
    "vanished over SSH": (
        b"Connection to 127.0.0.1 closed by remote host.\n" + HUNG_UP,
        "https://example.org/r.git broke off in the middle: Connection to 127.0.0.1 closed by remote host.",
        "try again",
    ),
    "vanished without a word": (HUNG_UP, "https://example.org/r.git broke off in the middle", "try again"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_message_says_what_is_wrong_and_what_to_do(case: str):
    stderr, message, remedy = REFUSED[case]
    for error in (
        unreachable(REMOTE, stderr),
        push_error(REMOTE, b"", stderr),
        push_error(REMOTE, b"Done\n", stderr),
    ):
        assert isinstance(error, RemoteUnreachable)
        assert error.message.startswith(message)
        assert "\n" not in error.message
        assert remedy in (error.remedy or "")
        assert error.exit_code == 6
        assert "secret" not in f"{error.message}{error.remedy}"


def test_message_of_git_is_no_longer_than_its_reason():
    assert unreachable(REMOTE, REFUSED["vanished without a word"][0]).message.endswith("middle")
    assert "WARNING" not in unreachable(REMOTE, HOST_KEY).message


def ref(name: str, flag: str, why: str) -> bytes:
    return f"{flag}\tHEAD:{name}\t{why}\n".encode()


REJECTED = {
    "a hook": (
        ref("refs/heads/x", "!", "[remote rejected] (pre-receive hook declined)"),
        b"remote: no pushes today, \x1b[31mask https://me:secret@example.org/        \n",
        [
            "refs/heads/x [remote rejected] (pre-receive hook declined)",
            "the server says: no pushes today, ask",
        ],
    ),
    "a hook that takes branches only": (
        ref("refs/heads/x", "!", "[remote rejected] (atomic push failure)")
        + ref("refs/kk/x", "!", "[remote rejected] (hook declined)"),
        b"remote: only branches        \n",
        ["refs/kk/x [remote rejected] (hook declined)", "only branches"],
    ),
    "git daemon": (
        b"",
        b"fatal: remote error: access denied or repository not exported: /r.git\n",
        ["its git daemon takes none"],
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
        ["larger than the server takes"],
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
    error = push_error(REMOTE, stdout, stderr)
    assert isinstance(error, PushRejected)
    assert error.message.startswith("https://example.org/r.git refused the push")
    assert all(word in error.message for word in words)
    assert "secret" not in f"{error.message}{error.remedy}"
    assert "\x1b" not in error.message


def test_ref_that_moved_is_a_lost_lease_also_among_echoes():
    lost = ref("refs/a", "!", "[rejected] (stale info)") + ref(
        "refs/b", "!", "[rejected] (atomic push failed)"
    )
    assert isinstance(push_error(REMOTE, lost, b""), LeaseLost)
    mixed = ref("refs/a", "!", "[rejected] (stale info)") + ref(
        "refs/b", "!", "[remote rejected] (hook declined)"
    )
    assert isinstance(push_error(REMOTE, mixed, b""), PushRejected)


ECHO = "[remote rejected] (atomic transaction failed)"


def test_where_every_ref_echoes_the_servers_words_decide():
    echoes = ref("refs/a", "!", ECHO) + ref("refs/b", "!", ECHO)
    lost = b"remote: error: cannot lock ref 'refs/a': reference already exists        \n"
    assert isinstance(push_error(REMOTE, echoes, lost), LeaseLost)
    moved = b"remote: error: cannot lock ref 'refs/a': is at 1234 but expected 5678        \n"
    assert isinstance(push_error(REMOTE, echoes, moved), LeaseLost)
    assert isinstance(push_error(REMOTE, echoes, b""), LeaseLost)
    hook = b"remote: error: in 'prepared' phase, update aborted by the reference-transaction hook        \n"
    assert isinstance(push_error(REMOTE, echoes, hook), PushRejected)
    clash = b"remote: error: cannot lock ref 'refs/a/b': 'refs/a' exists; cannot create 'refs/a/b'        \n"
    assert isinstance(push_error(REMOTE, echoes, clash), PushRejected)


def test_push_without_a_report_is_of_unknown_fate():
    output = ref("refs/a", "!", "[remote failure] (remote failed to report status)")
    assert isinstance(push_error(REMOTE, output, HUNG_UP), RemoteUnreachable)
    done = ref("refs/a", "*", "[new branch]")
    assert isinstance(push_error(REMOTE, done, HUNG_UP), RemoteUnreachable)


def test_words_of_a_hook_before_a_disconnect_are_no_answer():
    chatter = b"remote: checking the policy; authentication failed for nobody\n"
    error = push_error(REMOTE, b"", chatter + HUNG_UP)
    assert isinstance(error, RemoteUnreachable)
    assert "broke off" in error.message


def test_words_of_a_flooding_server_are_capped():
    flood = b"remote: " + b"https://me:secret@h/ \x1b[31m" * 200_000
    rejected = ref("refs/a", "!", "[remote rejected] (" + "no " * 5000 + ")")
    for error in (
        unreachable(REMOTE, flood),
        push_error(REMOTE, b"", flood),
        push_error(REMOTE, rejected, flood),
    ):
        assert len(error.message) <= 800
        assert "secret" not in error.message


@pytest.mark.parametrize(
    "error",
    [
        timed_out(REMOTE, 5),
        command_error("fetch", "/x", 128, b"fatal: bad https://me:secret@example.org/"),
        command_error("fetch", "/x", 128, b""),
    ],
)
def test_other_errors_show_no_credentials_either(error: BusError):
    assert "secret" not in f"{error.message}{error.remedy}"
    assert error.exit_code == 6


def test_summary_is_one_line_without_boilerplate():
    assert summary(b"ssh: no route\n" + ACCESS) == "ssh: no route"
    assert summary(ACCESS) != ""


# Whose fault it is

HTTP = "https://me:secret@example.org/r.git"
SSH = "ssh://git@example.org/r.git"
FILE = "/srv/r.git"
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
    "broken object over HTTP": (HTTP, CORRUPT + HUNG_UP),
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
    "configuration in a folder": (FILE, CONFIG + ACCESS),
    "broken object over SSH": (SSH, CORRUPT + HUNG_UP),
    "broken object in a fetch": (FILE, CORRUPT + b"fatal: the remote end hung up unexpectedly\n"),
    "no such object": (
        SSH,
        b"fatal: bad object refs/heads/main\nfatal: remote error: not our ref\n",
    ),
    "too little sent": (
        HTTP,
        b"error: Could not read " + SHA + b"\nerror: remote did not send all necessary objects\n",
    ),
    "its own words": (HTTP, b"remote: fatal: not a git repository\n" + HUNG_UP),
    "nobody listens": (HTTP, b"fatal: unable to access 'https://example.org/r.git/': Failed to connect\n"),
    "no password": (
        HTTP,
        b"error: unable to read askpass response\nfatal: could not read Username\n",
    ),
    "refused key": (SSH, b"git@example.org: Permission denied (publickey).\n" + ACCESS),
}


@pytest.mark.parametrize("case", OURS)
def test_fault_on_this_machine_is_not_the_remotes(case: str):
    remote, stderr = OURS[case]
    for error in (unreachable(remote, stderr), push_error(remote, b"", stderr)):
        assert type(error) is BusError
        assert error.message.startswith("git failed on this machine, before ")
        assert "hung up" not in error.message
        assert "secret" not in error.message


@pytest.mark.parametrize("case", THEIRS)
def test_fault_of_the_remote_is_not_ours(case: str):
    remote, stderr = THEIRS[case]
    assert isinstance(unreachable(remote, stderr), RemoteUnreachable)


def test_pack_that_could_not_be_made_is_no_refusal():
    assert type(push_error(SSH, UNPACKER, UNREAD + NO_PACK)) is BusError
    assert isinstance(push_error(SSH, UNPACKER, NO_PACK), PushRejected)
    theirs = b"remote: fatal: write error: No space left on device\n"
    refused = b"error: remote unpack failed: unpack-objects abnormal exit\n"
    assert isinstance(push_error(SSH, UNPACKER, theirs + refused), PushRejected)
    missing = b"!\tHEAD:refs/heads/x\t[remote rejected] (missing necessary objects)\n"
    assert isinstance(push_error(FILE, missing, b"fatal: bad object refs/heads/main\n"), PushRejected)


def test_long_complaint_is_cut():
    assert len(unreachable(HTTP, CORRUPT * 500 + UNREAD).message) <= 600


@pytest.mark.parametrize(
    "said",
    [
        b"error: pack-objects died of signal 9\n" + NO_PACK,
        b"error: pack-objects died of signal 9\nerror: remote unpack failed: unpack-objects abnormal exit\n",
    ],
    ids=["before the pack", "amid the pack"],
)
def test_push_whose_pack_broke_off_is_no_refusal(said: bytes):
    error = push_error(FILE, UNPACKER, said + b"error: failed to push some refs to '/srv/r.git'\n")
    assert isinstance(error, RemoteUnreachable)
    assert "broke off in the middle" in error.message

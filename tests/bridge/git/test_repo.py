"""Git in one repository: hostile names and environments, refs by prefix, commits without a work tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridge.errors import (
    BrokenObject,
    BusError,
    FetchTooLarge,
    LeaseLost,
    PushRejected,
    RemoteUnreachable,
    RevisionError,
)
from bridge.git.repo import AUTHOR, GitRepo, RefUpdate
from tests.fixtures.bus import BusFixture, snapshot
from tests.objects import FOLDER, GITLINK, LINK, PLAIN, PROGRAM, Objects
from tests.servers.http import http_server
from tests.servers.ssh import ssh_server

WHEN = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    "rev", ["", "-", "--exec=true", "--all", "nowhere", "a..b", "main\nHEAD", "HEAD:README.md"]
)
def test_revision_that_names_no_commit_is_refused(bus: BusFixture, rev: str):
    with pytest.raises(RevisionError):
        bus.git.resolve(rev)


@pytest.mark.parametrize(
    "shape", ["--upload-pack=touch {}", "-u touch {}", "ext::touch {}", "-oProxyCommand=touch {}"]
)
def test_remote_cannot_smuggle_in_a_command(bus: BusFixture, tmp_path: Path, shape: str):
    canary = tmp_path / "canary"
    with pytest.raises(RemoteUnreachable):
        bus.git.list_refs(shape.format(canary), "refs/heads/")
    with pytest.raises(RemoteUnreachable):
        bus.git.fetch(shape.format(canary), ["main"])
    assert not canary.exists()


def test_variables_that_name_another_repository_are_ignored(
    bus: BusFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    expected = bus.git.resolve("HEAD")
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_OBJECT_DIRECTORY", "GIT_INDEX_FILE", "GIT_COMMON_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
    assert bus.git.resolve("HEAD") == expected
    assert bus.submit().in_inbox


def test_a_revision_costs_the_two_processes_that_read_objects(bus: BusFixture, tmp_path: Path):
    log, fake = tmp_path / "log", tmp_path / "bin" / "git"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\necho "$@" >>{log}\nexec {shutil.which("git")} "$@"\n')
    fake.chmod(0o755)
    code = "import sys; from pathlib import Path; from bridge.git.repo import GitRepo"
    code += (
        "; repo = GitRepo(Path(sys.argv[1])); print(repo.read_file(repo.resolve('HEAD'), 'README.md', 99))"
    )
    env = {**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}"}
    subprocess.run([sys.executable, "-c", code, str(bus.repo.clone)], env=env, check=True)
    assert [line.split()[:2] for line in log.read_text().splitlines()] == [
        ["cat-file", "--batch-check"],
        ["cat-file", "--batch"],
    ]


def test_scratch_objects_are_gone_afterwards(bus: BusFixture):
    before = snapshot(bus.repo.clone)
    with bus.git.scratch() as scratch:
        commit = scratch.commit_files(None, {"a": b"only here"}, "x\n")
        assert scratch.exists(commit)
        assert scratch.read_file(commit, "a", 99) == b"only here"
    assert not bus.git.exists(commit)
    assert snapshot(bus.repo.clone) == before


def test_colon_and_quotes_in_the_path_of_a_checkout_work(bus: BusFixture):
    moved = bus.repo.clone.with_name('a "clone": with spaces')
    bus.repo.clone.rename(moved)
    with GitRepo(moved).scratch() as scratch:
        assert scratch.exists(scratch.resolve("HEAD"))


def test_sha256_repositories_are_refused_in_words(bus: BusFixture, tmp_path: Path):
    git, long = bus.repo.git, tmp_path / "long"
    git("init", "--quiet", "--object-format=sha256", str(long), cwd=tmp_path)
    who = ("-c", "user.name=T", "-c", "user.email=t@example.org")
    git(*who, "commit", "--quiet", "--allow-empty", "-m", "x", cwd=long)
    with pytest.raises(RevisionError, match="no commit"):
        GitRepo(long).resolve("HEAD")
    with pytest.raises(BusError, match="SHA-256"):
        bus.git.list_refs(str(long), "refs/heads/")
    with pytest.raises(BusError):
        bus.git.push(str(long), [RefUpdate("refs/heads/x", bus.git.resolve("HEAD"), "")])


# Refs of a remote ----------------------------------------------------------------------------------------


def old_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a git first on PATH whose upload-pack speaks protocol version 0 alone."""
    fake = tmp_path / "old" / "git"
    fake.parent.mkdir()
    unset = 'for word do if [ "$word" = upload-pack ]; then unset GIT_PROTOCOL; fi; done'
    fake.write_text(f'#!/bin/sh\n{unset}\nexec {shutil.which("git")} "$@"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")


def check_listing(bus: BusFixture, remote: str) -> None:
    head = bus.git.resolve("HEAD")
    names = ["refs/kk/a/1", "refs/kk/a/2", "refs/kk/b", "refs/heads/kk", "refs/heads/kk-\u00e9"]
    lines = "".join(f"create {name} {head}\n" for name in names)
    bus.repo.git("update-ref", "--stdin", cwd=bus.repo.remote, input=lines)
    every = dict.fromkeys([*names, "refs/heads/main"], head)
    for prefixes, expected in (
        ((), every),
        (("refs/kk/a/",), {"refs/kk/a/1": head, "refs/kk/a/2": head}),
        (("refs/kk/a/1", "refs/heads/kk-"), {"refs/kk/a/1": head, "refs/heads/kk-\u00e9": head}),
        (("refs/nothing/",), {}),
    ):
        assert bus.git.list_refs(remote, *prefixes) == expected


@pytest.mark.parametrize("server", ["today's", "of protocol version 0"])
def test_refs_are_listed_by_prefix(
    bus: BusFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str
):
    if server != "today's":
        old_server(tmp_path, monkeypatch)
    check_listing(bus, bus.remote)
    assert bus.git.list_refs(f"file://{bus.remote}", "refs/kk/b").keys() == {"refs/kk/b"}


@pytest.mark.e2e
@pytest.mark.unsandboxed
@pytest.mark.parametrize("kind", ["http", "ssh"])
def test_refs_are_listed_by_prefix_over_the_network(
    bus: BusFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
):
    git_repo, folder = bus.repo.remote, tmp_path / "server"
    started = ssh_server(git_repo, folder) if kind == "ssh" else http_server(git_repo, "me", "pa ss@", folder)
    with started as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        bus.repo.git("config", "--global", "safe.directory", "*")
        check_listing(bus, server.address())
        assert kind == "ssh" or "git-upload-pack as" in server.log()


def test_names_that_are_not_utf8_are_left_out(bus: BusFixture):
    head = bus.git.resolve("HEAD")
    packed = bus.repo.remote / "packed-refs"
    lines = [b"# pack-refs with: peeled fully-peeled sorted "]
    lines += [head.encode() + b" refs/kk/" + name for name in (b"a", b"b\xff\xfe", b"c")]
    packed.write_bytes(b"\n".join(lines) + b"\n")
    assert bus.git.list_refs(bus.remote, "refs/kk/") == {"refs/kk/a": head, "refs/kk/c": head}


def test_symbolic_refs_and_tags_are_listed_as_what_they_hold(bus: BusFixture):
    git, remote, head = bus.repo.git, bus.repo.remote, bus.git.resolve("HEAD")
    git("symbolic-ref", "refs/kk/link", "refs/heads/main", cwd=remote)
    git("-c", "user.name=T", "-c", "user.email=t@example.org", "tag", "-a", "-m", "x", "t", head, cwd=remote)
    tag = git("rev-parse", "refs/tags/t", cwd=remote)
    assert bus.git.list_refs(bus.remote, "refs/kk/", "refs/tags/") == {
        "refs/kk/link": head,
        "refs/tags/t": tag,
    }


@pytest.mark.parametrize("remote", ["/no/such.git", "http://127.0.0.1:9/x.git", "ssh://127.0.0.1:9/x.git"])
def test_remote_that_does_not_answer_is_one_clear_error(bus: BusFixture, remote: str):
    with pytest.raises(RemoteUnreachable) as error:
        bus.git.list_refs(remote, "refs/heads/", timeout_s=30)
    assert "Traceback" not in error.value.message


def test_password_in_an_address_is_in_no_message(bus: BusFixture):
    with pytest.raises(RemoteUnreachable) as error:
        bus.git.list_refs("http://user:hunter22@127.0.0.1:9/x.git", "refs/", timeout_s=30)
    assert "hunter22" not in error.value.message + (error.value.remedy or "")


# Commits -------------------------------------------------------------------------------------------------

# Names around ours in git's order, where a folder sorts as if it ended in a slash; one is not UTF-8.
NAMES = [
    b".mac-bridge",
    b".mac-bridge-",
    b".mac-bridge.",
    b".mac-bridge0",
    b".mac-bridg",
    b"-",
    b"\xc3\xa9",
    b"\xff",
]
KINDS = [PLAIN, PROGRAM, LINK, GITLINK, FOLDER]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commits") / "bare.git"
    subprocess.run(["git", "init", "--quiet", "--bare", str(folder)], check=True)
    return folder


def by_git(bare: Path, parent: str, files: dict[str, bytes], message: str) -> str:
    """The commit that git's own commands make."""
    env = {**os.environ, "GIT_DIR": str(bare), "GIT_INDEX_FILE": str(bare / "index")}
    for role in ("AUTHOR", "COMMITTER"):
        stamp = f"@{int(WHEN.timestamp())} +0000"
        who = {"NAME": AUTHOR[0], "EMAIL": AUTHOR[1], "DATE": stamp}
        env |= {f"GIT_{role}_{part}": value for part, value in who.items()}

    def git(*args: str, data: bytes = b"") -> str:
        done = subprocess.run(["git", *args], env=env, input=data, capture_output=True, check=True)
        return done.stdout.decode().strip()

    git("read-tree", parent)
    for path, data in files.items():
        blob = git("hash-object", "-w", "--stdin", data=data)
        git("update-index", "--add", "--cacheinfo", f"100644,{blob},{path}")
    return git("commit-tree", git("write-tree"), "-p", parent, data=message.encode())


@given(rows=st.dictionaries(st.sampled_from(NAMES), st.sampled_from(KINDS)))
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
def test_commit_is_the_one_that_git_would_write(bare: Path, rows: dict[bytes, str]):
    objects = Objects(bare)
    blob = objects.blob(b"x")
    inner = objects.tree([(PROGRAM, b"run", blob)])
    if b".mac-bridge" in rows:  # a file of that name is refused
        rows = {**rows, b".mac-bridge": FOLDER}
    shas = {FOLDER: inner, GITLINK: "1" * 40}
    tree = objects.tree([(mode, name, shas.get(mode, blob)) for name, mode in rows.items()])
    parent = objects.commit(tree)
    files = {".mac-bridge/request.json": b"{}", ".mac-bridge/deep/er/x": b"y"}
    with GitRepo(bare).scratch() as scratch:
        ours = scratch.commit_files(parent, dict(files), "a message\n", when=WHEN)
        again = scratch.commit_files(parent, dict(files), "a message\n", when=WHEN)
    assert ours == again == by_git(bare, parent, files, "a message\n")


def test_modes_that_git_no_longer_writes_stay_as_they_are(bare: Path):
    objects = Objects(bare)
    parent = objects.commit(objects.tree([("100664", b"old", objects.blob(b"x"))]))
    with GitRepo(bare).scratch() as scratch:
        commit = scratch.commit_files(parent, {"new": b"y"}, "x\n")
        assert scratch.tree_entries(commit)["old"][0] == "100664"
        removed = scratch.commit_files(parent, {"old": None, "gone": None}, "x\n")
        assert scratch.tree_entries(removed) == {}


def test_file_where_a_folder_belongs_is_refused(bare: Path):
    objects = Objects(bare)
    parent = objects.commit(objects.tree([(PLAIN, b".mac-bridge", objects.blob(b"x"))]))
    with GitRepo(bare).scratch() as scratch, pytest.raises(RevisionError, match="a folder belongs"):
        scratch.commit_files(parent, {".mac-bridge/request.json": b"{}"}, "x\n")


BROKEN = {
    "a name twice": lambda o: o.tree([(PLAIN, b"x", o.blob(b"1")), (PLAIN, b"x", o.blob(b"2"))]),
    "half a row": lambda o: o.write("tree", b"100644 x\0" + b"\1" * 7),
    "no mode": lambda o: o.write("tree", b"x\0" + b"\1" * 20),
    "too large": lambda o: o.write("tree", (b"100644 x\0" + bytes(20)) * 600_000),
}


@pytest.mark.parametrize("case", BROKEN)
def test_trees_that_git_would_not_write_are_one_clear_error(bare: Path, case: str):
    tree = BROKEN[case](Objects(bare))
    git_repo = GitRepo(bare)
    with pytest.raises(BrokenObject):
        git_repo.changes(None, tree)
    with git_repo.scratch() as scratch, pytest.raises(BrokenObject):
        scratch.commit_files(Objects(bare).commit(tree), {"a": b"b"}, "x\n")
    git_repo.close()


@pytest.mark.parametrize(
    "data", [b"", b"tree x\n\n", b"parent " + b"1" * 40 + b"\n\n", b"author a\n" * 9, b"\xff" * 99]
)
def test_commit_that_git_would_not_write_is_one_clear_error(bare: Path, data: bytes):
    sha = Objects(bare).write("commit", data)
    with pytest.raises(BusError):
        GitRepo(bare).commit(sha)


def test_objects_of_another_kind_or_size_are_not_read(bare: Path):
    objects, git_repo = Objects(bare), GitRepo(bare)
    blob = objects.blob(b"x" * 100)
    commit = objects.commit(
        objects.tree([(PLAIN, b"f", blob), (LINK, b"l", blob), (GITLINK, b"m", "1" * 40)])
    )
    assert git_repo.read_file(commit, "f", 100) == b"x" * 100
    assert git_repo.read_file(commit, "m", 100) is None
    assert git_repo.read_file(commit, "none", 100) is None
    with pytest.raises(BrokenObject, match="100 bytes"):
        git_repo.read_file(commit, "f", 99)
    with pytest.raises(BusError, match="a blob, not a commit"):
        git_repo.commit(blob)
    with pytest.raises(BusError, match="missing"):
        git_repo.commit("2" * 40)
    with pytest.raises(BusError, match="at most 150"):
        git_repo.read_objects([blob, blob], 150)
    git_repo.close()


# Pushes and fetches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("existing", [True, False])
def test_race_for_a_ref_is_a_lost_lease_also_in_an_atomic_push(bus: BusFixture, existing: bool):
    head = bus.git.resolve("HEAD")
    # Another push takes the ref between what the server shows and what it is told to do.
    bus.hook("update", "env -u GIT_QUARANTINE_PATH git update-ref refs/kk/claim $3")
    others = (
        [RefUpdate("refs/heads/main", head, head)] if existing else [RefUpdate("refs/kk/other", head, "")]
    )
    with pytest.raises(LeaseLost):
        bus.git.push(bus.remote, [RefUpdate("refs/kk/claim", head, ""), *others])


def test_server_that_declines_a_transaction_has_said_no(bus: BusFixture):
    head = bus.git.resolve("HEAD")
    bus.hook("reference-transaction", 'test "$1" = prepared && grep -q refs/kk && exit 1; exit 0')
    with pytest.raises(PushRejected):
        bus.git.push(bus.remote, [RefUpdate("refs/kk/x", head, ""), RefUpdate("refs/kk/y", head, "")])


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("place", ["repository", "scratch"])
@pytest.mark.parametrize("count", [1, 200], ids=["few objects", "many objects"])
def test_fetch_with_a_limit_counts_all_that_comes(bus: BusFixture, place: str, count: int):
    files = {f"{number:03}": os.urandom((3 << 20) // count) for number in range(count)}
    bus.point("refs/heads/large", Objects(bus.repo.remote).commit_files(None, dict(files)))
    own = GitRepo(bus.root / "own.git")
    GitRepo(bus.root).run("init", "--quiet", "--bare", str(own.directory))
    with own.scratch() as scratch:
        here = own if place == "repository" else scratch
        with pytest.raises(FetchTooLarge, match="sends more than 1048576 bytes"):
            here.fetch(bus.remote, ["refs/heads/large"], limit_bytes=1 << 20)
        assert not list(here.objects.rglob("tmp_*"))
        here.fetch(bus.remote, ["refs/heads/large"], limit_bytes=8 << 20)

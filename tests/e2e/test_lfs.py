"""The files that pointers name, fetched by the real git-lfs from a real server: verified, or refused."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.runner.policy import LfsRule
from bridge.runner.workspace import WorkloadRefused, replace_pointers
from tests.fixtures.repo import build_repo
from tests.fixtures.runner import RunnerFixture
from tests.servers.lfs import LfsServer, lfs_server, pointer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(shutil.which("git-lfs") is None, reason="no git-lfs: scripts/install_test_servers.sh"),
]


@pytest.fixture
def server() -> Iterator[LfsServer]:
    with lfs_server() as started:
        yield started


def laid(folder: Path, **files: str) -> list[str]:
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    return list(files)


def test_a_job_gets_the_files_and_a_workloads_own_settings_have_no_say(
    server: LfsServer, tmp_path: Path
) -> None:
    data = bytes(range(256)) * 5000
    with lfs_server() as other:
        files = {
            "big.bin": server.add(data),
            "small.bin": server.add(b"small\n"),
            ".lfsconfig": f"[lfs]\n\turl = {other.endpoint}\n",
            ".gitattributes": "*.bin filter=lfs diff=lfs merge=lfs -text\n",
        }
        runner = RunnerFixture(build_repo(tmp_path / "repo", files))
        program = "import hashlib; print(hashlib.sha256(open('big.bin', 'rb').read()).hexdigest())"
        runner.install({"echo": "print('hello')"})
        runner.preset("whole", ["${python}", "-c", program], engine="workload", workspace="full")
        rule = f'[lfs]\nendpoint = "{server.endpoint}"\n'
        runner.policy(f"allow_repo_code = true\nallow_unsandboxed = true\n{rule}")
        asked = runner.ask("whole")
        runner.serve_once()
        assert other.calls == []
    assert runner.verdict(asked.nonce) == ("passed", "ok"), runner.said
    assert hashlib.sha256(data).hexdigest() in runner.log(asked.nonce)
    assert "2 files of Git LFS" in runner.log(asked.nonce)


LIES = {
    "another content": lambda data: data[::-1],
    "less": lambda data: data[:-1],
    "more": lambda data: data + b"more",
    "a flood": lambda data: data * 400,
}


@pytest.mark.parametrize("name", LIES)
def test_a_server_that_lies_is_not_believed(server: LfsServer, tmp_path: Path, name: str) -> None:
    data = b"what was meant\n" * 1000
    paths = laid(tmp_path / "w", x=server.add(data))
    server.sent[hashlib.sha256(data).hexdigest()] = LIES[name](data)
    with pytest.raises(WorkloadRefused, match="does not give the object"):
        replace_pointers(tmp_path / "w", paths, LfsRule(endpoint=server.endpoint), scratch_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["w"], "nothing is left behind"


def test_an_object_that_is_not_there_is_named(server: LfsServer, tmp_path: Path) -> None:
    paths = laid(tmp_path / "w", here=server.add(b"here"), gone=pointer("ab" * 32, 7))
    with pytest.raises(WorkloadRefused, match=r"gone: .*abababababab of 7 bytes"):
        replace_pointers(tmp_path / "w", paths, LfsRule(endpoint=server.endpoint), scratch_dir=tmp_path)


def test_a_server_that_wants_a_password_is_no_wait(server: LfsServer, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    server.password = "secret"
    paths = laid(tmp_path / "w", x=server.add(b"x"))
    with pytest.raises(WorkloadRefused, match="does not give the object"):
        replace_pointers(tmp_path / "w", paths, LfsRule(endpoint=server.endpoint), scratch_dir=tmp_path)
    helper = tmp_path / "helper"
    helper.write_text("#!/bin/sh\necho username=me\necho password=secret\n")
    helper.chmod(0o755)
    (tmp_path / ".gitconfig").write_text(f"[credential]\n\thelper = {helper}\n")
    assert (
        replace_pointers(tmp_path / "w", paths, LfsRule(endpoint=server.endpoint), scratch_dir=tmp_path) == 1
    )
    assert (tmp_path / "w" / "x").read_bytes() == b"x"


def test_a_cancelled_job_does_not_wait_for_its_files(server: LfsServer, tmp_path: Path) -> None:
    paths = laid(tmp_path / "w", x=server.add(b"x"))
    rule = LfsRule(endpoint=server.endpoint)
    assert replace_pointers(tmp_path / "w", paths, rule, scratch_dir=tmp_path, stop=lambda: True) == 0


def test_a_folder_serves_objects_as_well(tmp_path: Path) -> None:
    data = b"from a folder\n"
    oid = hashlib.sha256(data).hexdigest()
    store = tmp_path / "mirror.git" / "lfs" / "objects" / oid[:2] / oid[2:4]
    build_repo(tmp_path / "repo").git("init", "--quiet", "--bare", str(tmp_path / "mirror.git"))
    store.mkdir(parents=True)
    (store / oid).write_bytes(data)
    paths = laid(tmp_path / "w", x=pointer(oid, len(data)))
    rule = LfsRule(endpoint=f"file://{tmp_path}/mirror.git")
    assert replace_pointers(tmp_path / "w", paths, rule, scratch_dir=tmp_path) == len(data)
    assert (tmp_path / "w" / "x").read_bytes() == data

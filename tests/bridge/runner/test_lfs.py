"""Pointers of Git LFS never reach a job: the files they name do, or the request is refused.

Refusals need no git-lfs. What is fetched is fetched by the real one, in ``tests/e2e/test_lfs.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.errors import PolicyError
from bridge.protocol.result import Reason, Status
from bridge.runner.policy import LfsRule, load, parse
from bridge.runner.workspace import WorkloadRefused, replace_pointers
from tests.fixtures.repo import build_repo
from tests.fixtures.runner import RunnerFixture
from tests.servers.lfs import pointer

OID = "ab" * 32
ELSEWHERE = LfsRule(endpoint="http://127.0.0.1:9/lfs", max_bytes=1000)


def laid(folder: Path, **files: str) -> list[str]:
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    return list(files)


def test_where_no_server_is_named_pointers_refuse_the_job(tmp_path: Path) -> None:
    repo = build_repo(tmp_path / "repo", {"weights.bin": pointer(OID, 10), "README.md": "x\n"})
    runner = RunnerFixture(repo)
    runner.install({"echo": "print('hello')"})
    runner.preset("whole", ["${python}", "-c", "print(1)"], engine="workload", workspace="full")
    runner.policy("allow_repo_code = true\nallow_unsandboxed = true\n")
    asked = runner.ask("whole")
    runner.serve_once()
    verdict = runner.answer(asked.nonce).result.verdict
    assert (verdict.status, verdict.reason) == (Status.REFUSED, Reason.BAD_WORKLOAD), runner.said
    assert "'weights.bin'" in verdict.message
    assert "[lfs] endpoint" in verdict.message


HOSTILE = {
    "an exabyte": (pointer(OID, 10**18 - 1), "at most"),
    "more than a number": (pointer(OID, 10**30), "is none"),
    "a path for a hash": (pointer("../" * 21 + "x", 4), "is none"),
    "an extension": (
        f"version https://git-lfs.github.com/spec/v1\next-0-evil sha256:{OID}\noid sha256:{OID}\nsize 3\n",
        "is none",
    ),
    "more behind it": (pointer(OID, 4) + "more\n", "is none"),
    "another version": ("version https://git-lfs.github.com/spec/v9\n", "is none"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pointers_are_refused_before_anything_is_asked(tmp_path: Path, name: str) -> None:
    text, said = HOSTILE[name]
    paths = laid(tmp_path / "w", x=text)
    with pytest.raises(WorkloadRefused, match=said):
        replace_pointers(tmp_path / "w", paths, ELSEWHERE, scratch_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["w"]


def test_one_object_in_many_places_counts_in_each(tmp_path: Path) -> None:
    """It is fetched once, and lies in every one of them."""
    paths = laid(tmp_path / "w", a=pointer(OID, 900), b=pointer(OID, 900))
    with pytest.raises(WorkloadRefused, match="2 files with 1800 bytes; at most"):
        replace_pointers(tmp_path / "w", paths, ELSEWHERE, scratch_dir=tmp_path)


def test_a_policy_names_the_server_and_the_limit(tmp_path: Path) -> None:
    text = b'[lfs]\nendpoint = "https://lfs.example.org/a.git/info/lfs"\nmax = "1 GiB"\n'
    rule = parse(tmp_path / "policy.toml", text).lfs
    assert rule == LfsRule(endpoint="https://lfs.example.org/a.git/info/lfs", max_bytes=1 << 30)
    assert load(tmp_path / "none").lfs == LfsRule()


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("lfs.example.org/x", "must begin with"),
        ("ext::sh -c id", "must begin with"),
        ("https://me:secret@lfs.example.org/x", "credentials"),
        ("https://token@lfs.example.org/x", "credentials"),
    ],
    ids=["no scheme", "a program", "a password", "a token"],
)
def test_a_server_that_cannot_be_meant_is_an_error_that_names_the_line(
    tmp_path: Path, endpoint: str, said: str
) -> None:
    with pytest.raises(PolicyError, match=said) as error:
        parse(tmp_path / "policy.toml", f'[lfs]\nendpoint = "{endpoint}"\n'.encode())
    assert "policy.toml: lfs.endpoint: must" in error.value.message

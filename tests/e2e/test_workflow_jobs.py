"""Both jobs of a workflow run over HTTP with the run's token, which is on no command line, disk or screen."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from bridge.protocol.refs import audience_of
from tests.bridge.github.runs import ask
from tests.e2e.buses import Watch
from tests.fixtures.repo import build_repo
from tests.fixtures.runner import RunnerFixture
from tests.servers.http import http_server

pytestmark = [pytest.mark.e2e, pytest.mark.unsandboxed]

USER, TOKEN = "x-access-token", "ghs_Zm9vYmFyYmF6cXV4MTIzNDU2Nzg5MA"
SPELLINGS = (TOKEN.encode(), base64.b64encode(f"{USER}:{TOKEN}".encode()))


def test_a_runs_token_opens_the_repository_and_shows_up_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.e2e.buses.SPELLINGS", SPELLINGS)
    repo = build_repo(tmp_path / "repo")
    runner = RunnerFixture(repo)
    runner.install()
    (repo.root / "team").mkdir()
    (repo.root / "team" / "workload").symlink_to(repo.remote)
    (repo.root / "home" / ".gitconfig").write_text("[safe]\n\tdirectory = *\n")
    with http_server(repo.remote, USER, TOKEN, tmp_path / "server") as server, Watch() as watch:
        origin = f"http://127.0.0.1:{server.port}"
        manifest, run = ask(runner, audience=audience_of(f"{origin}/team/workload"))
        repo.env |= server.env
        env = {"GITHUB_SERVER_URL": origin, "KAKEYA_REMOTE": "", "KAKEYA_GITHUB_TOKEN": TOKEN}
        denied = run.execute(**{**env, "KAKEYA_GITHUB_TOKEN": ""})
        assert denied.code == 6
        executed = run.execute(**env)
        assert executed.code == 0, executed.out + executed.err
        published = run.publish(**env)
        assert published.code == 0, published.out + published.err
    assert runner.verdict(manifest.nonce) == ("passed", "ok")
    assert "git" in watch.names
    assert not watch.leaked
    said = "".join(done.out + done.err for done in (denied, executed, published)).encode()
    files = [path for path in tmp_path.rglob("*") if path.is_file() and "server" not in path.parts]
    places = [str(path) for path in files if any(each in path.read_bytes() for each in SPELLINGS)]
    assert not places
    assert not any(spelling in said for spelling in SPELLINGS)

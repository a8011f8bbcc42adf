"""What may run here is decided by this machine's files; everything else is refused, with its reason."""

from datetime import UTC, datetime, timedelta

import pytest

from bridge.bus.git import Git
from bridge.bus.objects import Entry
from bridge.bus.requests import build
from bridge.protocol import refs
from bridge.protocol.manifest import REQUEST_PATH
from bridge.protocol.result import Reason, Status
from bridge.runner.serve import Runner
from tests.bridge.runner.bench import Bench


@pytest.mark.sampled(6, 1)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"preset": "nonesuch"}, Reason.UNKNOWN_PRESET),
        ({"params": {"word": 3}}, Reason.BAD_PARAMETER),
        ({"params": {"word": "--upload-pack=x"}}, Reason.BAD_PARAMETER),
        ({"params": {"words": "x"}}, Reason.BAD_PARAMETER),
        ({"preset": "tests", "params": {"path": "tests/../../x"}}, Reason.BAD_PARAMETER),
        ({"preset": "tests"}, Reason.POLICY),
        ({"audience": "example.org/else/where"}, Reason.WRONG_AUDIENCE),
        (
            {
                "created_at": datetime.now(UTC).replace(microsecond=0) - timedelta(hours=2),
                "expires_at": datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1),
            },
            Reason.EXPIRED,
        ),
        ({"preset": "gate", "params": {"file": "reports/none.json"}}, Reason.BAD_WORKLOAD),
    ],
)
def test_what_may_not_run_is_refused_with_its_reason_published(
    bench: Bench, changes: dict[str, object], reason: Reason
) -> None:
    asked = bench.ask(**changes)  # type: ignore[arg-type]
    assert bench.serve_once() == 1
    answer = bench.answer(asked.nonce)
    assert answer.result.verdict.status is Status.REFUSED
    assert answer.result.verdict.reason is reason
    assert answer.result.verdict.message
    assert answer.result.commands == ()
    assert refs.inbox_ref(asked.nonce) not in bench.house.remote_refs()


@pytest.mark.slow
def test_a_preset_that_this_machine_cannot_run_is_refused(bench: Bench) -> None:
    bench.preset("huge", ["/bin/true"], tail="[requires]\nmemory_gb = 1e9\n")
    bench.preset("lacking", ["/bin/true"], tail='[requires]\nmodules = ["no_such_module"]\n')
    bench.preset(
        "modelled",
        ["/bin/true", "${model:gone}"],
        tail='[models.gone]\nmac = "something"\n',
    )
    expected = {
        "huge": ("refused", "machine_unfit"),
        "lacking": ("refused", "machine_unfit"),
        "modelled": ("refused", "model_missing"),
    }
    for preset, answer in expected.items():
        asked = bench.ask(preset)
        bench.serve_once()
        assert bench.verdict(asked.nonce) == answer


def test_expiry_is_judged_by_the_runners_clock(bench: Bench) -> None:
    asked = bench.ask()
    later = datetime.now(UTC) + timedelta(hours=2)
    Runner(bench.station(), now=lambda: later).serve(once=True, idle_timeout_s=20)
    assert bench.verdict(asked.nonce) == ("refused", "expired")


def test_a_request_from_the_future_is_refused_however_long_it_would_be_valid(bench: Bench) -> None:
    asked = bench.ask()
    earlier = datetime.now(UTC) - timedelta(days=1, minutes=1)
    Runner(bench.station(), now=lambda: earlier).serve(once=True, idle_timeout_s=20)
    assert bench.verdict(asked.nonce) == ("refused", "bad_manifest")
    assert "it is " in bench.answer(asked.nonce).result.verdict.message


def hostile_commits(bench: Bench) -> dict[str, tuple[str, Reason]]:
    """Request commits of the wrong shape, by what is wrong with them: (commit, expected reason)."""
    git = Git(bench.house.clone)
    manifest = bench.manifest()
    parent = manifest.workload_sha
    entries = git.entries(parent)

    def commit(data: bytes, extra: tuple[Entry, ...] = (), parents: tuple[str, ...] = (parent,)) -> str:
        blob = Entry("100644", "blob", git.write_blob(data), REQUEST_PATH.split("/")[1])
        folder = Entry("040000", "tree", git.write_tree([blob]), ".mac-bridge")
        return git.commit_tree(git.write_tree([*entries, folder, *extra]), list(parents), "hostile")

    evil = Entry("100644", "blob", git.write_blob(b"import os\n"), "sitecustomize.py")
    good = manifest.to_bytes()
    return {
        "another file changed": (commit(good, (evil,)), Reason.BAD_COMMIT),
        "two parents": (commit(good, parents=(parent, bench.request_commit(manifest))), Reason.BAD_COMMIT),
        "no manifest": (git.commit_tree(git.write_tree(entries), [parent], "nothing"), Reason.BAD_COMMIT),
        "not JSON": (commit(b"{"), Reason.BAD_MANIFEST),
        "a duplicate key": (commit(good.replace(b"{", b'{"nonce": "x", ', 1)), Reason.BAD_MANIFEST),
        "an unknown key": (commit(good.replace(b"{", b'{"argv": ["sh"], ', 1)), Reason.BAD_MANIFEST),
        "another nonce": (commit(bench.manifest().to_bytes()), Reason.BAD_MANIFEST),
        "a huge manifest": (commit(b" " * 100_000 + good), Reason.BAD_COMMIT),
    }


def test_hostile_commits_are_refused_and_the_runner_serves_on(bench: Bench) -> None:
    canary = bench.house.root / "canary"
    for what, (commit, reason) in hostile_commits(bench).items():
        manifest = bench.manifest()
        bench.push_commit(manifest, commit)
        assert bench.serve_once() == 1, what
        refusal = (
            bench.house.git(
                "log", "-1", "--format=%s", refs.result_ref(manifest.nonce), cwd=bench.house.remote
            )
            if refs.result_ref(manifest.nonce) in bench.house.remote_refs()
            else bench.house.git("log", "-1", "--format=%s", manifest.result_ref, cwd=bench.house.remote)
        )
        assert refusal.startswith("kakeya-mac result: refused"), what
        assert f"refused/{reason}" in bench.said[-1], (what, bench.said[-1])
    asked = bench.ask()
    bench.serve_once()
    assert bench.verdict(asked.nonce) == ("passed", "ok")
    assert not canary.exists()


def test_an_answered_request_that_is_put_back_is_refused_as_a_replay(bench: Bench) -> None:
    asked = bench.ask()
    commit = bench.house.git("rev-parse", asked.result_ref, cwd=bench.house.remote)
    bench.serve_once()
    bench.house.git("update-ref", "-d", asked.result_ref, cwd=bench.house.remote)
    bench.push_commit(asked, commit)
    assert bench.serve_once() == 1
    assert "refused/replayed" in bench.said[-1]
    assert bench.verdict(asked.nonce) == ("refused", "replayed")


def test_a_broken_signature_is_refused_even_where_none_is_needed(bench: Bench) -> None:
    manifest = bench.manifest()
    commit = build(Git(bench.house.clone), manifest, b"-----BEGIN SSH SIGNATURE-----\nrubbish\n")
    bench.push_commit(manifest, commit)
    bench.serve_once()
    assert bench.verdict(manifest.nonce) == ("refused", "bad_signature")


@pytest.mark.slow
def test_repository_code_runs_where_the_owner_allows_it_and_only_that_code(bench: Bench) -> None:
    bench.policy("allow_repo_code = true")
    files = {
        "tests/test_it.py": "from product import answer\n\n\ndef test_it():\n    assert answer == 42\n",
        "product.py": "answer = 42\n",
        "sitecustomize.py": f"open({str(bench.house.root / 'canary')!r}, 'w')\n",
    }
    for name, text in files.items():
        path = bench.house.clone / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    bench.house.git("add", "--all")
    bench.house.git("-c", "user.name=T", "-c", "user.email=t@example.org", "commit", "-qm", "tests")
    passed = bench.ask("tests", params={"path": "tests/test_it.py"})
    bench.serve_once()
    assert bench.verdict(passed.nonce) == ("passed", "ok")
    assert "1 passed" in bench.log(passed.nonce)
    missing = bench.ask("tests", params={"path": "tests/test_other.py"})
    bench.serve_once()
    assert bench.verdict(missing.nonce) == ("refused", "bad_parameter")
    assert not (bench.house.root / "canary").exists()


def test_presets_of_the_request_commit_change_nothing(bench: Bench) -> None:
    preset = bench.house.clone / "bridge" / "presets"
    preset.mkdir(parents=True)
    (preset / "echo.toml").write_text('name = "echo"\nargv = ["/bin/sh", "-c", "touch canary"]\n')
    bench.house.git("add", "--all")
    bench.house.git("-c", "user.name=T", "-c", "user.email=t@example.org", "commit", "-qm", "presets")
    asked = bench.ask()
    bench.serve_once()
    assert bench.log(asked.nonce) == "hello from test\n"

"""A request's way over a real remote: taken once, run closed, published whole, refused with a reason."""

import json
import os
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bridge import signing
from bridge.bus import refs
from bridge.bus.git import Git
from bridge.bus.objects import Entry
from bridge.bus.requests import build
from bridge.bus.results import Standing
from bridge.errors import MachineError
from bridge.manifest import REQUEST_PATH
from bridge.result import Phase, Reason, Status
from bridge.runner.child import Standby, Supervised
from tests.bridge.evidence import reports
from tests.bridge.runner.bench import Bench
from tests.houses import House, wait_for


@pytest.fixture
def bench(house: House) -> Bench:
    made = Bench(house)
    made.install()
    return made


def verdict(bench: Bench, nonce: str) -> tuple[str, str]:
    found = bench.answer(nonce).result.verdict
    return found.status.value, found.reason.value


def test_a_request_comes_home_signed_with_its_log_and_facts(bench: Bench, tmp_path: Path) -> None:
    asked = bench.ask(params={"word": "across the wire"})
    assert bench.serve_once() == 1
    station = bench.station()
    trusted = tmp_path / "trusted"
    assert station.key is not None
    trusted.write_text(signing.allowed_line(signing.public_key(station.key), "mac", signing.RESULT_NAMESPACE))
    answer = bench.answer(asked.nonce, trusted)
    result = answer.result
    assert result.verdict.status is Status.PASSED
    assert answer.signature is Standing.TRUSTED
    assert answer.files["log.txt"] == b"hello from across the wire\n"
    assert result.params == {"word": "across the wire"}
    assert result.workload_sha == asked.workload_sha
    assert result.preset_digest == station.presets["echo"].digest
    assert result.attempt == 1
    assert set(result.phase_seconds) == {"workspace", "running", "gating"}
    assert result.commands[0].exit_code == 0
    assert result.commands[0].argv[-1] == "across the wire"
    assert result.runner.machine["memory_bytes"]
    assert "isolation_network" in result.runner.machine
    assert {"python", "git"} <= set(result.tools)


def test_afterwards_only_the_result_is_left(bench: Bench) -> None:
    asked = bench.ask()
    bench.serve_once()
    assert bench.house.remote_refs() == {"refs/heads/main", asked.result_ref}
    folder = bench.station().folder
    assert not list((folder / "jobs").glob("*"))
    assert not list(folder.glob("spool-*/*"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("preset", "status", "reason"),
    [
        ("fail", "failed", "exit_code"),
        ("stubborn", "failed", "timeout"),
        ("flood", "failed", "output_limit"),
    ],
)
def test_a_job_that_ends_badly_is_published_with_its_log(
    bench: Bench, preset: str, status: str, reason: str
) -> None:
    asked = bench.ask(preset)
    bench.serve_once()
    assert verdict(bench, asked.nonce) == (status, reason)
    assert bench.log(asked.nonce)


def test_the_job_sees_no_environment_home_or_key_of_the_runner(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "correct horse battery")
    asked = bench.ask("environment")
    bench.serve_once()
    seen = json.loads(bench.log(asked.nonce))
    assert "MY_SECRET_TOKEN" not in seen
    assert seen["HOME"] != os.environ.get("HOME")
    assert asked.nonce in seen["HOME"]
    assert asked.nonce in seen["TMPDIR"]
    assert set(seen) <= {
        *(
            "PATH",
            "HOME",
            "TMPDIR",
            "LANG",
            "LC_ALL",
            "PYTHONDONTWRITEBYTECODE",
            "HF_HUB_OFFLINE",
            "NO_COLOR",
        ),
        *("KAKEYA_BLAS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TZ"),
    }


def test_a_secret_of_the_runner_is_cut_from_the_log(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "correct horse battery")
    asked = bench.ask("leak", params={"word": "correct horse battery"})
    bench.serve_once()
    assert bench.log(asked.nonce) == "the token is [redacted:MY_SECRET_TOKEN]\n"


@pytest.mark.sampled(3, 1)
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
        assert verdict(bench, asked.nonce) == answer


def test_a_request_for_a_workflow_is_left_alone(bench: Bench) -> None:
    bench.ask(transport="actions")
    before = bench.house.remote_refs()
    assert bench.runner().serve(once=True, idle_timeout_s=1) == 0
    assert bench.house.remote_refs() == before | {"refs/mac-bridge/runners/mac"}


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
    assert verdict(bench, asked.nonce) == ("passed", "ok")
    assert not canary.exists()


def test_an_answered_request_that_is_put_back_is_refused_as_a_replay(bench: Bench) -> None:
    asked = bench.ask()
    commit = bench.house.git("rev-parse", asked.result_ref, cwd=bench.house.remote)
    bench.serve_once()
    bench.house.git("update-ref", "-d", asked.result_ref, cwd=bench.house.remote)
    bench.push_commit(asked, commit)
    assert bench.serve_once() == 1
    assert "refused/replayed" in bench.said[-1]
    assert verdict(bench, asked.nonce) == ("refused", "replayed")


def key(folder: Path, name: str) -> Path:
    return signing.ensure_key(folder / name, name)


def test_only_listed_signers_are_served_where_the_policy_says_so(bench: Bench, tmp_path: Path) -> None:
    bench.policy("require_signature = true")
    alice, mallory = key(tmp_path, "alice"), key(tmp_path, "mallory")
    line = signing.allowed_line(signing.public_key(alice), "alice", signing.REQUEST_NAMESPACE)
    (bench.config / "allowed_signers").write_text(line)

    def ask(signer: Path | None, namespace: str = signing.REQUEST_NAMESPACE, other: bytes = b"") -> str:
        manifest = bench.manifest()
        data = manifest.to_bytes() + other
        signature = signing.sign(signer, namespace, data) if signer else None
        commit = build(Git(bench.house.clone), manifest, signature)
        bench.push_commit(manifest, commit)
        bench.serve_once()
        return manifest.nonce

    assert verdict(bench, ask(alice)) == ("passed", "ok")
    assert any("for alice" in line for line in bench.said)
    refused = [
        ask(None),
        ask(mallory),
        ask(alice, signing.RESULT_NAMESPACE),
        ask(alice, other=b" "),
    ]
    assert {verdict(bench, nonce) for nonce in refused} == {("refused", "bad_signature")}


def test_a_broken_signature_is_refused_even_where_none_is_needed(bench: Bench) -> None:
    manifest = bench.manifest()
    commit = build(Git(bench.house.clone), manifest, b"-----BEGIN SSH SIGNATURE-----\nrubbish\n")
    bench.push_commit(manifest, commit)
    bench.serve_once()
    assert verdict(bench, manifest.nonce) == ("refused", "bad_signature")


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
    assert verdict(bench, passed.nonce) == ("passed", "ok")
    assert "1 passed" in bench.log(passed.nonce)
    missing = bench.ask("tests", params={"path": "tests/test_other.py"})
    bench.serve_once()
    assert verdict(bench, missing.nonce) == ("refused", "bad_parameter")
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


def evidence_preset(bench: Bench, program: str) -> None:
    script = bench.house.root / "reporter.py"
    script.write_text("import os, sys\nout = sys.argv[1].partition('=')[2]\n" + program)
    argv = ["${python}", "-I", str(script), "--report=${out:report}"]
    bench.preset("reporter", argv, tail='[evidence]\nkind = "probe"\n')


@pytest.mark.sampled(5, 2)
@pytest.mark.parametrize(
    ("program", "status", "reason"),
    [
        ("", "failed", "no_evidence"),
        ("open(out, 'w').write('{}')", "rejected", "evidence"),
        ("os.symlink('/etc/passwd', out)", "failed", "no_evidence"),
        ("os.mkdir(out)", "failed", "no_evidence"),
        ("f = os.path.dirname(out); os.rmdir(f); os.symlink('/etc', f)", "failed", "no_evidence"),
        ("f = os.path.dirname(out); os.rmdir(f); open(f, 'w')", "failed", "no_evidence"),
        ("os.mkfifo(out)", "failed", "no_evidence"),
        ("open('x', 'w').write('{}'); os.link('x', out)", "failed", "no_evidence"),
        ("open(out, 'w').write('{}'); sys.exit(1)", "failed", "exit_code"),
        ("open(out, 'wb').truncate(33 << 20)", "failed", "no_evidence"),
        ("open(out, 'w').write('correct horse battery')", "rejected", "evidence"),
    ],
)
def test_only_a_plain_report_that_the_gate_accepts_counts(
    bench: Bench, program: str, status: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "correct horse battery")
    evidence_preset(bench, program)
    asked = bench.ask("reporter")
    bench.serve_once()
    assert verdict(bench, asked.nonce) == (status, reason)
    codes = {violation.code for violation in bench.answer(asked.nonce).result.verdict.violations}
    assert codes == ({"SECRET_IN_EVIDENCE"} if "battery" in program else codes - {"SECRET_IN_EVIDENCE"})
    published = bench.answer(asked.nonce).files.get("report.json", b"")
    assert b"root:" not in published
    assert b"battery" not in published


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(("edit", "expected"), [(1.0, ("passed", "ok")), (1.5, ("rejected", "evidence"))])
def test_the_gate_preset_ends_as_the_gate_decides(
    bench: Bench, edit: float, expected: tuple[str, str]
) -> None:
    report = reports.throughput()
    report["summary"]["comparisons"][0]["decode_ratio"] *= edit
    (bench.house.clone / "report.json").write_bytes(reports.dump(report))
    bench.house.git("add", "report.json")
    bench.house.git("-c", "user.name=T", "-c", "user.email=t@example.org", "commit", "-qm", "evidence")
    asked = bench.ask("gate", params={"file": "report.json"})
    assert bench.serve_once() == 1
    assert verdict(bench, asked.nonce) == expected
    assert ("SUMMARY_MISMATCH" in bench.log(asked.nonce)) == (edit != 1.0)


def test_progress_and_log_lines_are_seen_while_the_job_runs(bench: Bench) -> None:
    from bridge.bus.claims import read_status

    stop = threading.Event()
    runner = bench.runner()
    thread = threading.Thread(target=runner.serve, kwargs={"stop": stop}, daemon=True)
    asked = bench.ask("sleep")
    thread.start()
    git, local = Git(bench.house.remote), refs.claim_ref(asked.nonce)

    def progressing() -> bool:
        commit = git.refs(local).get(local)
        status = read_status(git, commit) if commit else None
        return status is not None and status.phase is Phase.RUNNING and status.progress is not None

    wait_for(progressing, what="a heartbeat with progress")
    status = read_status(git, git.refs(local)[local])
    assert status is not None
    assert status.progress is not None
    assert (status.progress.done, status.progress.total) == (1, 4)
    assert status.progress.step == "sleeping soundly"
    stop.set()
    runner.abort()
    thread.join(30)
    assert verdict(bench, asked.nonce) == ("cancelled", "shutdown")


def test_a_lost_claim_stops_the_job_and_gives_no_result(bench: Bench) -> None:
    stop = threading.Event()
    runner = bench.runner()
    thread = threading.Thread(target=runner.serve, kwargs={"stop": stop}, daemon=True)
    asked = bench.ask("sleep")
    thread.start()
    claim = refs.claim_ref(asked.nonce)
    wait_for(lambda: any("claimed" in line for line in bench.said), what="the claim")
    stop.set()
    head = bench.house.git("rev-parse", "HEAD")
    bench.house.git("push", "-q", "--force", str(bench.house.remote), f"{head}:{claim}")
    thread.join(30)
    assert not thread.is_alive()
    assert "the claim was lost" in bench.said[-1]
    assert bench.house.git("rev-parse", claim, cwd=bench.house.remote) == head
    with Supervised(Standby(bench.station().lock)):
        pass


def test_two_runners_of_one_name_are_a_clear_error(bench: Bench) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=bench.runner().serve, kwargs={"stop": stop}, daemon=True)
    thread.start()
    other = bench.runner()

    def refused() -> bool:
        try:
            other.serve(once=True, idle_timeout_s=0)
        except MachineError as error:
            return "already runs on this machine" in error.message and str(os.getpid()) in error.message
        return False

    wait_for(refused, what="the refusal of the second runner")
    stop.set()
    thread.join(20)


@pytest.mark.slow
def test_many_runners_answer_each_request_once(bench: Bench) -> None:
    nonces = [bench.ask(params={"word": f"number {index}"}).nonce for index in range(6)]
    stop = threading.Event()
    # Each its own state folder: each its own machine.
    runners = [bench.runner(f"mac{index}", state_dir=bench.state / str(index)) for index in range(3)]
    threads = [
        threading.Thread(target=runner.serve, kwargs={"stop": stop}, daemon=True) for runner in runners
    ]
    for thread in threads:
        thread.start()

    def done() -> bool:
        return sum("published as" in line for line in bench.said) == len(nonces)

    wait_for(done, 60, "all results")
    stop.set()
    for thread in threads:
        thread.join(20)
    assert [bench.log(nonce) for nonce in nonces] == [f"hello from number {index}\n" for index in range(6)]
    assert sum("claimed" in line for line in bench.said) == len(nonces)


@pytest.mark.slow
def test_an_unreachable_remote_is_waited_for_and_a_result_is_kept_for_it(bench: Bench) -> None:
    away = bench.house.root / "away.git"
    script = bench.house.root / "unplug.py"
    script.write_text(f"import os; os.rename({str(bench.house.remote)!r}, {str(away)!r}); print('unplugged')")
    bench.preset("unplug", ["${python}", "-I", str(script)])
    asked = bench.ask("unplug")
    runner = bench.runner()
    stop = threading.Event()
    thread = threading.Thread(target=runner.serve, kwargs={"stop": stop}, daemon=True)
    thread.start()
    wait_for(lambda: any("kept for later" in line for line in bench.said), 60, "the result to be kept")
    away.rename(bench.house.remote)
    wait_for(lambda: any("published as" in line for line in bench.said), 60, "the result to be pushed")
    stop.set()
    thread.join(20)
    assert verdict(bench, asked.nonce) == ("passed", "ok")
    assert refs.claim_ref(asked.nonce) not in bench.house.remote_refs()


def test_a_killed_runner_leaves_nothing_running_and_the_next_one_finishes(bench: Bench) -> None:
    asked = bench.ask("sleep")
    daemon = bench.daemon()
    claim = refs.claim_ref(asked.nonce)
    wait_for(lambda: "claimed" in bench.daemon_log(), what="the claim")
    wait_for(lambda: bool(jobs_of(bench, "sleep.py")), what="the job's process")
    daemon.kill()
    daemon.wait(20)
    wait_for(lambda: not jobs_of(bench, "sleep.py"), 10, "the end of the job's process")
    assert claim in bench.house.remote_refs()
    (bench.house.root / "sleep.py").write_text("print('second try')")
    started = time.monotonic()
    assert bench.serve_once() == 1
    assert time.monotonic() - started < 30, "its own old claim is taken over without waiting for the lease"
    answer = bench.answer(asked.nonce)
    assert answer.result.verdict.status is Status.PASSED
    assert answer.result.attempt == 2
    assert answer.files["log.txt"] == b"second try\n"


@pytest.mark.slow
def test_a_request_whose_runners_always_die_ends_as_lost(bench: Bench) -> None:
    asked = bench.ask("sleep")
    for _ in range(3):
        daemon = bench.daemon()
        wait_for(lambda: bool(jobs_of(bench, "sleep.py")), what="the job's process")
        daemon.kill()
        daemon.wait(20)
        wait_for(lambda: not jobs_of(bench, "sleep.py"), 10, "the end of the job's process")
    assert bench.serve_once() == 1
    assert verdict(bench, asked.nonce) == ("lost", "attempts")


def test_a_silent_claim_of_another_machine_is_taken_over(bench: Bench) -> None:
    asked = bench.ask("sleep")
    daemon = bench.daemon("other")
    wait_for(lambda: "claimed" in bench.daemon_log("other"), what="the claim")
    daemon.kill()
    daemon.wait(20)
    (bench.house.root / "sleep.py").write_text("print('taken over')")
    clock = [0.0]
    from bridge.runner.serve import Runner

    runner = Runner(
        bench.station("mine", state_dir=bench.state / "mine"), say=bench.said.append, clock=lambda: clock[0]
    )
    assert runner.serve(once=True, idle_timeout_s=-1) == 0
    clock[0] = 119.0
    assert runner.serve(once=True, idle_timeout_s=-1) == 0
    clock[0] = 121.0
    assert runner.serve(once=True, idle_timeout_s=-1) == 1
    assert bench.answer(asked.nonce).result.attempt == 2
    assert bench.log(asked.nonce) == "taken over\n"


def test_a_failure_of_our_own_becomes_a_result_with_the_traceback_in_the_log_only(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr("bridge.runner.job.Job._argv", broken)
    asked = bench.ask()
    bench.serve_once()
    answer = bench.answer(asked.nonce)
    assert answer.result.verdict.reason is Reason.RUNNER_ERROR
    assert "ZeroDivisionError" not in answer.result.verdict.message
    assert b"ZeroDivisionError: a bug of ours" in answer.files["log.txt"]


def test_without_ssh_keygen_results_go_out_unsigned(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.signing.available", lambda: False)
    asked = bench.ask()
    bench.serve_once()
    assert bench.answer(asked.nonce).signature is Standing.UNSIGNED


def test_the_shorter_of_the_time_limits_holds(bench: Bench) -> None:
    asked = bench.ask("sleep", timeout_s=1)
    bench.serve_once()
    assert verdict(bench, asked.nonce) == ("failed", "timeout")


def test_expiry_is_judged_by_the_runners_clock(bench: Bench) -> None:
    from bridge.runner.serve import Runner

    asked = bench.ask()
    later = datetime.now(UTC) + timedelta(hours=2)
    Runner(bench.station(), now=lambda: later).serve(once=True, idle_timeout_s=20)
    assert verdict(bench, asked.nonce) == ("refused", "expired")


def jobs_of(bench: Bench, script: str) -> list[int]:
    """Processes that run one of this bench's programs."""
    from bridge.process import run_program

    path = str(bench.house.root / script)
    done = run_program(["ps", "-axo", "pid=,stat=,command="], timeout_s=10, limit_bytes=1 << 22)
    rows = [line.split(None, 2) for line in done.stdout.decode("utf-8", "replace").splitlines()]
    return [int(pid) for pid, state, command in rows if path in command and "Z" not in state]

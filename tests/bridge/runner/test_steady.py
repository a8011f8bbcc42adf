"""Around each job: the interpreter is as it was recorded, the machine stays awake, the weights are whole."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from pathlib import Path

import pytest

from bridge import interpreter
from bridge.protocol.result import Reason, Status
from bridge.runner import machine, models
from evidence_format import weights
from tests.fixtures.repo import RepoFixture, wait_for
from tests.fixtures.runner import RunnerFixture


@pytest.fixture
def runner(repo: RepoFixture) -> RunnerFixture:
    made = RunnerFixture(repo)
    made.install({"echo": "print('hello from', arg)", "nap": "import time; time.sleep(0.5)"})
    return made


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this environment's record lies for once."""
    monkeypatch.setattr(interpreter, "record_path", lambda: tmp_path / "interpreter.json")
    return tmp_path / "interpreter.json"


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("how", ["another interpreter", "another package", "no record"])
def test_job_is_refused_under_another_interpreter(runner: RunnerFixture, record: Path, how: str) -> None:
    seen = interpreter.observe()
    old = {
        "another interpreter": dataclasses.replace(seen, realpath="/opt/python3.9", version="3.9.1"),
        "another package": dataclasses.replace(seen, packages={**seen.packages, "mlx": "0.1.0"}),
    }
    if how in old:
        interpreter.write(record, old[how])
    else:
        record.write_text("{")
    asked = runner.ask()
    runner.serve_once()
    verdict = runner.answer(asked.nonce).result.verdict
    assert (verdict.status, verdict.reason) == (Status.REFUSED, Reason.MACHINE_UNFIT)


def fake_caffeinate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name that says how it was called and stays, as the system's does."""
    log = folder / "calls"
    folder.mkdir()
    program = folder / "caffeinate"
    program.write_text(f'#!/bin/sh\necho "$$ $@" >> {log}\nexec sleep 300\n')
    program.chmod(0o755)
    monkeypatch.setattr(machine, "CAFFEINATE", str(program))
    monkeypatch.setattr(machine, "can_sleep", lambda: True)
    return log


def lives(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().split(") ")[1][0] != "Z"


@pytest.mark.slow
def test_machine_is_kept_awake_exactly_while_a_job_runs(
    runner: RunnerFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = fake_caffeinate(tmp_path / "tools", monkeypatch)
    asked = runner.ask("nap")
    runner.serve_once()
    [call] = log.read_text().splitlines()
    pid, *switches = call.split()
    assert switches[:3] == ["-i", "-m", "-s"]
    assert not lives(int(pid))
    assert runner.answer(asked.nonce).result.runner.machine["kept_awake"] is True


def test_machine_may_sleep_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = fake_caffeinate(tmp_path / "tools", monkeypatch)

    def fail() -> None:
        with machine.keep_awake() as kept:
            assert kept
            wait_for(log.exists)
            time.sleep(0.1)
            assert lives(int(log.read_text().split()[0]))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not lives(int(log.read_text().split()[0]))


@pytest.mark.slow
def test_job_runs_where_nothing_keeps_the_machine_awake(
    runner: RunnerFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "CAFFEINATE", str(tmp_path / "no-such-program"))
    monkeypatch.setattr(machine, "can_sleep", lambda: True)
    asked = runner.ask()
    runner.serve_once()
    assert runner.verdict(asked.nonce) == ("passed", "ok")
    assert runner.answer(asked.nonce).result.runner.machine["kept_awake"] is False


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shipped = models.shipped("demo-target")
    assert shipped is not None
    folder = tmp_path / "model"
    shutil.copytree(shipped, folder)
    return folder


def test_shipped_models_are_whole(model: Path) -> None:
    assert weights.faults(model) == []
    for name in models.SHIPPED:
        folder = models.shipped(name)
        assert folder is not None
        assert weights.faults(folder) == []


def cut(file: Path, size: int) -> None:
    with file.open("r+b") as handle:
        handle.truncate(size)


def add_index(model: Path) -> None:
    rows = {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model / weights.INDEX).write_text(json.dumps({"weight_map": rows}))


DAMAGE = {
    "cut off": lambda m: cut(m / "model.safetensors", 200_000),
    "cut in its header": lambda m: cut(m / "model.safetensors", 100),
    "too long": lambda m: (m / "model.safetensors").open("ab").write(b"x"),
    "empty": lambda m: cut(m / "model.safetensors", 0),
    "no weights": lambda m: (m / "model.safetensors").unlink(),
    "no config": lambda m: (m / "config.json").unlink(),
    "a shard is missing": add_index,
    "a bad index": lambda m: (m / weights.INDEX).write_text("[]"),
    "a pointer": lambda m: (m / "model.safetensors").write_bytes(weights.POINTER + b"v1\noid sha256:0\n"),
    "a huge header": lambda m: (m / "model.safetensors").write_bytes(b"\xff" * 64),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_model_says_what_it_lacks(model: Path, name: str) -> None:
    DAMAGE[name](model)
    assert weights.faults(model)


@pytest.mark.slow
def test_damaged_model_refuses_the_job(runner: RunnerFixture, model: Path) -> None:
    cut(model / "model.safetensors", 200_000)
    both = ("gemma-4-26b-a4b", "gemma-4-26b-a4b-dflash")
    runner.policy("[models]\n" + "".join(f'{name} = "{model}"\n' for name in both))
    asked = runner.ask("throughput")
    runner.serve_once()
    verdict = runner.answer(asked.nonce).result.verdict
    assert (verdict.status, verdict.reason) == (Status.REFUSED, Reason.MODEL_MISSING)
    assert "200000 bytes" in verdict.message

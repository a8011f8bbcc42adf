"""Compiled kernels are made once on a machine, by nobody but the runner, and each job gets its own copies."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bridge.bus.claims import read_status
from bridge.bus.git import Git
from bridge.presets import load_all
from bridge.protocol import refs
from bridge.protocol.result import Phase, Status
from bridge.runner import facts
from bridge.runner import kernels as kernels_module
from bridge.runner.isolation import room as rooms
from bridge.runner.isolation.room import Room
from bridge.runner.kernels import COMPILER, MAKER, Kernels, KernelsMissing
from bridge.runner.prepare import COMPILING, decodes
from bridge.runner.serve import Runner
from tests.bridge.runner.bench import Bench
from tests.houses import House, wait_for

COMPILES = shutil.which(COMPILER, path=os.pathsep.join(rooms.SYSTEM_PATH)) is not None
needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or not COMPILES, reason="mlx compiles with g++ on Linux alone"
)

# A maker that leaves two kernels, and much that is none.
MAKE = """
    import os, sys
    from pathlib import Path
    folder = Path(os.environ["TMPDIR"]) / "mlx" / "9.9" / "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    with open(sys.argv[1], "a") as made:
        made.write("made\\n")
    (folder / "libone.so").write_bytes(b"one")
    (folder / "libtwo.so").write_bytes(b"two")
    (folder / "one.cpp").write_text("source")
    (folder / "liblink.so").symlink_to("/etc/hostname")
    (folder / "libfolder.so").mkdir()
"""
# What a job finds in its TMPDIR, and what it does to it.
LOOK = """
    import json, os
    from pathlib import Path
    tmp = Path(os.environ["TMPDIR"])
    found = sorted(path for path in tmp.rglob("*") if not path.is_dir())
    links = [str(path) for path in found if path.is_symlink() or path.stat().st_nlink > 1]
    print(json.dumps([{str(path.relative_to(tmp)): path.read_text() for path in found}, links]))
"""
SPOIL = """
    import os
    from pathlib import Path
    for path in (Path(os.environ["TMPDIR"]) / "mlx" / "9.9" / "cpu").iterdir():
        path.write_bytes(b"spoilt")
        path.with_name("libmine.so").write_bytes(b"planted")
"""
COPIES = {"mlx/9.9/cpu/libone.so": "one", "mlx/9.9/cpu/libtwo.so": "two"}


@pytest.fixture(autouse=True)
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake makers compile nothing: what they ask of a compiler is to be there."""
    if "slow" not in request.keywords:
        monkeypatch.setattr(kernels_module, "COMPILER", "sh")


@pytest.fixture
def bench(house: House, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench whose presets count as those in which the engine runs a model."""
    monkeypatch.setattr("bridge.runner.prepare.decodes", lambda preset: True)
    made = Bench(house)
    made.install({"look": LOOK, "spoil": SPOIL})
    return made


def fake(folder: Path, script: str = MAKE) -> tuple[str, ...]:
    """A maker that runs a script; it counts its runs in ``made``."""
    path = folder / "maker.py"
    path.write_text(textwrap.dedent(script))
    return (sys.executable, "-I", str(path), str(folder / "made"))


def kernels(folder: Path, maker: tuple[str, ...], **tools: str) -> Kernels:
    return Kernels(folder / "kernels", tools={"mlx": "9.9", **tools}, ours={}, maker=maker)


def runner(bench: Bench, script: str = MAKE) -> Runner:
    station = bench.station()
    made = Kernels(
        station.folder / "kernels", tools={"mlx": "9.9"}, ours={}, maker=fake(bench.house.root, script)
    )
    return Runner(replace(station, kernels=made), say=bench.said.append, idle_s=0.2)


def runs(folder: Path) -> int:
    return len((folder / "made").read_text().splitlines())


@pytest.mark.slow
def test_jobs_get_copies_of_the_kernels_alone_and_nothing_flows_back(bench: Bench) -> None:
    served = runner(bench)
    spoiling, looking = bench.ask("spoil"), bench.ask("look")
    for _ in (spoiling, looking):
        assert served.serve(once=True, idle_timeout_s=20) == 1
    assert bench.answer(spoiling.nonce).result.verdict.status is Status.PASSED
    assert json.loads(bench.log(looking.nonce)) == [COPIES, []]
    assert runs(bench.house.root) == 1


@pytest.mark.exhaustive
def test_a_runner_that_starts_again_makes_none(bench: Bench) -> None:
    for _ in range(2):
        asked = bench.ask("look")
        assert runner(bench).serve(once=True, idle_timeout_s=20) == 1
        assert json.loads(bench.log(asked.nonce)) == [COPIES, []]
    assert runs(bench.house.root) == 1


@pytest.mark.exhaustive
def test_a_maker_that_fails_is_logged_once_and_fails_no_job(bench: Bench) -> None:
    served = runner(bench, MAKE + "    sys.exit('no luck today')\n")
    first, second = bench.ask("look"), bench.ask("look")
    for _ in (first, second):
        assert served.serve(once=True, idle_timeout_s=20) == 1
    logs = sorted(bench.log(asked.nonce) for asked in (first, second))  # served in either order
    assert logs == ["[{}, []]\n", "runner: compiling kernels ended with code 1: no luck today\n[{}, []]\n"]
    assert bench.answer(first.nonce).result.verdict.status is Status.PASSED
    assert runs(bench.house.root) == 1


def test_only_jobs_in_which_the_engine_runs_a_model_wait_for_kernels() -> None:
    waiting = {preset.name for preset in load_all().values() if decodes(preset)}
    assert set(load_all()) - waiting == {
        *("drafter-parity", "drafter-parity-fp32", "engine-tests", "gate", "integration-tests"),
        *("probe", "tests"),
    }


@pytest.mark.exhaustive
def test_a_job_that_runs_no_model_gets_none(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.runner.prepare.decodes", decodes)
    asked = bench.ask("look")
    runner(bench).serve(once=True, idle_timeout_s=20)
    assert json.loads(bench.log(asked.nonce)) == [{}, []]
    assert not (bench.house.root / "made").exists()


@pytest.mark.exhaustive
def test_the_status_says_that_kernels_are_compiled(bench: Bench) -> None:
    asked = bench.ask("look")
    served = runner(bench, "import time; time.sleep(2)")
    thread = threading.Thread(target=served.serve, kwargs={"once": True, "idle_timeout_s": 20}, daemon=True)
    thread.start()
    git, local = Git(bench.house.remote), refs.claim_ref(asked.nonce)

    def compiling() -> bool:
        commit = git.refs(local).get(local)
        status = read_status(git, commit) if commit else None
        shown = status.progress if status is not None and status.phase is Phase.WORKSPACE else None
        return shown is not None and (shown.done, shown.total, shown.step) == (0, 1, COMPILING)

    wait_for(compiling, what="a heartbeat of the making")
    thread.join(30)
    assert bench.answer(asked.nonce).result.verdict.status is Status.PASSED


def test_what_is_kept_is_for_the_owner_alone_and_the_rest_is_removed(tmp_path: Path) -> None:
    made = kernels(tmp_path, fake(tmp_path))
    assert made.wanted
    made.make(lambda: False)
    assert not made.wanted
    [kept] = (tmp_path / "kernels").iterdir()
    assert {str(path.relative_to(kept)) for path in kept.rglob("*.*") if path.is_file()} == set(COPIES)
    for folder in (kept.parent, kept):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_link_in_their_place_is_not_copied(tmp_path: Path) -> None:
    made = kernels(tmp_path, fake(tmp_path))
    made.make(lambda: False)
    [kept] = (tmp_path / "kernels").iterdir()
    (kept / "mlx/9.9/cpu/liblink.so").symlink_to("/etc/hostname")
    target = tmp_path / "tmp"
    target.mkdir()
    assert made.copy_to(target) == len(COPIES)
    assert {path.name for path in (target / "mlx/9.9/cpu").iterdir()} == {"libone.so", "libtwo.so"}


def test_another_version_replaces_them(tmp_path: Path) -> None:
    kernels(tmp_path, fake(tmp_path)).make(lambda: False)
    newer = kernels(tmp_path, fake(tmp_path), mlx="10.0")
    assert newer.wanted
    newer.make(lambda: False)
    assert [path.name.partition("-")[0] for path in (tmp_path / "kernels").iterdir()] == ["10.0"]


def test_a_runner_that_is_told_to_stop_leaves_them_for_later(tmp_path: Path) -> None:
    made = kernels(tmp_path, fake(tmp_path, "import time; time.sleep(60)"))
    began = time.monotonic()
    made.make(lambda: time.monotonic() - began > 0.3)
    assert time.monotonic() - began < 30
    assert made.wanted
    assert made.copy_to(tmp_path / "tmp") == 0


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("raise SystemExit(7)", "ended with code 7"),
        ("import os; os.kill(os.getpid(), 9)", "ended with code -9"),
    ],
)
def test_a_failure_names_how_the_maker_ended_and_is_not_repeated(
    tmp_path: Path, script: str, words: str
) -> None:
    made = kernels(tmp_path, fake(tmp_path, script))
    with pytest.raises(KernelsMissing, match=words):
        made.make(lambda: False)
    assert not made.wanted
    assert list((tmp_path / "kernels").iterdir()) == []


def test_a_maker_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_module, "_MAKING_S", 0.3)
    made = kernels(tmp_path, fake(tmp_path, "import time; time.sleep(60)"))
    with pytest.raises(KernelsMissing, match=r"took more than 0\.3 s"):
        made.make(lambda: False)


def test_without_a_compiler_or_without_mlx_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not Kernels(tmp_path / "kernels", tools={}, ours={}).wanted
    monkeypatch.setattr(kernels_module, "COMPILER", "no-such-compiler")
    assert not kernels(tmp_path, fake(tmp_path)).wanted


def test_a_folder_that_cannot_be_made_is_a_failure_of_this_kind(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    made = Kernels(tmp_path / "file" / "kernels", tools={"mlx": "9.9"}, ours={}, maker=fake(tmp_path))
    with pytest.raises(KernelsMissing, match="no room for compiled kernels"):
        made.make(lambda: False)


@needs_compiler
@pytest.mark.exhaustive
def test_the_kernels_of_the_engine_are_all_that_a_measurement_uses(tmp_path: Path) -> None:
    made = Kernels(tmp_path / "kernels", tools=facts.tools(), ours={}, maker=MAKER)
    made.make(lambda: False)
    room = Room(tmp_path / "room")
    room.make()
    count = made.copy_to(room.temporary)
    assert count > 20
    argv = [*(sys.executable, "-I", "-m", "engine", "eval", "throughput"), "--limit=2", "--max-tokens=48"]
    done = kernels_module.run_program(
        [*argv, f"--report={room.out / 'report.json'}"],
        timeout_s=300,
        env=rooms.environment(room, {}),
        cwd=room.workspace,
    )
    assert done.ok, done.stderr.decode()
    assert len(list(room.temporary.rglob("*.so"))) == count


@needs_compiler
@pytest.mark.exhaustive
def test_mlx_takes_the_header_that_was_precompiled_for_it(tmp_path: Path) -> None:
    shim = tmp_path / "bin" / COMPILER
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} -H "$@" 2>>{tmp_path}/headers\n')
    shim.chmod(0o700)
    script = f"""
    import os
    os.environ["PATH"] = "{shim.parent}:" + os.environ["PATH"]
    import mlx.core as mx
    mx.eval(mx.compile(lambda x: mx.exp(x) * 2 + 1)(mx.ones((4,))))
    """
    made = Kernels(tmp_path / "kernels", tools=facts.tools(), ours={}, maker=fake(tmp_path, script))
    made.make(lambda: False)
    taken = [line for line in (tmp_path / "headers").read_text().splitlines() if line.startswith("! ")]
    assert [Path(line.split()[1]).name for line in taken] == ["compiled_preamble.h.gch"]

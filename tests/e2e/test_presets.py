"""Every job of the earlier system by its old name: real runner, real remote, the shipped pair; and sabotage.

One runner serves all jobs. What is deleted on purpose is really gone: a component from the argv of an owner's
preset, or a single line from a copy of the installed code.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sysconfig
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bridge import presets
from bridge.cli.demo import write_policy
from tests.bridge.evidence import reports
from tests.fixtures.repo import RepoFixture, build_repo
from tests.fixtures.runner import RunnerFixture

pytestmark = [pytest.mark.e2e, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[2]
RECALL = ("limit=6", "max_tokens=10")
SHOOTOUT = ("context=200", "per_depth=1", "answer_tokens=8", "speed_prompts=none", "max_tokens=16")
RESTORED = (*RECALL, "kv=restored:learned:4,16")
# Parameters that make each job small, by the job's old name.
JOBS: dict[str, tuple[str, ...]] = {
    "mlx-env-probe": (),
    "mlx-backend-tests": ("path=tests/engine/test_backend.py",),
    "integration-tests": (),
    "pytest-path": ("path=tests/test_small.py",),
    "k3-native-baseline": ("limit=2", "max_tokens=24"),
    "k3-step1-incremental": RESTORED,
    "k3-step2-fused": RESTORED,
    "k3-step2-fused-allmlx": RESTORED,
    "k3-fused-allmlx-natural": ("limit=2", "max_tokens=48"),
    "k3-fused-allmlx-code": ("limit=2", "max_tokens=32", "block=4"),
    "k3-fused-allmlx-code-trim": ("limit=2", "max_tokens=32", "block=4", "kv=sliding-bounded:4,16"),
    "k3-fused-singlefused-probe": (),
    "k3-drafter-parity": (),
    "k3-drafter-parity-fp32": ("golden=tests/data/dflash/full",),
    "k3-kv-quant-eval": (*SHOOTOUT, "policies=affine:4,64"),
    "k3-evidence-gate": ("file=reports/report.json",),
    "k3-beta-scorecard": SHOOTOUT,
}
# Presets that no job of the earlier system was like.
OURS = {
    "acceptance": ("limit=1", "max_tokens=16", "prompts=code", "policies=affine:4,64"),
    "perplexity": ("chunk=64", "limit=8"),
    "proposer": ("limit=2", "max_tokens=24", "kv=sink-window:4,512"),
    "quality": ("limit=2", "max_tokens=24"),
    "recall": (*RECALL, "kv=sliding-bounded:0,31"),  # a narrower window loses some needles of some nonces
    "server-smoke": ("limit=1", "max_tokens=24", "clients=3"),
}
WORKLOAD = {
    "tests/test_small.py": "def test_a_sum() -> None:\n    assert 1 + 1 == 2\n",
    "tests/engine/test_backend.py": (
        "import mlx.core as mx\n\n\ndef test_a_product() -> None:\n"
        "    assert (mx.ones((2, 3)) @ mx.ones((3, 2))).tolist() == [[3.0, 3.0], [3.0, 3.0]]\n"
    ),
    "tests/test_whole.py": (
        "import pytest\n\n\n@pytest.mark.integration\ndef test_whole() -> None:\n    assert True\n\n\n"
        "def test_of_another_kind() -> None:\n    raise AssertionError\n"
    ),
    "pytest.ini": "[pytest]\naddopts = --strict-markers\nmarkers =\n    integration: whole programs\n",
    "reports/report.json": reports.dump(reports.throughput()).decode(),
}
POLICY = '  "--kv={kv}",\n'
GEMMA = "gemma-4-26b-a4b"
DRAFTER = f'  "--drafter=${{model:{GEMMA}-dflash}}",\n'
PROJECTOR = f'  "--projector=${{model:{GEMMA}-projector}}",\n'


def furnish(root: Path) -> RepoFixture:
    """A repository whose workload holds what the jobs read, and whose owner allows everything."""
    repo = build_repo(root, WORKLOAD)
    shutil.copytree(ROOT / "tests/data/dflash/full", repo.clone / "tests/data/dflash/full")
    repo.git("add", "--all")
    who = ("-c", "user.name=Tester", "-c", "user.email=tester@example.org")
    repo.git(*who, "commit", "--quiet", "-m", "reference outputs")
    repo.git("push", "--quiet", "origin", "main")
    config = repo.root / "config"
    write_policy(config)
    policy = config / "policy.toml"
    policy.write_text("allow_repo_code = true\nallow_unsandboxed = true\n" + policy.read_text())
    return repo


@dataclass(frozen=True)
class Answer:
    """What a client is told of a finished request."""

    code: int
    status: str
    binding: dict[str, list[object]]
    codes: list[str]
    said: str


def ask(repo: RepoFixture, preset: str, *params: str) -> Answer:
    """Ask through the ordinary client and wait for the answer."""
    words = [word for param in params for word in ("-p", param)]
    done = repo.program(
        "kakeya_mac", "run", "--preset", preset, *words, "--wait", "280", "--json", timeout=300
    )
    document = done.json
    codes = [violation["code"] for violation in document.get("violations", [])]
    binding = document.get("binding", {})
    return Answer(
        done.code, document["status"], binding, codes, f"{document}\n{done.err}\n{repo.runner_log()}"
    )


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RepoFixture]:
    repo = furnish(tmp_path_factory.mktemp("serving") / "repo")
    with repo.runner():
        yield repo


def test_these_are_all_the_jobs() -> None:
    assert len(JOBS) == 17
    asked = {presets.get(name).name for name in JOBS}
    # `verify` needs a finished request: tests/bridge/runner/test_verify_preset.py runs it.
    assert asked == set(presets.load_all()) - set(OURS) - {"verify"}


# The other name of a preset that has run with the same parameters would run the same again.
@pytest.mark.parametrize(
    "name",
    [
        *(name for name in JOBS if name != "k3-step2-fused-allmlx"),
        *(name for name in OURS if name != "server-smoke"),
        # Where no namespace can be made, a job may not listen on any socket.
        pytest.param("server-smoke", marks=pytest.mark.unsandboxed),
    ],
)
def test_a_job_passes_by_the_name_of_the_earlier_system_or_ours(serving: RepoFixture, name: str) -> None:
    answer = ask(serving, name, *{**JOBS, **OURS}[name])
    assert (answer.code, answer.status) == (0, "passed"), answer.said
    assert answer.binding == {"differences": [], "not_compared": []}


@pytest.fixture(scope="module")
def weakened(serving: RepoFixture, tmp_path_factory: pytest.TempPathFactory) -> RunnerFixture:
    """An owner's presets that leave out a component and promise it all the same."""
    runner = RunnerFixture(furnish(tmp_path_factory.mktemp("weakened") / "repo"))
    keep_kernels(serving, runner.repo)
    native = '  "--kv=native",\n'
    write_changed(
        runner, "throughput", "undrafted", {DRAFTER: '  "--drafter=none",\n'}, f"models.{GEMMA}-dflash"
    )
    write_changed(
        runner,
        "restored",
        "unrestored",
        {POLICY: native, PROJECTOR: ""},
        f"models.{GEMMA}-projector",
        "params.kv",
    )
    write_changed(runner, "recall", "unbounded", {POLICY: native}, "params.kv")
    return runner


def write_changed(
    runner: RunnerFixture, preset: str, name: str, elements: dict[str, str], *tables: str
) -> None:
    """A bundled preset under another name, elements of its argv replaced, and what declared them gone."""
    text = (presets.preset.BUNDLED / f"{preset}.toml").read_text(encoding="utf-8")
    for element, instead in elements.items():
        assert text.count(element) == 1
        text = text.replace(element, instead)
    text = re.sub(r"^(name|aliases) = .*\n", "", text, flags=re.M)
    for table in tables:
        text = re.sub(rf"^\[{re.escape(table)}\]\n(.+\n)+", "", text, flags=re.M)
    folder = runner.config / "presets"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.toml").write_text(f'name = "{name}"\n{text}', encoding="utf-8")


@pytest.mark.parametrize(
    ("preset", "code"),
    [
        ("undrafted", "ENGINE_NEVER_RAN"),
        ("unrestored", "RESTORATION_CLAIM"),
        ("unbounded", "SILENT_FALLBACK"),
    ],
)
def test_a_job_without_the_component_it_promises_is_rejected(
    weakened: RunnerFixture, preset: str, code: str
) -> None:
    asked = weakened.ask(preset, params={"limit": 2, "max_tokens": 12})
    assert weakened.serve_once(name="testmac") == 1
    verdict = weakened.answer(asked.nonce).result.verdict
    assert (verdict.status, verdict.reason) == ("rejected", "evidence"), weakened.log(asked.nonce)
    assert code in [violation.code for violation in verdict.violations]


@dataclass(frozen=True)
class Sabotage:
    """One line of the installed code that is missing, the job that needs it, and what rejects the job."""

    file: str
    line: str
    instead: str
    job: str
    params: tuple[str, ...]
    codes: frozenset[str]


SABOTAGES = {
    "the drafter is never opened": Sabotage(
        "engine/config.py",
        "    fit_threads(target.target.hidden_size)\n",
        "    spec = drafting = None\n",
        "k3-fused-allmlx-code",
        ("limit=2", "max_tokens=16"),
        frozenset({"ENGINE_NEVER_RAN"}),
    ),
    "nothing is injected": Sabotage(
        "engine/restoration/session.py",
        "            cache.overwrite("
        "start, *site.placed(keys[None], values[None], start, cache.keys.shape[1]))\n",
        "            del cache, keys, values\n",
        "k3-step1-incremental",
        RESTORED,
        frozenset({"RESTORATION_CLAIM", "CONTROL_FAILED"}),
    ),
    "the server takes every draft": Sabotage(
        "engine/acceptance.py",
        "    hits = (drafts == tokens[:-1]).astype(mx.int32)\n",
        "    hits = mx.ones_like(drafts)\n",
        "server-smoke",
        ("limit=1", "max_tokens=32", "clients=2", "block=8"),
        frozenset({"OUTPUT_DIVERGED"}),
    ),
}


def install(folder: Path, sabotage: Sabotage) -> Path:
    """An environment of its own with a copy of the installed code, sabotaged; its interpreter."""
    library = folder / "library"
    for package in ("bridge", "engine", "evidence_format"):
        shutil.copytree(ROOT / package, library / package, ignore=shutil.ignore_patterns("__pycache__"))
    file = library / sabotage.file
    text = file.read_text(encoding="utf-8")
    assert text.count(sabotage.line) == 1, "the line that was to be deleted is not there any more"
    file.write_text(text.replace(sabotage.line, sabotage.instead), encoding="utf-8")
    venv.create(folder / "venv", symlinks=True)
    [packages] = (folder / "venv" / "lib").glob("python*/site-packages")
    (packages / "paths.pth").write_text(f"{library}\n{sysconfig.get_path('purelib')}\n")
    return folder / "venv" / "bin" / "python"


@contextlib.contextmanager
def installed_runner(repo: RepoFixture, python: Path) -> Iterator[None]:
    """`runner serve` of another installation; drained at the end."""
    command = [str(python), "-I", "-m", "bridge", "runner", "serve"]
    command += ["--remote", str(repo.remote), "--name", "testmac"]
    with (repo.root / "testmac.log").open("ab") as log:
        process = subprocess.Popen(command, env=repo.env, cwd=repo.root, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            process.wait(20)


@pytest.mark.exhaustive
def test_two_finished_requests_are_compared(serving: RepoFixture) -> None:
    """They must be of one preset, machine and set of weights; here the block differs."""
    asked = [("throughput", "block=8"), ("throughput", "block=4"), ("probe", "")]
    handles = []
    for preset, block in asked:
        words = ("-p", block, "-p", "limit=2", "-p", "max_tokens=24") if block else ()
        done = serving.kakeya("run", "--preset", preset, *words, "--wait", "280", "--json")
        assert done.code == 0, done.err
        handles.append(done.json["handle"])
    compared = serving.kakeya("compare", handles[0], handles[1], "--json")
    assert (compared.code, compared.json["verdict"], compared.json["prompts"]) == (0, "inconclusive", 2)
    assert compared.json["ratio"] > 0
    refused = serving.kakeya("compare", handles[0], handles[2])
    assert refused.code == 2
    assert "differ in the preset: throughput and probe" in refused.err


@pytest.mark.sampled(0, 3)
@pytest.mark.parametrize("case", SABOTAGES)
def test_an_engine_that_lacks_a_line_is_rejected(serving: RepoFixture, tmp_path: Path, case: str) -> None:
    sabotage = SABOTAGES[case]
    repo = furnish(tmp_path / "repo")
    keep_kernels(serving, repo)
    with installed_runner(repo, install(tmp_path, sabotage)):
        answer = ask(repo, sabotage.job, *sabotage.params)
    assert (answer.code, answer.status) == (3, "rejected"), answer.said
    assert sabotage.codes & set(answer.codes), answer.said


def keep_kernels(of: RepoFixture, other: RepoFixture) -> None:
    """Let another repository's runner have the kernels that one has compiled, if it did."""
    kernels = Path("state/runner/testmac/kernel-cache")
    if (of.root / kernels).is_dir():
        shutil.copytree(of.root / kernels, other.root / kernels)

"""The command line: codes, one JSON line, progress lines, no half-written files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.cli import run
from tests.engine.evaluation.test_prompts import needle_row, write

ROOT = Path(__file__).resolve().parents[3]
ENGINE = [sys.executable, "-I", "-m", "engine"]
BOUND = [
    *("--request-nonce", "20260102t030405z0123456789ab"),
    *("--workload-sha", "a" * 40),
    *("--preset-digest", "b" * 64),
    *("--engine-source", "installed"),
]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KAKEYA_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def models(folders: tuple[Path, Path]) -> list[str]:
    return ["--model", str(folders[0]), "--drafter", str(folders[1])]


@pytest.fixture
def own(tmp_path: Path) -> str:
    rows = [{"id": f"code-{i}", "kind": "code", "prompt": f"def f{i}(x):"} for i in range(3)]
    return str(write(tmp_path / "own.jsonl", *rows))


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def last_json(out: str) -> dict[str, Any]:
    return json.loads(out.strip().splitlines()[-1])


def test_generate_gives_text_and_one_json_line_or_either(capsys, models: list[str], tmp_path: Path):
    code, both, err = call(capsys, "generate", "def f(x):", "--max-tokens", "12", *models)
    assert code == 0
    assert "12 tokens" in err
    code, text, err = call(capsys, "generate", "def f(x):", "--max-tokens", "12", "--text", *models)
    assert (code, err) == (0, "")
    assert both.startswith(text)
    assert last_json(both)["text"] == text.removesuffix("\n")
    report = tmp_path / "g.json"
    arguments = ("generate", "def f(x):", "--max-tokens", "12", "--json", "--report", str(report))
    code, out, _ = call(capsys, *arguments, *models)
    assert code == 0
    assert len(out.splitlines()) == 1
    assert last_json(out)["text"] == text.removesuffix("\n")
    assert json.loads(report.read_text())["kind"] == "throughput"


def test_generate_writes_a_report_only_when_asked(capsys, models: list[str], state: Path, tmp_path: Path):
    base = ("generate", "def f(x):", "--max-tokens", "2", "--json", *models)
    code, out, _ = call(capsys, *base)
    assert code == 0
    assert "report" not in last_json(out)
    assert not (state / "reports").exists()
    code, out, _ = call(capsys, *base, "--report")
    [written] = (state / "reports").iterdir()
    assert (code, last_json(out)["report"]) == (0, str(written))
    code, out, _ = call(capsys, *base, *BOUND)
    bound = json.loads(Path(last_json(out)["report"]).read_text())
    assert (code, bound["request"]["engine_source"]) == (0, "installed")
    code, out, _ = call(capsys, *base, f"--report={tmp_path / 'g.json'}")
    assert (code, last_json(out)["report"]) == (0, str(tmp_path / "g.json"))


def test_generation_uses_no_module_of_evaluation(models: list[str]):
    arguments = ["generate", "--chat", "hi", "--max-tokens", "8", "--json", *models]
    script = (
        "import sys\nimport engine.cli.generate\nfrom engine.cli import run\n"
        f"code = run({arguments!r})\n"
        "print([name for name in sys.modules if name.startswith('engine.evaluation')], file=sys.stderr)\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert last_json(done.stdout)["generated_tokens"] == 8


def test_a_report_nobody_named_is_kept_among_the_last_ones(
    capsys, state: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("engine.cli.reports.KEPT", 2)
    written = [last_json(call(capsys, "probe", "--json")[1])["report"] for _ in range(3)]
    assert [str(path) for path in sorted((state / "reports").iterdir())] == written[1:]
    assert json.loads(Path(written[2]).read_text())["kind"] == "probe"


@pytest.mark.slow
def test_generate_reads_files_and_uses_the_chat_template(capsys, models: list[str], tmp_path: Path):
    (tmp_path / "p.txt").write_text("hi")
    base = ("generate", "--max-tokens", "4", "--json", *models)
    from_file = last_json(call(capsys, *base, "--file", str(tmp_path / "p.txt"))[1])
    assert from_file["text"] == last_json(call(capsys, *base, "hi")[1])["text"]
    chat = last_json(call(capsys, *base, "--chat", "hi")[1])
    assert chat["prompt_tokens"] == from_file["prompt_tokens"] + 4


def test_throughput_ends_with_one_json_line_and_writes_a_bound_report(
    capsys, models: list[str], own: str, tmp_path: Path
):
    report = tmp_path / "t.json"
    arguments = ["eval", "throughput", "--prompts", own, "--max-tokens", "8", "--report", str(report)]
    code, out, err = call(capsys, *arguments, *models, *BOUND)
    assert code == 0
    line = last_json(out)
    assert line["comparisons"][0]["identical_samples"] == 3
    assert line["report"] == str(report)
    document = json.loads(report.read_text())
    assert document["request"]["engine_source"] == "installed"
    assert document["configuration"]["max_tokens"] == 8
    assert "tok/s" in out
    progress = [text for text in err.splitlines() if text.startswith("progress ")]
    assert progress[0].startswith("progress 0/6 warming up")
    assert progress[-1].startswith("progress 6/6 checking")


@pytest.mark.slow
def test_recall_and_probe_end_with_one_json_line(capsys, models: list[str], tmp_path: Path):
    own = str(write(tmp_path / "own.jsonl", needle_row()))
    code, out, _ = call(capsys, "eval", "recall", "--prompts", own, "--json", *models)
    assert code == 0
    assert set(last_json(out)["arms"]) == {"speculative", "oracle", "no_needle"}
    assert len(out.splitlines()) == 1
    report = tmp_path / "r.json"
    arguments = ["eval", "recall", "--prompts", own, "--json", "--batch", "4", "--report", str(report)]
    code, _, _ = call(capsys, *arguments, *models)
    assert (code, json.loads(report.read_text())["configuration"]["batch"]) == (0, 4)
    code, out, _ = call(capsys, "probe", "--report", str(tmp_path / "p.json"))
    assert code == 0
    assert last_json(out)["ring_rollback_exact"] is True
    assert json.loads((tmp_path / "p.json").read_text())["kind"] == "probe"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "either PROMPT or --file"),
        (["generate", "x", "--report", "/"], "'/' is a directory"),
        (["generate", "x", "--max-tokens", "0"], "--max-tokens must be at least 1"),
        (["generate", "x", "--model", "/nowhere"], "/nowhere is not a folder"),
        (["generate", "--file", "/nowhere"], "/nowhere cannot be read"),
        (["eval", "throughput", "--prompts", "poems"], "'poems' is neither"),
        (["eval", "throughput", "--claim", "everything"], "everything"),
        (["eval", "throughput", "--limit", "0"], "--limit must be at least 1"),
        (
            ["eval", "throughput", "--min-speedup", "0.5"],
            "--min-speedup must be a finite number of at least 1",
        ),
        (["eval", "recall", "--min-recall", "2"], "--min-recall must lie in"),
        (["eval", "recall", "--limit", "0"], "--limit must be at least 1, not 0"),
        (["eval", "recall", "--limit", "-1"], "--limit must be at least 1, not -1"),
        (["eval", "recall", "--batch", "0"], "--batch must be at least 1"),
        (["eval", "recall", "--depths", "0;1"], "--depths '0;1' is not a list such as 0,0.5,1"),
        (["eval", "recall", "--context", "0"], "--context must be at least 1"),
        (["eval", "recall", "--context", "40"], "--context 40 is too short"),
        (["eval", "recall", "--context", "300", "--prompts", "code"], "leave them out, or --prompts code"),
        (["eval", "recall", "--thinking", "off"], "--thinking is for the chat template"),
        (["eval", "recall", "--thinking", "off", "--chat"], "chat template has no such switch"),
        (["eval", "throughput", "--system", ""], "--system must not be empty"),
        (["eval", "throughput", "--kv", "restored:exact"], "means nothing without its controls"),
        (["probe", "--workload-sha", "a" * 40], "--request-nonce, --preset-digest, --engine-source missing"),
        (["probe", *BOUND, "--workload-sha", "master"], "--workload-sha 'master' has the wrong form"),
        (["frobnicate"], "No such command"),
    ],
)
def test_bad_input_is_one_clear_line_and_code_2(capsys, arguments: list[str], message: str):
    code, out, err = call(capsys, *arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""


def test_without_the_engine_extra_the_error_says_what_to_install(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mlx", None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    monkeypatch.delitem(sys.modules, "engine.device", raising=False)
    code, _, err = call(capsys, "probe")
    assert code == 2
    assert "make setup" in err
    assert "Traceback" not in err


def test_our_own_bug_is_code_70_and_says_how_to_report_it(capsys, monkeypatch: pytest.MonkeyPatch):
    import engine.evaluation.probe

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("seven")

    monkeypatch.setattr(engine.evaluation.probe, "probe_machine", broken)
    code, _, err = call(capsys, "probe")
    assert code == 70
    assert "ZeroDivisionError: seven" in err
    assert "please report it" in err


def test_a_report_that_cannot_be_written_is_code_1(capsys, tmp_path: Path):
    (tmp_path / "file").write_text("")
    code, _, err = call(capsys, "probe", "--report", str(tmp_path / "file" / "p.json"))
    assert code == 1
    assert "cannot be written" in err


@pytest.mark.slow
def test_an_interrupt_is_code_130_and_leaves_no_report(models: list[str], own: str, tmp_path: Path):
    report = tmp_path / "out" / "t.json"
    arguments = ["eval", "throughput", "--prompts", own, "--max-tokens", "400", "--report", str(report)]
    child = subprocess.Popen(
        [*ENGINE, *arguments, *models],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    for line in child.stderr:
        # Not while it warms up: mlx then waits for the compiler, and the C library ignores the signal.
        if line.startswith("progress") and "warming up" not in line:
            break
    os.kill(child.pid, signal.SIGINT)
    out, err = child.communicate(timeout=30)
    assert child.returncode == 130, err
    assert "interrupted" in err
    assert out == ""
    assert not report.exists()
    kept = list(tmp_path.glob("out/*"))
    assert not kept or "the same command goes on from there" in err
    assert [file.name for file in kept] in ([], ["t.json.partial.jsonl"])


def test_help_is_quick_and_imports_no_mlx():
    script = (
        "import sys\nfrom engine.cli import run\nrun(['--help'])\n"
        "sys.exit(any(name.split('.')[0] in ('mlx', 'mlx_lm', 'rich', 'numpy') for name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    for command in ("generate", "eval", "probe"):
        assert command in done.stdout


@pytest.mark.parametrize("command", [["generate"], ["eval", "throughput"], ["eval", "recall"], ["probe"]])
def test_every_command_explains_itself_with_examples(capsys, command: list[str]):
    code, out, _ = call(capsys, *command, "--help")
    assert code == 0
    assert "Examples:" in out
    assert "--report" in out

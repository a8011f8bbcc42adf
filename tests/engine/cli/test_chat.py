"""``kakeya_engine chat``: scripts and terminals, commands, Ctrl-C, and what a terminal must not be given."""

from __future__ import annotations

import io
import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import huggingface_hub.constants
import pytest

from engine.cli import run
from engine.cli.chat_terminal import InputLines, Screen, harmless
from engine.external_engines.engine import LoopEntry
from engine.external_engines.loops import ENGINES
from engine.server.parsing import ParsedText, Piece
from engine.server.sequence import PrefillProgress
from engine.target.loading import SHIPPED_TARGET
from tests.engine.registry.hub import COMMIT
from tests.engine.registry.registries import write
from tests.engine.server.test_external import open_small
from tests.fixtures.terminal import CI_VARIABLES, without_ci

ROOT = Path(__file__).resolve().parents[3]
LIST = "Make a numbered list of: table, window, river."


class Chat:
    """The command line with a script on standard input."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, script: str | bytes, *arguments: str) -> tuple[int, str, str]:
        given = script.encode() if isinstance(script, str) else script
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
        code = run(["chat", *arguments])
        return (code, *self._capsys.readouterr())

    def turns(self, script: str | bytes, *arguments: str) -> list[dict[str, Any]]:
        """The JSON lines of its turns; nothing else may be on standard output."""
        code, out, err = self(script, "--json", *arguments)
        assert code == 0, err
        return [json.loads(line) for line in out.splitlines()]


@pytest.fixture
def chat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Chat:
    return Chat(capsys, monkeypatch)


@pytest.mark.slow
def test_each_line_of_a_script_is_a_turn_and_the_next_one_reads_only_what_is_new(chat: Chat):
    first, second = chat.turns(f"{LIST}\n\nHow many things\\\nare in it?", "--max-tokens", "40")
    assert first["content"].startswith("Here is")
    assert first["reasoning"] is None
    assert first["finish_reason"] == "stop"
    assert first["x_kakeya"]["model"] == "demo"
    assert first["x_kakeya"]["speculation"] is True
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["total_tokens"] - 1
    code, out, err = chat(f"{LIST}\n", "--max-tokens", "40")
    assert (code, out) == (0, first["content"] + "\n")
    assert re.search(r"^\d+ tokens \(stop\), .* tok/s, .* per verify, 0 of 23 prompt tokens cached$", err)
    assert chat(f"{LIST}\n", "--max-tokens", "40", "--no-stats") == (0, out, "")


@pytest.mark.slow
def test_commands_are_obeyed_between_turns(chat: Chat, tmp_path: Path):
    file = tmp_path / "said.jsonl"
    script = f"""{LIST}
/retry
/save {file}
/save {file}
/undo
/undo
/load {file}
/stats
/system Be brief.
/model
/model demo@affine8
/model poems
/reset
/save
/undo now
/poem
//poem
/help
/quit
{LIST}
"""
    code, out, err = chat(script, "--max-tokens", "40", "--no-stats")
    assert code == 0
    answers = out.splitlines()
    assert answers[: len(answers) // 2][0] == "Here is the list:"
    said = err.splitlines()
    assert said[0] == f"2 messages written to {file}"
    assert said[1] == f"{file} exists already; give another name"
    assert said[2] == "the last turn is removed; 0 messages are left"
    assert said[3] == "nothing has been said yet"
    assert said[4] == f"2 messages read from {file}"
    assert said[5:7] == ["model: demo@native", "answers: 2, 64 tokens"]
    rest = "\n".join(said[7:])
    assert "verifies" in rest
    assert "the system turn is set" in rest
    assert "\ndemo@lattice-packed\n" in rest
    assert "demo@affine8 answers from now on" in rest
    assert "there is no model 'poems'" in rest
    assert "forgotten, but for the system turn" in rest
    assert "/save needs the name of a file" in rest
    assert "/undo takes nothing behind it, not 'now'" in rest
    assert "there is no command '/poem'; /help lists them, and // begins a line with a slash" in rest
    assert "/model ID     let NAME or NAME@CHANNEL answer" in rest
    messages = [json.loads(line) for line in file.read_text().splitlines()]
    assert [message["role"] for message in messages] == ["user", "assistant"]


ENGINES_FILE = f"""
default = "drafting"
[models.drafting]
summary = "mlx-lm with a draft model"
target = "shipped"
drafter = {{ path = "{SHIPPED_TARGET}" }}
engine = "mlx-lm-speculative"
[models.hookless]
summary = "makes its caches where nothing reaches them"
target = "shipped"
engine = "hookless"
"""


def test_stats_say_of_external_engines_what_is_known(
    chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(ENGINES, "hookless", LoopEntry("mlx_lm", "nothing", open_small, drafts=False))
    arguments = ("--registry", str(write(tmp_path, ENGINES_FILE)), "--max-tokens", "8")
    how = chat.turns(f"{LIST}\n", *arguments)[0]["x_kakeya"]
    assert how["resident_bytes"] > how["drafter_resident_bytes"] > 0
    _, _, said = chat(f"{LIST}\n/stats\n/model hookless\n{LIST}\n/stats\n", *arguments)
    assert f"keys and values, the drafter's too: {how['resident_bytes']:,} bytes\n" in said
    assert "keys and values, the drafter's too: the engine hookless does not tell\n" in said


@pytest.mark.slow
def test_what_does_not_fit_is_said_and_the_conversation_goes_on(chat: Chat):
    script = f"{LIST}\n{'table ' * 1200}\nHello.\n"
    first, refused, last = chat.turns(script, "--max-tokens", "40")
    assert list(refused) == ["error"]
    assert "demo takes 1024" in refused["error"]
    assert "nothing was sent: /undo takes back the last turn, /reset starts over" in refused["error"]
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["total_tokens"] - 1


def test_bytes_that_are_no_text_are_refused_and_the_next_line_is_a_turn(chat: Chat):
    refused, answered = chat.turns(b"a\xff\nHello.\n", "--max-tokens", "8")
    assert refused == {"error": "character 2 is no utf-8 text; nothing was sent"}
    assert answered["content"]


@pytest.mark.slow
def test_one_folder_serves_as_well_as_a_registry(chat: Chat):
    given = ("--model", str(SHIPPED_TARGET), "--drafter", "prompt-lookup", "--kv", "affine8")
    [turn] = chat.turns("Hello.\n", *given, "--max-tokens", "8", "--system", "Be brief.", "--block", "4")
    assert turn["x_kakeya"]["kv_channel"] == "affine8"
    assert turn["x_kakeya"]["drafter"] == "prompt-lookup"
    assert turn["x_kakeya"]["block"] == 4


def test_a_model_of_this_machine_goes_by_its_name(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "kakeya-models").mkdir()
    (tmp_path / "kakeya-models" / "mine").symlink_to(SHIPPED_TARGET)
    monkeypatch.setenv("HOME", str(tmp_path))
    [turn] = chat.turns("Hello.\n", "mine@affine8", "--max-tokens", "2", "--no-speculation")
    assert (turn["x_kakeya"]["kv_channel"], turn["x_kakeya"]["drafter"]) == ("affine8", None)


def test_models_of_the_registry_are_decoded_plainly_on_request(chat: Chat):
    [turn] = chat.turns("Hello.\n", "--max-tokens", "2", "--no-speculation")
    assert (turn["x_kakeya"]["speculation"], turn["x_kakeya"]["drafter"]) == (False, None)


def test_a_download_of_the_hub_goes_by_its_name(chat: Chat, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--acme--tiny" / "snapshots").mkdir(parents=True)
    (tmp_path / "models--acme--tiny" / "snapshots" / COMMIT).symlink_to(SHIPPED_TARGET)
    name = f"acme/tiny@{COMMIT}@affine8"
    [turn] = chat.turns("Hello.\n", name, "--max-tokens", "2", "--no-speculation")
    assert (turn["x_kakeya"]["model"], turn["x_kakeya"]["kv_channel"]) == ("tiny", "affine8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["poems"], "there is no model 'poems'"),
        (["demo@best"], "there is no KV channel 'best'"),
        (["mistral-7b"], "run: kakeya_engine model pull mistral-7b (with your --registry, if it"),
        (["Some/Model"], "Some/Model is not on this machine; run: kakeya_engine model pull Some/Model"),
        (["demo", "--model", "/nowhere"], "give either ID or --model"),
        (["--registry", "a.toml", "--model", "/nowhere"], "give either --registry or --model"),
        (["--kv", "affine8"], "--kv goes with --model"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--system", " "], "--system must not be empty"),
        (["--max-tokens", "0"], "--max-tokens must be at least 1"),
        (["--temperature", "-1"], "temperature must be 0 or lie in"),
        (["--block", "many"], "--block must be auto or a number"),
        (["--block", ""], "--block must be auto or a number"),
        (["--thinking", "on"], "the chat template of demo has no such switch"),
    ],
)
def test_bad_input_is_one_clear_line_and_code_2(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], message: str
):
    monkeypatch.setenv("HOME", str(tmp_path))
    code, out, err = chat("Hello.\n", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_without_standard_input_there_is_a_clear_line(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert run(["chat"]) == 2
    assert "standard input is closed" in capsys.readouterr().err


def test_help_gives_examples(capsys):
    assert run(["chat", "--help"]) == 0
    out = capsys.readouterr().out
    assert "kakeya_engine chat demo@affine8" in out
    assert "Ctrl-C ends an answer" in out


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc ünï 漢 👩‍👩‍👧", "a\tb\nc ünï 漢 👩‍👩‍👧"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x9b31m\x7f\r\x00", "\\x9b31m\\x7f\\r\\x00"),
        ("a\u202eb\u2066c", "a\\u202eb\\u2066c"),
        ("a\ud800", "a\\ud800"),
    ],
)
def test_a_terminal_obeys_nothing_of_what_a_model_says(text: str, shown: str):
    assert harmless(text) == shown


# Its session gets the terminal on standard input, whose Ctrl-C is then a signal
IN_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from engine.cli import main
main(sys.argv[1:])
"""


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_reasoning_is_dimmed_on_a_terminal_and_left_out_elsewhere(monkeypatch: pytest.MonkeyPatch):
    pieces = [
        ParsedText([Piece("reasoning", "So\x1b[0m")]),
        ParsedText([Piece("reasoning", " be it.")]),
        ParsedText([Piece("content", "\n\n")]),
        ParsedText([Piece("content", "\nYes")]),
        ParsedText([Piece("content", ".\n")]),
    ]

    def shown(kind: type[io.StringIO]) -> str:
        monkeypatch.setattr(sys, "stdout", kind())
        monkeypatch.setattr(sys, "stderr", kind())
        screen = Screen(as_json=False, stats=False)
        screen.show(PrefillProgress(512, 4096))
        for piece in pieces:
            screen.show(piece)
        screen.say("done")
        return sys.stdout.getvalue() + "|" + sys.stderr.getvalue()  # type: ignore[attr-defined]

    for name in (*CI_VARIABLES, "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    dimmed = "\x1b[2mSo\\x1b[0m\x1b[0m\x1b[2m be it.\x1b[0m\n\nYes.\n|"
    assert shown(Terminal) == dimmed + "\x1b[2mreading 512 of 4,096 tokens …\x1b[0m\r\x1b[Kdone\n"
    assert shown(io.StringIO) == "\n\n\nYes.\n|done\n"
    monkeypatch.setenv("CI", "true")
    assert shown(Terminal) == shown(io.StringIO), "a terminal that nobody watches"
    monkeypatch.delenv("CI")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[2m" not in shown(Terminal)


def test_lines_pasted_into_a_terminal_without_an_editor_are_one_turn(monkeypatch: pytest.MonkeyPatch):
    ours, theirs = os.openpty()
    with open(theirs, encoding="utf-8", closefd=False) as stdin, monkeypatch.context() as patched:
        patched.setattr(sys, "stdin", stdin)
        lines = InputLines(quiet=True)
        os.write(ours, b"one\ntwo\n")
        assert lines.next() == "one\ntwo"
        os.write(ours, b"three\\\n")
        os.write(ours, b"four\n")
        assert lines.next() == "three\nfour"
        os.write(ours, b"\x04")
        assert lines.next() is None
    os.close(ours)
    os.close(theirs)


class Window:
    """The command line in a terminal of its own."""

    def __init__(self, ours: int, process: subprocess.Popen[bytes]) -> None:
        self._ours, self.process = ours, process
        self._rest = b""  # shown, and not read yet

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._ours, text.encode())

    def read(self, until: str, seconds: float = 60.0) -> str:
        """What is shown up to some text, and that."""
        shown, deadline = self._rest, monotonic() + seconds
        while until.encode() not in shown:
            ready, _, _ = select.select([self._ours], [], [], max(deadline - monotonic(), 0))
            assert ready, f"{until!r} is not shown; {shown!r} is"
            shown += os.read(self._ours, 65536)
        length = shown.index(until.encode()) + len(until.encode())
        self._rest = shown[length:]
        return shown[:length].decode(errors="replace")


@contextmanager
def window(*arguments: str, **variables: str) -> Iterator[Window]:
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, "chat", *arguments],
        cwd=ROOT,
        env=without_ci(os.environ) | {"TERM": "xterm", "INPUTRC": "/dev/null"} | variables,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Window(ours, process)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.slow
def test_on_a_terminal_ctrl_c_ends_an_answer_and_twice_at_the_prompt_the_conversation(tmp_path: Path):
    endless = tmp_path / "endless"
    endless.mkdir()
    for file in SHIPPED_TARGET.iterdir():
        (endless / file.name).symlink_to(file)
    for name, ends in (
        ("config.json", {"eos_token_id": [3]}),
        ("tokenizer_config.json", {"eos_token": "<mask>"}),
    ):
        changed = json.loads((endless / name).read_text()) | ends  # a token that it never says
        (endless / name).unlink()
        (endless / name).write_text(json.dumps(changed))
    with window("--model", str(endless), "--drafter", "none", "--max-tokens", "900") as terminal:
        assert "endless@native; /help" in terminal.read("> ")
        terminal.type(LIST + "\n")
        terminal.read("1. the table")
        terminal.type("\x03")
        assert "tokens (interrupted)" in terminal.read("prompt tokens cached")
        terminal.read("> ")
        terminal.type("\x1b[200~one\ntwo\x1b[201~\n")
        terminal.read("\x1b[?2004l")  # the editor is through with it
        terminal.read("e")  # in an answer that does not end by itself
        terminal.type("\x03")
        stopped = terminal.read("prompt tokens cached")
        assert " 0 of " not in stopped
        terminal.type(f"/save {tmp_path / 'said.jsonl'}\n")
        terminal.read("messages written")
        terminal.read("> ")
        terminal.type("half a line")
        terminal.read("half a line")
        sleep(0.5)  # before the editor listens, Ctrl-C would wait for the next key
        terminal.type("\x03")
        terminal.read("Ctrl-C once more ends")
        terminal.read("> ")
        sleep(0.5)
        terminal.type("\x03")
        assert terminal.process.wait(30) == 0
    messages = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    assert "1. the table" in messages[1]["content"]


@pytest.mark.slow
def test_on_a_terminal_ctrl_d_ends_and_json_has_standard_output_to_itself(tmp_path: Path):
    with window("--json", "--max-tokens", "8") as terminal:
        terminal.read("> ")
        terminal.type("Hello.\n")
        shown = terminal.read("prompt tokens cached")
        assert '{"content": ' in shown
        terminal.read("> ")
        terminal.type("\x04")
        assert terminal.process.wait(30) == 0


@pytest.mark.slow
def test_in_ci_a_terminal_has_no_editor_and_no_colours():
    with window("--stats", "--max-tokens", "8", CI="true") as terminal:
        shown = terminal.read("> ")
        terminal.type("Hello.\n")
        shown += terminal.read("prompt tokens cached")
        terminal.read("> ")
        terminal.type("\x04")
        assert terminal.process.wait(30) == 0
    assert "\x1b" not in shown

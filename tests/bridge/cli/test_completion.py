"""What a shell offers: commands, presets, parameters and handles, from files of this machine alone."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from bridge.cli import cli
from bridge.cli.completion import VARIABLE, BashWords, ZshWords, completion
from bridge.client.recent import recent, remember
from bridge.protocol.runner_info import Property
from engine.cli import group
from tests.bridge.cli.calls import call
from tests.bridge.cli.test_runners import here as registration
from tests.bridge.cli.test_runners import publish
from tests.bridge.registrations import offer
from tests.fixtures.bus import BusFixture
from tests.fixtures.repo import BIN, RepoFixture


def offered(*words: str) -> list[str]:
    *args, incomplete = words
    found = ShellComplete(cli, {}, "kakeya_mac", VARIABLE).get_completions(list(args), incomplete)
    return [item.value for item in found]


def test_commands_presets_and_parameters_are_offered() -> None:
    assert offered("st") == ["status"]
    assert offered("run", "--preset", "throughput") == ["throughput", "throughput-bounded"]
    assert offered("run", "--preset", "throughput", "-p", "prompts=c") == ["prompts=code", "prompts=chat"]
    assert offered("run", "--preset", "throughput", "--param", "li") == ["limit="]
    assert offered("run", "--preset", "nonesuch", "-p", "") == []
    assert offered("presets", "prob") == ["probe"]
    assert "--json" in offered("status", "--j")


def test_handles_are_those_that_this_machine_asked_for_or_saw(here: BusFixture) -> None:
    submitted = here.submit()
    assert offered("status", "") == []
    asked = here.repo.kakeya("run", "--preset", "probe", "--json").json["handle"]
    assert offered("status", "") == [asked]
    assert here.repo.kakeya("queue").code == 0
    for command in ("result", "wait", "logs", "cancel", "again", "fetch"):
        assert sorted(offered(command, "2")) == sorted([submitted.nonce, asked])
    assert offered("status", asked[:-1]) == [asked]


def test_presets_of_runners_are_those_that_were_seen_last(repo: RepoFixture, monkeypatch) -> None:
    for name in ("KAKEYA_STATE", "KAKEYA_CONFIG"):
        monkeypatch.setenv(name, repo.env[name])
    params = {
        "mode": Property(type="string", enum=("plain", "$(reboot)", "a b")),
        "quick": Property(type="boolean"),
        "shots": Property(type="integer"),
    }
    publish(
        repo, registration(repo, presets=(offer("special", parameters=params), offer("bare", parameters={})))
    )
    assert offered("run", "--preset", "special") == []
    missing = repo.kakeya("presets", "special")
    assert (missing.code, "kakeya_mac presets special --remote" in missing.err) == (2, True)
    assert repo.kakeya("presets", "special", "--remote").code == 0
    repo.git("remote", "remove", "origin")
    assert offered("run", "--preset", "special") == ["special"]
    assert offered("presets", "bar") == ["bare"]
    words = ["mode=plain", "quick=true", "quick=false", "shots="]
    assert offered("run", "--preset", "special", "-p", "") == words


def test_only_the_last_handles_are_kept(tmp_path: Path) -> None:
    names = [f"20260301t120000z{number:012x}" for number in range(300)]
    remember(tmp_path, [(name, "probe") for name in names])
    remember(tmp_path, [(names[-1], None)])
    assert list(recent(tmp_path)) == names[100:]


BASH = """
eval "$(kakeya_mac completion bash)"
compopt() { :; }
complete_words() {
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
    _kakeya_mac_completion "$1"
    echo "${COMPREPLY[@]}"
}
complete_words kakeya_mac run --preset throughput -p prompts = co
complete_words kakeya_mac run --preset throughput -p prompts =
complete_words kakeya-mac run --preset = prob
complete_words kakeya_mac run --preset throughput -p prompts = code -p li
"""


@pytest.mark.slow
def test_bash_takes_words_with_an_equals_sign_apart(repo: RepoFixture) -> None:
    env = {**repo.env, "PATH": f"{BIN}{os.pathsep}{repo.env['PATH']}"}
    done = subprocess.run(["bash", "--norc", "-c", BASH], env=env, capture_output=True, text=True)
    assert (done.stdout.splitlines(), done.stderr) == (
        ["code", "code chat retrieval maths edits all", "probe", "limit="],
        "",
    )


def test_each_shell_gets_a_script_for_both_names_of_the_program(capsys) -> None:
    for shell in ("bash", "zsh", "fish"):
        text = call(completion, capsys, shell).out
        assert f"{VARIABLE}={shell}_complete" in text
        assert text.count("kakeya-mac") >= 1 <= text.count("kakeya_mac")
    # What ours change of click's scripts is still there to be changed.
    assert "nospace" in BashWords.source_template
    assert "compadd -U -S ''" in ZshWords.source_template
    assert call(completion, capsys, "tcsh").code == 2


def commands_of(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for each in command.list_commands(context):
            inner = command.get_command(context, each)
            assert inner is not None
            yield from commands_of(inner, f"{name} {each}")


@pytest.mark.parametrize(("root", "name"), [(cli, "kakeya_mac"), (group, "kakeya_engine")])
def test_every_help_has_an_example_of_its_own(root: click.Command, name: str) -> None:
    for words, command in commands_of(root, name):
        text = f"{command.help}{command.epilog}"
        assert "Examples:" in text, words
        assert words in text.partition("Examples:")[2], words

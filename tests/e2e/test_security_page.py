"""The five commands of ``docs/security.md``, typed as they are printed there, on a client and on a Mac."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.fixtures.repo import Done, RepoFixture, wait_for

ROOT = Path(__file__).resolve().parents[2]
A_KEY = "'ssh-ed25519 AAAA…'"
KEY = re.compile(r"ssh-ed25519 [A-Za-z0-9+/=]+")


def five() -> list[tuple[str, str]]:
    """(machine, command), in the page's order."""
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    [block] = re.findall(r"## Set up in five commands.*?^```\n(.*?)^```", page, re.M | re.S)
    rows = [line.split("  #") for line in block.splitlines()]
    return [(words.strip().split(":")[0], command.strip()) for command, words in rows]


@pytest.mark.slow
def test_the_five_commands_make_a_signed_request_that_is_believed(repo: RepoFixture) -> None:
    mac = {"KAKEYA_CONFIG": str(repo.root / "mac-config"), "KAKEYA_STATE": str(repo.root / "mac-state")}
    said = ""

    def type_(machine: str, command: str, *more: str) -> Done:
        nonlocal said
        program, *words = shlex.split(command.replace(A_KEY, f"'{said}'"))
        assert program == "kakeya_mac"
        done = repo.program("kakeya_mac", *words, *more, **(mac if machine == "Mac" else {}))
        assert done.code == 0, f"{command}\n{done.out}\n{done.err}"
        if found := KEY.search(done.out):
            said = found[0]
        return done

    commands = five()
    assert [machine for machine, _ in commands] == ["client", "Mac", "Mac", "client", "client"]
    for machine, command in commands[:3]:
        type_(machine, command)
    with repo.runner(name="studio", trusted=False, **mac):
        wait_for(lambda: KEY.search(repo.runner_log("studio")), what="the runner's key")
        said = KEY.search(repo.runner_log("studio"))[0]  # type: ignore[index]
        type_(*commands[3])
        done = type_(*commands[4], "--json")
        assert (done.json["status"], done.json["signed"], done.json["signature"]) == (
            "passed",
            True,
            "trusted",
        )
        refused = repo.program(
            "kakeya_mac", "run", "--preset", "probe", "--signing-key", "none", "--wait", "--json"
        )
    assert refused.code == 8
    assert refused.json["signed"] is False
    assert "this one is unsigned" in json.dumps(refused.json), refused.out
    assert "for alice" in repo.runner_log("studio")

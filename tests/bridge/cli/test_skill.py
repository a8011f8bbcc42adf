"""The skill that is installed for agents; tests/e2e/test_agents.py runs its commands."""

from __future__ import annotations

import re
from pathlib import Path

from bridge.cli import COMMANDS, skill
from tests.fixtures.repo import RepoFixture

ROOT = Path(__file__).resolve().parents[3]


def test_the_skill_keeps_the_format(repo: RepoFixture):
    head = dict(re.findall(r"^([a-z]+): (.+)$", skill.text().split("---\n")[1], re.M))
    assert head["name"] == skill.NAME
    assert 1 <= len(head["description"]) <= 1024
    assert len(skill.text().splitlines()) < 500
    assert set(re.findall(r"kakeya_mac ([a-z]+)", skill.text())) - {"command"} <= set(COMMANDS)
    assert repo.kakeya("skill", "install").code == 0
    path = repo.clone / ".agents" / "skills" / "kakeya-mac" / "SKILL.md"
    assert path.read_bytes() == (ROOT / path.relative_to(repo.clone)).read_bytes()
    path.write_text("mine")
    refused = repo.kakeya("skill", "install")
    assert (refused.code, path.read_text()) == (2, "mine")
    assert str(Path(".agents/skills/kakeya-mac/SKILL.md")) in refused.err
    assert repo.kakeya("skill", "install", "--force").code == 0
    assert path.read_text() == skill.text()

"""``kakeya_mac skill``: the agent skill that comes with this program."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import click

from bridge.cli import write_project_file
from bridge.cli.options import path_option

NAME = "kakeya-mac"
# Where agents look for a project's skills. Cursor, Codex and Copilot read the first, Claude Code its own.
FOLDERS = {"agents": ".agents/skills", "claude": ".claude/skills"}


@click.group(
    epilog="""\b
Examples:
  kakeya_mac skill install
  kakeya_mac skill install --for claude"""
)
def skill() -> None:
    """The skill (agentskills.io) that tells an agent how to use this program; see docs/agents.md."""


@skill.command(
    epilog="""\b
Examples:
  kakeya_mac skill install                           # Cursor, Codex, Copilot
  kakeya_mac skill install --for claude              # Claude Code
  kakeya_mac skill install --dir ~/.agents/skills    # all of your projects"""
)
@click.option("--for", "agent", type=click.Choice(list(FOLDERS)), default="agents", help="Whose folder.")
@path_option(
    "--dir", "folder", text="The folder of skills (default: .agents/skills, of --for claude .claude/skills)."
)
@click.option("--force", is_flag=True, help="Overwrite a file that was changed.")
def install(agent: str, folder: Path | None, force: bool) -> None:
    """Write SKILL.md below the project's folder of skills; --dir names another folder."""
    path = (folder or Path(FOLDERS[agent])).expanduser() / NAME / "SKILL.md"
    write_project_file(path, text(), force=force, remedy="name another folder with --dir")
    click.echo(f"installed {path}")


def text() -> str:
    """The skill, as it is installed."""
    return files("bridge").joinpath("skill", "SKILL.md").read_text(encoding="utf-8")

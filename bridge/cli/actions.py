"""``kakeya_mac actions``: the workflow with which a repository asks a Mac about its pull requests."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

import click

from bridge import settings
from bridge.cli import warn, write_project_file
from bridge.cli.options import option_with_default
from bridge.client.submit import find_preset
from bridge.errors import ParameterError
from bridge.evidence.threshold import parse_threshold
from bridge.git.repo import GitRepo
from bridge.render.outcome import not_measured

WORKFLOW = ".github/workflows/kakeya-mac.yaml"
_ACTION = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,38}/[A-Za-z0-9._-]{1,100}@[0-9a-f]{40}")
_BRANCH = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
_VARIABLES = """variables of the repository, all optional (docs/actions.md has the whole table):
  KAKEYA_TRUSTED_RUNNERS   keys of the Macs whose results count, one `NAME ssh-ed25519 …` a line
  KAKEYA_TRANSPORT         embedded: a runner's daemon takes the request; auto (the default): a run of
                           mac-bridge.yaml, where the repository has it
  KAKEYA_REMOTE            another git remote that carries the requests
  KAKEYA_PUBLISH_RUNNER    label of the hosted machine (default: ubuntu-latest)
secret, where the Mac takes signed requests only:
  KAKEYA_SIGNING_KEY       a private SSH key without a passphrase; its public half goes to the Mac's owner"""


@click.group(
    epilog="""\b
Examples:
  kakeya_mac actions init --action OWNER/kakeya-mac@COMMIT"""
)
def actions() -> None:
    """Ask a Mac from GitHub Actions; see docs/actions.md."""


@actions.command(
    epilog="""\b
Examples:
  kakeya_mac actions init --action OWNER/kakeya-mac@COMMIT
  kakeya_mac actions init --action OWNER/kakeya-mac@COMMIT --preset throughput --threshold 'ratio>=1.5'

Run it in the repository's folder, then commit the file. Pull requests of forks cannot ask: the file says why,
and what to do."""
)
@click.option(
    "--action",
    required=True,
    metavar="OWNER/NAME@COMMIT",
    help="The repository of kakeya-mac and its commit, all 40 digits.",
)
@option_with_default("--preset", default="tests", metavar="NAME", help="What is asked for.")
@click.option("--threshold", default="", metavar="TEXT", help="What a figure must reach, like 'ratio>=1.5'.")
@option_with_default("--branch", default="main", metavar="NAME", help="Pushes to it ask, too.")
@click.option("--force", is_flag=True, help="Overwrite a file that was changed.")
def init(action: str, preset: str, threshold: str, branch: str, force: bool) -> None:
    """Write .github/workflows/kakeya-mac.yaml, with which each pull request asks a Mac."""
    if not _ACTION.fullmatch(action):
        raise ParameterError(f"--action is no OWNER/NAME@COMMIT: {ascii(action)[:100]}", "give all 40 digits")
    if not _BRANCH.fullmatch(branch):
        raise ParameterError(f"--branch cannot be {ascii(branch)[:100]}", "name a plain branch")
    chosen = find_preset(settings.load(), GitRepo(Path.cwd()), preset)
    if not chosen.measures_commit:
        warn([f"{not_measured(chosen.name, 'is')}; use a preset that runs its code, such as tests"])
    text = workflow(action, chosen.name, threshold and str(parse_threshold(threshold)), branch)
    path = Path(WORKFLOW)
    write_project_file(path, text, force=force, remedy="run it in the repository")
    click.echo(f"written: {path}\n{_VARIABLES}")


def workflow(action: str, preset: str, threshold: str, branch: str) -> str:
    """The workflow file; its words are checked by the caller."""
    text = files("bridge").joinpath("github", "pull_request.yaml").read_text(encoding="utf-8")
    words = {"ACTION": action, "PRESET": preset, "THRESHOLD": json.dumps(threshold), "BRANCH": branch}
    return re.sub(r"\b(ACTION|PRESET|THRESHOLD|BRANCH)\b", lambda match: words[match[0]], text)

"""The commands ``setup``, ``check`` and ``uninstall``: flags in, lines and an exit code out.

Parsed with the standard library, because it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import platform
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bridge import settings
from bridge.errors import BridgeError
from bridge.mac import names, setup
from bridge.mac.action import Say
from bridge.mac.options import (
    FOLDERS,
    LABELS,
    RUNNER_SHA256,
    RUNNER_VERSION,
    SERVICES,
    Options,
    SetupUsage,
)
from bridge.mac.steps.remembered import recalled

_EXAMPLE = "https://github.com/OWNER/NAME"
_EPILOG = """examples:
  scripts/setup_mac.sh --dry-run --url https://github.com/me/workload      (on any machine)
  scripts/setup_mac.sh --url https://github.com/me/workload --sudo
  scripts/setup_mac.sh --service serve --remote git@example.org:me/workload.git --sudo
  kakeya_mac runner check
  kakeya_mac runner uninstall --sudo

A second run changes nothing; flags that are left out are those of the last run. Nothing is done with sudo
unless --sudo says so; without it the commands that need an administrator are printed, and setup is not
complete.

KAKEYA_PYTHON names the Python that the environment is made with. KAKEYA_CONFIG and KAKEYA_STATE are
remembered.

exit code: 0 ready, 1 something is missing (each with its fix), 2 the flags cannot be meant, 70 our own bug"""


def main(argv: Sequence[str]) -> int:
    """Run one of the commands; its exit code.

    Args:
        argv: ``setup``, ``check`` or ``uninstall`` and flags; without a command it is ``setup``.
    """
    words = list(argv)
    if not words or words[0].startswith("-"):
        words.insert(0, "setup")
    asked = _parser().parse_args(words)
    say = (lambda line: print(line, file=sys.stderr)) if asked.json else print
    try:
        is_bare = asked.url is asked.remote is asked.service is None and not recalled(_prefix(asked))
        if asked.command == "setup" and asked.dry_run and is_bare:
            asked.url, asked.service = _EXAMPLE, "both"
            say(f"no --url was given: shown as for {_EXAMPLE}; --tailnet adds SSH over a tailnet\n")
        return _done(asked, _options(asked), say)
    except BrokenPipeError:  # the reader went away (| head)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if asked.dry_run:
            return 0
        return _failed(asked, "nobody reads what is said; a second run goes on from here", None, 1)
    except BridgeError as error:
        return _failed(asked, error.message, error.remedy, error.exit_code)
    except KeyboardInterrupt:
        return _failed(asked, "interrupted; a second run goes on from here", None, 1)
    except Exception as error:  # our own bug, with its traceback
        traceback.print_exc()
        return _failed(asked, f"our own bug: {type(error).__name__}: {error}", "please report it", 70)


def _done(asked: argparse.Namespace, options: Options, say: Say) -> int:
    outcomes = _COMMANDS[asked.command, asked.dry_run](options, say)
    missing = [outcome.name for outcome in outcomes if not outcome.is_ready]
    changed = any(outcome.done for outcome in outcomes)
    is_plan = asked.dry_run and asked.command != "check"
    code = 0 if is_plan or not missing else 1
    if is_plan:
        say("\nNothing was changed: this was a dry run.")
    elif missing:
        say(f"\nNot {'taken back' if asked.command == 'uninstall' else 'ready'}: {', '.join(missing)}.")
    elif asked.command == "uninstall":
        say(f"\nTaken back. {_left(options)}")
    else:
        say("\nReady." if changed else "\nReady; nothing had to be changed.")
    if asked.json:
        document = {
            "command": asked.command,
            "dry_run": asked.dry_run,
            "ready": not missing,
            "changed": changed,
            "steps": [outcome.as_json() for outcome in outcomes],
            "exit_code": code,
        }
        print(json.dumps(document, sort_keys=True))
    sys.stdout.flush()  # here, where it is told that nobody reads it
    return code


def _left(options: Options) -> str:
    """What stays, because it is the owner's."""
    page = "the repository" if options.page is None else options.page
    kept = (
        f"models ({options.models})",
        f"the policy and its folder ({options.policy.parent})",
        f"state with the key that signs results ({settings.state_dir(options.environ)})",
        f"logs ({options.prefix / names.LOGS})",
        "git-lfs's filter (~/.gitconfig)",
        "the power settings (pmset)",
        "tailscale",
        f"results on the remote, and the deploy key on the page of {page}",
    )
    return f"Left: {', '.join(kept)}."


_COMMANDS = {
    ("setup", False): setup.set_up,
    ("setup", True): setup.plan,
    ("check", False): setup.check,
    ("check", True): setup.check,
    ("uninstall", False): setup.take_back,
    ("uninstall", True): setup.plan_back,
}


def _failed(asked: argparse.Namespace, message: str, remedy: str | None, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    if remedy:
        print(f"  {remedy}", file=sys.stderr)
    if asked.json:
        print(json.dumps({"error": message, "remedy": remedy, "exit_code": code}, sort_keys=True))
    return code


def _prefix(asked: argparse.Namespace) -> Path:
    """The folder that is named, else the one whose environment runs this, else the usual one."""
    if asked.prefix == "":
        raise SetupUsage("--prefix is empty", f"leave it out for {Path.home() / names.PREFIX}")
    if asked.prefix is not None:
        return Path(asked.prefix).expanduser().resolve()
    return (names.prefix_around(Path(sys.prefix)) or Path.home() / names.PREFIX).resolve()


def _environ(before: dict[str, Any]) -> dict[str, str]:
    """The process's variables, and the folders that were asked for the last time."""
    environ = dict(os.environ)
    for name, variable in FOLDERS.items():
        if given := environ.get(variable):
            environ[variable] = str(Path(given).expanduser().absolute())
        elif (kept := before.get(name)) is not None:
            environ[variable] = kept
    return environ


def _options(asked: argparse.Namespace) -> Options:
    home = Path.home()
    prefix = _prefix(asked)
    before = recalled(prefix)

    def value(name: str, default: Any = None) -> Any:
        """What a flag says, else what was asked the last time."""
        given = getattr(asked, name)
        return given if given is not None else before.get(name) or default

    url, remote = value("url"), value("remote")
    labels = value("labels", LABELS)
    return Options(
        home=home,
        user=getpass.getuser(),
        prefix=prefix,
        url=None if url is None else url.rstrip("/").removesuffix(".git"),
        remote=remote,
        name=value("name", re.sub(r"[^A-Za-z0-9._-]+", "-", platform.node().partition(".")[0]) or "mac"),
        labels=tuple(filter(None, labels.split(",") if isinstance(labels, str) else labels)),
        service=value("service", "actions" if url else "serve" if remote else "none"),
        token_file=asked.token_file,
        runner_version=value("runner_version", RUNNER_VERSION),
        runner_sha256=value("runner_sha256", RUNNER_SHA256),
        sudo=asked.sudo,
        tailnet=bool(asked.tailnet or before.get("tailnet")),
        source=Path(__file__).resolve().parents[2],
        environ=_environ(before),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kakeya_mac runner",
        description="Set a Mac up as a runner, look at one, or take it down again.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    said = {
        "setup": "bring everything there that is missing (default)",
        "check": "look at everything, change nothing",
        "uninstall": "take back what setup made; models, policy, state and results stay",
    }
    for name, text in said.items():
        command = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=_EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        _add_flags(command)
    return parser


def _add_flags(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--url", metavar="URL", help="repository or organisation on GitHub whose workflows run here")
    add("--remote", metavar="URL", help="git remote that the daemon serves (default: --url)")
    add("--service", choices=SERVICES, help="what launchd keeps running (default: actions with --url)")
    add("--prefix", metavar="DIR", help=f"folder for everything (default: ~/{names.PREFIX})")
    add("--name", metavar="NAME", help="the runner's name (default: the host's)")
    add("--labels", metavar="A,B", help=f"what workflows ask for (default: {','.join(LABELS)})")
    add("--token-file", type=Path, metavar="FILE", help="holds a registration token (or KAKEYA_RUNNER_TOKEN)")
    add(
        "--runner-version",
        metavar="V",
        help=f"of GitHub's runner when it is first installed; it updates itself (default: {RUNNER_VERSION})",
    )
    add("--runner-sha256", metavar="HEX", help="of its osx-arm64 archive")
    add("--sudo", action="store_true", help="do what needs an administrator, with sudo")
    add("--tailnet", action="store_true", help="see to SSH over a tailnet (tailscale), too")
    add("--dry-run", action="store_true", help="say everything that would be done, and do nothing")
    add("--json", action="store_true", help="one JSON line at the end; everything else goes to stderr")

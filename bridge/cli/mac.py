"""``kakeya_mac runner setup | check | uninstall``: `bridge.mac`, which runs before anything is installed."""

from __future__ import annotations

import click

_ANYTHING = {"ignore_unknown_options": True, "help_option_names": []}
_FLAGS = """\b
Flags: --url URL, --remote URL, --service actions|serve|both|none, --prefix DIR, --name NAME, --labels A,B,
--token-file FILE, --runner-version V, --runner-sha256 HEX, --sudo, --tailnet, --dry-run, --json; `--help`
says each.

\b
JSON: command, dry_run, ready, changed, steps [{name, state (done, to do, advice, missing), looked_at,
finding, fix, done, would (of a dry run)}], exit_code.
Exit code: 0 ready; 1 something is missing, each with its fix; 2 the flags cannot be meant."""


@click.command(
    context_settings=_ANYTHING,
    epilog=f"""\b
Examples:
  kakeya_mac runner setup --dry-run --url https://github.com/me/workload
  kakeya_mac runner setup --url https://github.com/me/workload --sudo

{_FLAGS}""",
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def setup(flags: tuple[str, ...]) -> int:
    """Set this Mac up: environment, models, policy, hook and its key, GitHub's runner, services."""
    return _run("setup", flags)


@click.command(
    context_settings=_ANYTHING,
    epilog=f"""\b
Examples:
  kakeya_mac runner check
  kakeya_mac runner check --url https://github.com/me/workload --json

{_FLAGS}""",
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def check(flags: tuple[str, ...]) -> int:
    """Look at everything that `setup` sees to; change nothing."""
    return _run("check", flags)


@click.command(
    context_settings=_ANYTHING,
    epilog=f"""\b
Examples:
  kakeya_mac runner uninstall --sudo

{_FLAGS}""",
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def uninstall(flags: tuple[str, ...]) -> int:
    """Take back what `setup` made, services first; models, policy, state, logs and results stay."""
    return _run("uninstall", flags)


def _run(command: str, flags: tuple[str, ...]) -> int:
    from bridge.mac.edge import main

    return main([command, *flags])

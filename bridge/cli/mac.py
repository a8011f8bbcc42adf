"""``kakeya_mac runner setup | check | uninstall``: `bridge.mac.setup`, which also runs without click."""

from __future__ import annotations

import click

_FLAGS = """\b
Flags: --url URL, --remote URL, --service actions|serve|both|none, --prefix DIR, --name NAME, --labels A,B,
--token-file FILE, --runner-token TOKEN, --runner-version V, --runner-sha256 HEX, --sudo, --tailnet,
--dry-run, --json; `--help` explains each.

\b
JSON: command, dry_run, ready, changed, steps [{name, state (done, to do, advice, missing), looked_at,
finding, fix, done, would (of a dry run)}], exit_code.
Exit code: 0 ready; 1 something is missing, each with its fix; 2 wrong flags."""


def _command(name: str, summary: str, *examples: str) -> click.Command:
    lines = "\n".join(f"  kakeya_mac runner {name} {flags}".rstrip() for flags in examples)

    @click.command(
        name,
        help=summary,
        epilog=f"\b\nExamples:\n{lines}\n\n{_FLAGS}",
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
    )
    @click.argument("flags", nargs=-1, type=click.UNPROCESSED)
    def run(flags: tuple[str, ...]) -> int:
        from bridge.mac.setup import main

        return main([name, *flags])

    return run


_URL = "--url https://github.com/me/workload"
setup = _command(
    "setup",
    "Set this Mac up: environment, models, policy, GitHub's runner, access to the remote, services.",
    f"--dry-run {_URL}",
    f"{_URL} --sudo",
)
check = _command("check", "Look at everything that `setup` sees to; change nothing.", "", f"{_URL} --json")
uninstall = _command(
    "uninstall",
    "Remove what `setup` made, services first; models, policy, state, logs and results stay.",
    "--sudo",
)

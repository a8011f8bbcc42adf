"""``kakeya_mac demo``: the main job end to end on this machine, over a git remote of its own."""

from __future__ import annotations

import time
from pathlib import Path

import click

from bridge import demo as library
from bridge import presets
from bridge.bus.results import pins_keys
from bridge.cli import echo_json
from bridge.cli.options import option_with_default, param_option
from bridge.cli.output import Connection, Presentation, follow
from bridge.client.submit import plan_request, submit_request
from bridge.git.repo import GitRepo
from bridge.render.outcome import FROM_BUS


@click.command(
    epilog="""\b
Examples:
  kakeya_mac demo
  kakeya_mac demo -p prompts=all -p limit=5
  kakeya_mac demo --folder /tmp/demos

The last line is JSON. The demo's folder (remote, workload clone, runner's log) is kept for a look around."""
)
@param_option("A parameter of `throughput`.")
@click.option(
    "--folder", type=click.Path(path_type=Path), metavar="DIR", help="Make the demo's folder below DIR."
)
@option_with_default(
    "--wait", "wait_s", type=click.FloatRange(min=1), default=600.0, help="Give up after seconds."
)
def demo(params: tuple[str, ...], folder: Path | None, wait_s: float) -> int:
    """Show everything once: request, git remote, runner, engine on the shipped pair, gate, result.

    A bare repository and a clone are made in a temporary folder, `kakeya_mac runner serve` is started as a
    process of its own, and the preset `throughput` is asked for through the ordinary client.
    """
    start_s = time.monotonic()
    preset = presets.get("throughput")
    values = presets.parse_cli(preset, params)
    presets.validate(preset, values)  # before anything is made
    site = library.build(folder)
    click.echo(f"demo in {site.folder}: remote.git is the bus, workload a clone of it", err=True)
    config = site.settings
    with library.runner(site) as process:
        click.echo(
            f"started a runner as process {process.pid}: runner serve --name {library.RUNNER_NAME}", err=True
        )
        git = GitRepo(site.workload)
        plan = plan_request(config, git, preset="throughput", params=values)
        submission = submit_request(config, plan, git)
        click.echo(f"submitted {submission.nonce}: {' '.join(plan.argv)}", err=True)
        how = Presentation(
            as_json=False,
            allow_unsigned=not pins_keys(config.trusted_runners),  # there is no ssh-keygen to make a key
            expected=submission.expected,
        )
        code = follow(Connection(config, git, submission.remote), submission.nonce, how, wait_s=wait_s)
    document = how.document | {
        "remote": str(site.remote),
        "workload": str(site.workload),
        "runner_log": str(site.log),
        "seconds": round(time.monotonic() - start_s, 1),
        "exit_code": code,
    }
    if code != 0:
        click.echo(f"the runner's log is {site.log}", err=True)
    else:
        click.echo(f"  look     git -C {site.remote} show --stat {document['result_commit']}")
    echo_json(document, untrusted=FROM_BUS)
    return code

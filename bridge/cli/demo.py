"""``kakeya_mac demo``: folders for the main job on one machine; client and runner are the ordinary ones."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

from bridge import presets, settings
from bridge.cli import show
from bridge.cli.options import param_option, path_option, seconds_option
from bridge.cli.output import Connection, Presentation, follow
from bridge.client.submit import plan_request, submit_request
from bridge.errors import MachineError
from bridge.git.repo import GitRepo, RefUpdate
from bridge.proc import ChildProcess, spawn, write_atomic
from bridge.render.outcome import FROM_BUS
from bridge.runner import models
from bridge.runner.config import open_config
from bridge.runner.policy import FILE_NAME
from bridge.signing import trust

RUNNER_NAME = "demo-mac"


@click.command(
    epilog="""\b
Examples:
  kakeya_mac demo
  kakeya_mac demo -p prompts=all -p limit=5
  kakeya_mac demo --folder /tmp/demos

The last line is JSON. The demo's folder (remote, workload clone, runner's log) is kept for a look around."""
)
@param_option("A parameter of `throughput`.")
@path_option("--folder", text="Make the demo's folder below DIR.")
@seconds_option("--wait", "wait_s", bounds=(1, None), default=600.0, show_default=True, text="Give up after.")
def demo(params: tuple[str, ...], folder: Path | None, wait_s: float) -> int:
    """Show everything once: request, git remote, runner, engine on the shipped pair, gate, result.

    A bare repository and a clone are made in a temporary folder, `kakeya_mac runner serve` is started, and
    the preset `throughput` is asked for through the ordinary client.
    """
    start_s = time.monotonic()
    preset = presets.get("throughput")
    values = presets.parse_cli(preset, params)
    presets.validate(preset, values)  # before anything is made
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        site = Path(tempfile.mkdtemp(prefix="kakeya-demo-", dir=folder)).resolve()
    except OSError as error:
        raise MachineError(f"cannot make a folder for the demo: {error.strerror or error}") from None
    remote, workload, log = site / "remote.git", site / "workload", site / "runner.log"
    config = _build(site, remote, workload)
    click.echo(f"demo in {site}: remote.git is the bus, workload a clone of it", err=True)
    with _runner(config, remote, log) as process:
        click.echo(f"started a runner as process {process.pid}: runner serve --name {RUNNER_NAME}", err=True)
        git = GitRepo(workload)
        plan = plan_request(config, git, preset=preset, params=values)
        submission = submit_request(config, plan, git)
        click.echo(f"submitted {plan.manifest.nonce}: {' '.join(plan.argv)}", err=True)
        how = Presentation(as_json=False, expected=submission.expected)
        code = follow(Connection(config, git, submission.remote), plan.manifest.nonce, how, wait_s=wait_s)
    document = how.document | {
        "remote": str(remote),
        "workload": str(workload),
        "runner_log": str(log),
        "seconds": round(time.monotonic() - start_s, 1),
        "exit_code": code,
    }
    if code != 0:
        click.echo(f"the runner's log is {log}", err=True)
    else:
        click.echo(f"  look     git -C {remote} show --stat {document['result_commit']}")
    return show(True, document, untrusted=FROM_BUS)


def _build(folder: Path, remote: Path, workload: Path) -> settings.Settings:
    """Make the remote, a clone of it, and the settings of a client that trusts the runner's key."""
    outside, state, config_dir = GitRepo(folder), folder / "state", folder / "config"
    outside.run("init", "--quiet", "--bare", "--initial-branch=main", str(remote))
    with GitRepo(remote).scratch() as scratch:
        first = scratch.commit_files(None, {"README.md": b"# A workload\n"}, "a workload\n")
        scratch.push(str(remote), [RefUpdate("refs/heads/main", first, "")])
    outside.run("clone", "--quiet", str(remote), str(workload))
    write_policy(config_dir)
    key = open_config(RUNNER_NAME, str(remote), state_dir=state, config_dir=config_dir).public_key
    # The developer's own key is not asked for a demonstration; without ssh-keygen there is none to trust.
    own = {"remote": str(remote), "signing_key": "none", "allow_unsigned": key is None}
    config = settings.load().model_copy(update=own | {"state_dir": state, "config_dir": config_dir})
    if key is not None:
        trust.pin(config.trusted_runners, RUNNER_NAME, key)
    return config


def write_policy(config_dir: Path) -> None:
    """Name the shipped models, in the owner's policy, for every model that a preset lets them replace."""
    lines = ["# Written by the demo: its models are the shipped ones.", "[models]"]
    needs = [item for preset in presets.load_all().values() for item in preset.models.items()]
    for name, need in dict(needs).items():
        folder = models.shipped(need.stand_in) if need.stand_in else None
        if folder is not None and folder.is_dir():
            lines.append(f"{name} = {json.dumps(str(folder), ensure_ascii=False)}")
    config_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomic(config_dir / FILE_NAME, "\n".join([*lines, ""]).encode())


@contextlib.contextmanager
def _runner(config: settings.Settings, remote: Path, log: Path) -> Iterator[ChildProcess]:
    """`kakeya_mac runner serve` on the demo's remote; stopped at the end."""
    own = {"KAKEYA_STATE": str(config.state_dir), "KAKEYA_CONFIG": str(config.config_dir)}
    command = [sys.executable, "-I", "-m", "bridge", "runner", "serve"]
    command += ["--remote", str(remote), "--name", RUNNER_NAME]
    with log.open("ab") as output:
        process = spawn(command, env={**os.environ, **own}, cwd=log.parent, output=output.fileno())
        try:
            yield process
        finally:
            for patience_s in (2, 20):  # a second SIGTERM stops the running job instead of waiting for it
                os.kill(process.pid, signal.SIGTERM)
                if process.wait(patience_s) is not None:
                    break
            process.kill()

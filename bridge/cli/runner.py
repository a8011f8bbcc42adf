"""``kakeya_mac runner``: the Mac's side, a daemon (`serve`) or a workflow (`execute`, `publish`)."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Lock
from typing import Any

import click

from bridge import settings
from bridge.cli import on_signals, options, show
from bridge.cli.control import drain, status, stop
from bridge.cli.models import models
from bridge.cli.peers import peers
from bridge.cli.policy import policy
from bridge.cli.signers import signers
from bridge.client.remotes import resolve_remote
from bridge.errors import SignatureError
from bridge.git.cache import GitCache
from bridge.git.repo import GitRepo
from bridge.github import execute as execution
from bridge.github.publish import Delivery, WorkflowPublisher
from bridge.github.workflow import WorkflowFormatter, WorkflowRun, annotation, read_workflow_run
from bridge.log import configure
from bridge.mac.setup import main as run_setup
from bridge.protocol.result import RESULT_SIGNATURE_NAME, Verdict
from bridge.render.evidence import MOST_CHARACTERS, shortened, summary
from bridge.runner.config import (
    RunnerConfig,
    attestation_key_path,
    checked_name,
    ensure_key,
    host_name,
    key_path,
    open_config,
    renew_key,
)
from bridge.runner.daemon import Daemon
from bridge.settings import Settings
from bridge.signing import dsse, ssh

log = logging.getLogger(__name__)


@click.group(
    commands=[status, drain, stop, policy, models, signers, peers],
    epilog="""\b
Examples:
  kakeya_mac runner serve --remote git@example.org:you/workload.git --name studio
  kakeya_mac runner status
  kakeya_mac runner policy init
  kakeya_mac runner signers add alice --key alice.pub""",
)
def runner() -> None:
    """Commands for the machine that does the work."""


_SETUP_EPILOG = """\b
Examples:
  kakeya_mac runner {name} --url https://github.com/me/workload {example}

Flags: --url URL, --remote URL, --service actions|serve|both|none, --prefix DIR, --name NAME, --labels A,B,
--token-file FILE, --runner-token TOKEN, --runner-version V, --runner-sha256 HEX, --sudo, --tailnet,
--dry-run, --json; `--help` explains each. A --url of github.com or ghe.com installs GitHub's runner, one of
another server the daemon.

JSON: command, dry_run, ready, changed, steps [{{name, state (done, to do, advice, missing), looked_at,
finding, fix, done, would (of a dry run)}}], exit_code.

Exit code: 0 ready; 1 something is missing, each with its fix; 2 wrong flags."""


def _add_setup_command(name: str, example: str, summary: str) -> None:
    """Add a command of `bridge.mac.setup`, which has its own flags because it also runs without click."""
    epilog = _SETUP_EPILOG.format(name=name, example=example)
    context = {"ignore_unknown_options": True, "help_option_names": list[str]()}

    @runner.command(name, help=summary, epilog=epilog, context_settings=context)
    @click.argument("flags", nargs=-1, type=click.UNPROCESSED)
    def run(flags: tuple[str, ...]) -> int:
        return run_setup([name, *flags])


_add_setup_command("setup", "--dry-run", "Set this Mac up: environment, models, policy, runner, services.")
_add_setup_command("check", "--json", "Look at everything that `setup` sees to; change nothing.")
_add_setup_command("uninstall", "--sudo", "Remove what `setup` made; models, policy, state and logs stay.")


@runner.command(
    epilog="""\b
Examples:
  kakeya_mac runner serve --remote git@example.org:you/workload.git --name studio
  kakeya_mac runner serve --once --idle-timeout 60

SIGTERM, Ctrl-C or `runner stop`: finish the running job, then stop; a second signal stops the job, too. What
this machine allows is in policy.toml of the configuration folder; the default runs no code of a repository.

A heartbeat comes every 2 s on a local remote, 15 s on a server and 60 s on public hosts such as github.com,
and at least three times in a lease, which is 120 s, on public hosts 300 s."""
)
@options.remote_option
@click.option("--name", metavar="NAME", help="The runner's name in claims and results (default: the host's).")
@click.option("--once", is_flag=True, help="Answer one request, then stop.")
@options.seconds_option("--idle-timeout", bounds=(0, None), text="With --once: give up after waiting.")
@options.seconds_option(
    "--idle", "idle_s", bounds=(0.1, 3600), text="Longest pause between looks (default: 5)."
)
@options.seconds_option(
    "--lease",
    "lease_s",
    bounds=(2, 900),
    text="Others may take the request of a runner that is silent so long.",
)
@options.seconds_option("--beat", "beat_s", bounds=(0.2, 300), text="Pause between heartbeats.")
@click.option(
    "--jobs", type=click.IntRange(1), default=1, metavar="N", help="One job runs at a time all the same."
)
@options.option_with_default("--prune/--no-prune", default=True, help="Archive old results between jobs.")
def serve(
    remote: str | None,
    name: str | None,
    once: bool,
    idle_timeout: float | None,
    idle_s: float | None,
    lease_s: float | None,
    beat_s: float | None,
    jobs: int,
    prune: bool,
) -> int:
    """Take requests from the remote, run the allowed ones, one at a time, and publish signed results.

    With --once: exit code 0 when a request was answered, 4 when none came within --idle-timeout.
    """
    if idle_timeout is not None and not once:
        raise click.UsageError("--idle-timeout needs --once: without it the runner serves until stopped.")
    own = settings.load(remote=remote)
    bus = resolve_remote(GitRepo(Path.cwd()), own.remote)
    config = open_config(
        name or host_name(),
        bus.address,
        state_dir=own.state_dir,
        config_dir=own.config_dir,
        beat_s=beat_s,
        lease_s=lease_s,
    )
    if config.policy.attestations:
        config.require_attestation_key()
    longest = config.timing.lease_s / 3  # so many heartbeats may be late before others take the request over
    if beat_s is not None and beat_s > longest:
        lease = f"a lease of {config.timing.lease_s:g} s"
        raise click.UsageError(
            f"--beat {beat_s:g} is too slow for {lease}; give at most --beat {longest:.3g}"
        )
    timing = dataclasses.replace(config.timing, heartbeat_s=min(config.timing.heartbeat_s, longest))
    config = dataclasses.replace(config, timing=timing)
    configure(stream=sys.stdout)
    if jobs > 1:
        log.warning("--jobs %d: runners with their state in %s run one job at a time", jobs, own.state_dir)
    tempfile.tempdir = str(config.temporary)  # made, and cleared of what a killed process left, by `serve`
    log.info("serving %s as %s; %s", bus.shown, config.identity.name, config.rulebook.summary())
    _log_key(config)
    daemon = Daemon(config, idle_s=idle_s, prunes=prune)
    told = Event()
    with _draining(daemon, told):
        answered = daemon.serve(once=once, stop=told, idle_timeout_s=idle_timeout)
    log.info("stopped after %d request(s)", answered)
    return 4 if once and not answered and not told.is_set() else 0


@contextlib.contextmanager
def _draining(daemon: Daemon, stop: Event) -> Iterator[None]:
    """The first SIGTERM or SIGINT drains, the second stops the job."""
    one_at_a_time = Lock()

    def heed() -> None:
        with one_at_a_time:
            if stop.is_set():
                daemon.abort()
            else:
                log.info("stopping after the running job; once more to stop it now")
                stop.set()

    with on_signals(heed):
        yield


_WHICH = """Without flags the request is the one of the workflow run: KAKEYA_REQUEST_COMMIT and
KAKEYA_REQUEST_BRANCH (a dispatched run sets them), else GITHUB_SHA and GITHUB_REF. The remote is
KAKEYA_REMOTE, else the run's repository, with the token in KAKEYA_GITHUB_TOKEN."""


def _request_options(function: options.Function) -> options.Function:
    """The options that name the request; the command gets them as `run`, and the settings as `own`."""

    @functools.wraps(function)
    def started(*, commit: str | None, branch: str | None, remote: str | None, **given: Any) -> Any:
        configure(stream=sys.stdout, formatter=WorkflowFormatter())
        run = read_workflow_run(os.environ, commit=commit, branch=branch, remote=remote)
        return function(run=run, own=settings.load(remote=run.remote), **given)

    decorated = options.json_option(options.remote_option(started))
    decorated = click.option("--branch", metavar="REF", help="The branch it was pushed to.")(decorated)
    return click.option("--commit", metavar="SHA", help="The request commit.")(decorated)


@runner.command(
    epilog=f"""\b
Examples:
  kakeya_mac runner execute --out "$RUNNER_TEMP/result"
  kakeya_mac runner execute --out out --commit SHA --branch mac-bridge/probe-20260301t120000z0123456789ab

{_WHICH}

\b
Step outputs and JSON: nonce, status, reason, digest (of the folder), signature (base64 of result.json.sig).
All but nonce are empty for a request that is left to a runner's daemon.

Exit code: 0 when a result is in DIR, whatever it says, or the request is left alone; else there is no result.
SIGINT or SIGTERM ends the job and writes a result that says cancelled. Shortly before KAKEYA_RUN_MINUTES, the
time limit of the workflow job, it ends as failed/timeout, or as lost/no_runner if it was not started."""
)
@options.path_option("--out", required=True, text="Where the result is written; must be empty or not exist.")
@_request_options
@click.option("--name", metavar="NAME", help="The runner's name in results (default: the host's, -actions).")
def execute(run: WorkflowRun, own: Settings, out: Path, as_json: bool, name: str | None) -> int:
    """In a workflow, on the Mac: run one request by this machine's policy and write its result into DIR."""
    config = open_config(
        name or execution.runner_name(), run.remote, state_dir=own.state_dir, config_dir=own.config_dir
    )
    if config.policy.attestations:
        config.require_attestation_key()
    runner, request, policy = config.identity.name, run.request, config.rulebook.summary()
    log.info("request %s on %s, for %s; %s", request.nonce, request.branch, runner, policy)
    _log_key(config)
    tempfile.tempdir = str(config.temporary)  # created, and emptied after a killed run, by the executor
    told = Event()
    with on_signals(told.set):  # GitHub sends SIGINT, and soon after SIGTERM
        executor = execution.WorkflowExecutor(config, click.echo, told, limit_s=run.limit_s)
        done = executor.execute(request, out, attempt=run.attempt)
    signature = b"" if done is None else done.files.get(RESULT_SIGNATURE_NAME, b"")
    outputs = _outputs(request.nonce, None if done is None else done.verdict) | {
        "digest": "" if done is None else done.digest,
        "signature": base64.b64encode(signature).decode("ascii"),
    }
    run.write_outputs(outputs)
    return show(as_json, {**outputs, "output": str(out), "exit_code": 0})


@runner.command(
    epilog=f"""\b
Examples:
  kakeya_mac runner publish --results result --digest "$DIGEST" --run-result "$RUN_RESULT"

{_WHICH}

\b
Step outputs and JSON: nonce, status, reason, verdict (status/reason), result_commit, result_ref, published.
All but nonce are empty for a request that is left to a runner's daemon.

\b
How a run without a result ended is asked of the API (GITHUB_API_URL, or KAKEYA_GITHUB_API): no machine for
24 h, the time limit KAKEYA_RUN_MINUTES, cancelled, or lost. Without an answer --run-result decides.

Exit code: that of the request's status; 0 when it is left alone; 6 when the result could not be published."""
)
@options.path_option(
    "--results", required=True, text="Where the run's artifact was unpacked; need not exist."
)
@click.option("--digest", default="", metavar="HEX", help="What the run gave as its result's digest.")
@click.option(
    "--run-result",
    type=click.Choice(["success", "failure", "cancelled", "skipped", ""]),
    help="How the run's job ended.",
)
@_request_options
def publish(
    run: WorkflowRun, own: Settings, results: Path, digest: str, run_result: str | None, as_json: bool
) -> int:
    """In a workflow, where a token may write: check what the run wrote, judge it again, commit it."""
    cache = GitCache(own.state_dir / "publisher.git", run.remote)
    publisher = WorkflowPublisher(cache, trusted=own.trusted_runners, github=run.api(os.environ))
    delivery = Delivery(
        results, digest.strip(), run_result or None, run.run_id, run.run_url, run.attempt, run.limit_s
    )
    outcome = publisher.publish(run.request, delivery)
    judged = outcome.judged
    verdict = None if judged is None else judged.verdict
    outputs = _outputs(outcome.nonce, verdict) | {
        "verdict": "" if verdict is None else f"{verdict.status}/{verdict.reason}",
        "result_commit": "" if judged is None else judged.believed.commit,
        "result_ref": "" if judged is None else judged.believed.ref,
        "published": "true" if outcome.is_news else "false",
    }
    run.write_outputs(outputs)
    run.write_summary(shortened(summary(outcome.nonce, judged), MOST_CHARACTERS))
    level = "notice" if outcome.exit_code == 0 else "error"
    message = "for a runner's daemon" if verdict is None else verdict.message
    click.echo(annotation(level, outputs["verdict"] or "left alone", f"{outcome.nonce} {message}"))
    document = {**outputs, "message": verdict.message if verdict else "", "exit_code": outcome.exit_code}
    return show(as_json, document, untrusted=("message",))


@runner.command(
    epilog="""\b
Examples:
  kakeya_mac runner key
  kakeya_mac runner key --make --name studio
  kakeya_mac runner key --renew --name studio
  kakeya_mac runner key --attestation --make --name studio
  kakeya_mac runner key --attestation --name studio > studio.pem

Nothing is written without --make or --renew; `serve` makes the key of results, never that of attestations.
--renew deletes the old key; a serving runner signs with the new one from then on. Give the printed commands,
or the new PEM file, to everyone who trusts the old one. Exit code 2: there is no key yet."""
)
@click.option("--name", metavar="NAME", help="The runner's name (default: the host's).")
@click.option("--make", "make_one", is_flag=True, help="Make the key, unless it is there already.")
@click.option("--renew", is_flag=True, help="Make a new key in the place of the old one, for good.")
@click.option("--attestation", is_flag=True, help="The key that signs attestations; shown as PEM.")
@options.json_option
def key(name: str | None, make_one: bool, renew: bool, attestation: bool, as_json: bool) -> int:
    """Show the key with which this runner signs, and the commands that make others believe it.

    With --attestation, the public key with which others verify its attestations.
    """
    own_name, state = checked_name(name or host_name()), settings.load().state_dir
    which = " --attestation" if attestation else ""
    path = (attestation_key_path if attestation else key_path)(state, own_name)
    is_there = path.is_file()
    if not is_there and (renew or not make_one):
        what = "attestation key" if attestation else "key"
        remedy = f"make one: kakeya_mac runner key{which} --make --name {own_name}"
        raise SignatureError(f"the runner {own_name} has no {what}: {path} does not exist", remedy)
    if attestation:
        return _show_attestation_key(own_name, path, make_one=not is_there, renew=renew, as_json=as_json)
    replaced = None
    if renew:
        replaced = ssh.public_half(path).fingerprint
        renew_key(state, own_name)
    elif not is_there:
        ensure_key(state, own_name)
    public = ssh.public_half(path)
    line = f"{public.line} {public.comment}".strip()
    document = {
        "name": own_name,
        "key": public.line,
        "fingerprint": public.fingerprint,
        "clients": f"kakeya_mac runners trust {own_name} --key '{line}'",
        "macs": f"kakeya_mac runner peers add {own_name} --key '{line}'",
        "replaced": replaced,
        "exit_code": 0,
    }
    lines = [f"{own_name}  {public.fingerprint}", "clients and other Macs know it with"]
    lines += [f"  {document['clients']}", f"  {document['macs']}"]
    if replaced is not None:
        lines.append("and no longer know the old one with")
        lines.append(f"  kakeya_mac runners revoke {own_name} --key {replaced}")
    return show(as_json, document, lines)


def _show_attestation_key(name: str, path: Path, *, make_one: bool, renew: bool, as_json: bool) -> int:
    """Show the public half as PEM and nothing else, so that standard output can go into a file."""
    old = None if make_one else dsse.load_key(path)
    if make_one or renew:
        dsse.make_key(path)
    signer = dsse.load_key(path)
    assert signer is not None  # noqa: S101 - it was there, or has just been made
    public = signer.public_key
    pem = dsse.public_pem(public).decode()
    document = {
        "name": name,
        "key": pem,
        "fingerprint": public.keyid,
        "replaced": old.public_key.keyid if renew and old is not None else None,
        "exit_code": 0,
    }
    return show(as_json, document, [pem.rstrip()])


def _outputs(nonce: str, verdict: Verdict | None) -> dict[str, str]:
    status, reason = ("", "") if verdict is None else (verdict.status.value, verdict.reason.value)
    return {"nonce": nonce, "status": status, "reason": reason}


def _log_key(config: RunnerConfig) -> None:
    """Log how clients come to trust the results of a runner that starts."""
    name, own = config.identity.name, config.public_key
    if own is None:
        log.warning("results are unsigned: ssh-keygen is not installed")
    else:
        log.info("clients trust this runner with: kakeya_mac runners trust %s --key '%s'", name, own)

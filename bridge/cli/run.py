"""``kakeya_mac run``: submit a request; with ``--wait``, follow it to its result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from bridge import presets, settings
from bridge.bus.registry import PLACES
from bridge.bus.requests import OWN_REFS, RequestState, state_of
from bridge.cli import show, warn
from bridge.cli.options import RequestOptions, json_option, param_option, remote_option, submit_options
from bridge.cli.output import Connection, Presentation, api_or_none, follow
from bridge.client.runners import Availability, check_availability, read_runners
from bridge.client.submit import Plan, Submission, plan_request, submit_request, warn_of_changes
from bridge.errors import BridgeError
from bridge.git.repo import GitRepo
from bridge.github.dispatch import RequestRef, RunWatcher
from bridge.protocol.refs import is_local
from bridge.protocol.sanitize import clean_line
from bridge.render.outcome import waiting_line
from bridge.settings import Settings

# The registrations are a hint, so nothing waits long for them.
_REGISTRY_TIMEOUT_S = 5.0


@click.command(
    epilog="""\b
Examples:
  kakeya_mac run --preset probe --wait
  kakeya_mac run --preset throughput -p prompts=code -p limit=4 --wait 600 -o out/
  kakeya_mac run --preset tests -p path=tests/unit --ref my-branch --json
  kakeya_mac run --preset throughput --on 'chip=M4*,memory>=64,label=lab' --wait
  kakeya_mac run --preset throughput --dry-run
  kakeya_mac run --preset probe --transport actions --wait

Conditions of --on: NAME=VALUE, NAME!=VALUE, and >= or <= for cores and memory (GB); all must be met. NAME is
chip, cores, label, machine, memory, metal, os, runner or system; * in a VALUE is any text. A runner that does
not meet them leaves the request alone, and it expires if none does.

Exit codes with --wait: 0 passed, 1 failed, 2 refused, 3 evidence rejected, 4 the wait timed out (the job goes
on), 5 cancelled or lost, 6 git or the network failed, 7 passed, but no key that is trusted here signed it
(`kakeya_mac runners trust --first`, or --allow-unsigned)."""
)
@click.option("--preset", required=True, metavar="NAME", help="What to run; see `kakeya_mac presets`.")
@param_option("A parameter; repeatable.")
@click.option(
    "--ref", default="HEAD", show_default=True, metavar="REV", help="The workload: branch, tag or commit."
)
@remote_option
@submit_options
@json_option
def run(
    preset: str, params: tuple[str, ...], ref: str, remote: str | None, options: RequestOptions, as_json: bool
) -> int:
    """Run one preset for one commit of this checkout.

    The request is a commit of its own on top of REV, pushed to a branch of its own. Work tree, index and
    current branch are not touched, and uncommitted changes are not part of it.
    """
    config = settings.load(remote=remote, signing_key=options.signing_key, transport=options.transport)
    known = presets.get(preset, config.presets)
    left_out = presets.left_out(known, params, preset)
    warn(f"{name} has no counterpart in {known.name} and is left out" for name in left_out)
    values = presets.parse_cli(known, params, preset)
    with GitRepo(Path.cwd()).scratch() as git:
        plan = plan_request(
            config,
            git,
            preset=preset,
            params=values,
            ref=ref,
            expires=options.lifetime,
            timeout_s=options.timeout_s,
            on=options.on or None,
        )
        check_tree = ref == "HEAD"
        if options.dry_run:
            return show_plan(plan, git, check_tree=check_tree, as_json=as_json)
        return submit_and_follow(config, git, plan, options, check_tree=check_tree, as_json=as_json)


def show_plan(
    plan: Plan, git: GitRepo, *, check_tree: bool, as_json: bool, extra: dict[str, Any] | None = None
) -> int:
    """Show what a dry run shows: the manifest, where it would go and what would run."""
    manifest = json.loads(plan.manifest.to_bytes())
    warnings = [*plan.warnings, *(warn_of_changes(git) if check_tree else [])]
    document = {
        **(extra or {}),
        "status": "dry-run",
        "exit_code": 0,
        "manifest": manifest,
        "argv": list(plan.argv),
        "remote": plan.remote.shown,
        "transport": plan.route.transport,
        "transport_why": plan.route.why,
        "starts_by": plan.route.start,
        "warnings": warnings,
    }
    lines = [
        json.dumps(manifest, indent=2, sort_keys=True),
        f"\nwould push to  {plan.remote.shown}",
        f"transport      {_transport(plan)}",
        f"would run      {' '.join(plan.argv)}",
    ]
    warn(() if as_json else warnings)
    # `again` repeats what others asked
    return show(as_json, document, lines, untrusted=("manifest", "argv", "warnings"))


def submit_and_follow(
    config: Settings,
    git: GitRepo,
    plan: Plan,
    options: RequestOptions,
    *,
    check_tree: bool,
    as_json: bool,
    extra: dict[str, Any] | None = None,
) -> int:
    """Push a planned request, say which runners can take it, and with ``--wait`` follow it.

    `check_tree` warns of uncommitted changes, which do not travel; `extra` are more keys for the JSON line.
    """
    if not is_local(plan.remote.address):
        click.echo(f"pushing the request to {plan.remote.shown}", err=True)
    if plan.route.transport == "actions":
        click.echo(f"over {_transport(plan)}", err=True)
    submission = submit_request(config, plan, git)
    warnings = [*submission.warnings, *(warn_of_changes(git) if check_tree else [])]
    warn(warnings)
    state, runners, more = _find_runners(config, git, submission)
    warn(more)
    document = {
        **(extra or {}),
        "runners": None if runners is None else runners.to_json(),
        "ahead": None if state is None else state.ahead,
        "warnings": [*warnings, *more],
        "nonce": submission.nonce,
        "ref": submission.ref,
        "request_commit": submission.commit,
        "workload_sha": submission.manifest.workload_sha,
        "preset": submission.manifest.preset,
        "remote": submission.remote.shown,
        "transport": submission.manifest.transport,
        "run_id": submission.run_id,
        "signed": submission.signed,
        "signed_with": submission.signed_with,
    }
    if options.wait_s is None:
        document |= {"status": "queued", "exit_code": 0}
        return show(as_json, document, _lines(submission, state, runners), untrusted=("runners",))
    click.echo(f"submitted {submission.nonce} to {submission.remote.shown}", err=True)
    if runners is not None and runners.able:
        click.echo(runners.sentence, err=True)
    watcher = None
    if submission.manifest.transport == "actions":
        request = RequestRef(submission.nonce, submission.ref, submission.commit, submission.run_id)
        watcher = RunWatcher(api_or_none(submission.remote), request)
    how = Presentation(as_json, options.output, options.allow_unsigned, document, submission.expected)
    link = Connection(config, git, submission.remote)
    return follow(link, submission.nonce, how, wait_s=options.wait_s, state=state, watcher=watcher)


def _find_runners(
    config: Settings, git: GitRepo, submission: Submission
) -> tuple[RequestState | None, Availability | None, list[str]]:
    """The request among the others, which runners can take it, and warnings; None: not known."""
    state, remote = None, submission.remote
    try:
        prefixes = (*OWN_REFS, *PLACES, submission.ref)
        found = git.list_refs(remote.address, *prefixes, timeout_s=_REGISTRY_TIMEOUT_S)
        state = state_of(found, submission.nonce)
        registry = read_runners(config, git, remote, found=found, timeout_s=_REGISTRY_TIMEOUT_S)
    except BridgeError as error:  # only a hint
        return state, None, [f"cannot tell which runners are there: {error.message}"]
    runners = check_availability(
        registry,
        submission.manifest,
        signed=submission.signed,
        settings=config,
        now=datetime.now(UTC),
        ahead=state.ahead,
    )
    return state, runners, list(runners.warnings)


def _lines(submission: Submission, state: RequestState | None, runners: Availability | None) -> Iterator[str]:
    yield f"queued  {submission.nonce}"
    yield f"  {submission.ref} at {submission.commit[:12]}"
    if submission.signed_with is not None:
        yield f"  signed with {clean_line(submission.signed_with)}"
    if runners is not None and runners.able:
        yield f"  {runners.sentence}"
    expected_s = None if runners is None else runners.expected_s
    if line := waiting_line(None if state is None else state.ahead, expected_s):
        yield f"  {line}"
    yield f"  follow it: kakeya_mac wait {submission.nonce}"


def _transport(plan: Plan) -> str:
    by = {"daemon": "", "push": ", started by the push", "dispatch": ", started by a dispatch"}
    name = "GitHub Actions" if plan.route.transport == "actions" else plan.route.transport
    return f"{name}{by[plan.route.start]}: {plan.route.why}"

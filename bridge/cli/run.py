"""``kakeya_mac run``: submit a request; with ``--wait``, follow it to its result."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from bridge import presets, signing
from bridge.bus.registry import PLACES
from bridge.bus.requests import OWN_REFS, RequestState, state_of
from bridge.cli import show, warn
from bridge.cli.completion import complete_preset
from bridge.cli.options import RequestOptions, submit_options
from bridge.cli.output import (
    REGISTRY_TIMEOUT_S,
    Connection,
    OpenRequest,
    Presentation,
    follow,
    open_document,
)
from bridge.client.recent import remember
from bridge.client.runners import Availability, check_availability, read_runners
from bridge.client.signing_key import choose
from bridge.client.submit import Plan, Submission, find_preset, plan_request, submit_request, warn_of_changes
from bridge.client.watch import Update
from bridge.errors import BridgeError, NoRunner
from bridge.git.repo import GitRepo
from bridge.github.dispatch import RequestRef
from bridge.protocol.result import Phase
from bridge.protocol.sanitize import clean_line
from bridge.render.outcome import not_measured, waiting_text
from bridge.settings import Settings


@click.command(
    epilog="""\b
Examples:
  kakeya_mac run --preset probe --wait
  kakeya_mac run --preset throughput -p prompts=code -p limit=4 --wait 600 -o out/
  kakeya_mac run --preset tests -p path=tests/unit --ref my-branch --json
  kakeya_mac run --preset throughput --on 'chip=M4*,memory>=64,label=lab' --wait
  kakeya_mac run --preset probe --transport actions --dry-run
  kakeya_mac run --preset tests -p path=tests/bench --against origin/main --wait
  kakeya_mac run --preset throughput -p block=8 --against-params block=4 --wait

Conditions of --on: NAME=VALUE, NAME!=VALUE, and >= or <= for cores and memory (GB); all must be met. NAME is
chip, cores, label, machine, memory, metal, os, runner or system; * in a VALUE is any text. A runner that does
not meet them leaves the request alone, and it expires if none does.

A preset that is not installed here is looked for among those that live runners publish (`kakeya_mac presets
--remote`), and its parameters are checked by what is published.

Exit codes with --wait: those of the request, see `kakeya_mac --help`; 0 when it is pushed, without --wait;
9 with --require-runner when no live runner would take it, and nothing was pushed."""
)
@click.option(
    "--preset",
    required=True,
    metavar="NAME",
    help="What to run; see `kakeya_mac presets`.",
    shell_complete=complete_preset,
)
@click.option("--against", metavar="REV", help="Paired run: take turns with this commit, and compare.")
@click.option(
    "--against-params",
    multiple=True,
    metavar="KEY=VALUE",
    help="Paired run: take turns with other parameters; repeatable.",
)
@submit_options
def run(preset: str, against: str | None, against_params: tuple[str, ...], options: RequestOptions) -> int:
    """Run one preset for one commit of this checkout.

    The request is a commit of its own on top of REV, pushed to a branch of its own. Work tree, index and
    current branch are not touched, and uncommitted changes are not part of it.

    A paired run (--against, --against-params) has both sides in one job on one machine, by turns, and says
    which is faster, by how much, and the smallest difference that it could have seen.
    """
    config = options.settings()
    known = find_preset(config, GitRepo(Path.cwd()), preset)
    if not known.argv:
        click.echo(f"{known.name} is not installed here: its runner's own parameters are checked", err=True)
    left_out = presets.left_out(known, options.params, preset)
    warn(f"{name} has no counterpart in {known.name} and is left out" for name in left_out)
    params = presets.parse_cli(known, options.params, preset)
    asked = options.asked() | {"ref": options.ref or "HEAD", "on": options.on or None, "against": against}
    if against_params:
        asked["against_params"] = presets.parse_cli(known, against_params, preset)
    with GitRepo(Path.cwd()).scratch() as git:
        plan = plan_request(config, git, preset=known, params=params, **asked)
        return submit_and_follow(config, git, plan, options)


def submit_and_follow(
    config: Settings, git: GitRepo, plan: Plan, options: RequestOptions, *, again_of: str | None = None
) -> int:
    """Push a planned request, say which runners can take it, and follow it with ``--wait``; or a dry run."""
    is_head = options.ref == "HEAD" or (options.ref is None and again_of is None)
    changes = warn_of_changes(git) if is_head else []
    document: dict[str, Any] = {"again_of": again_of} if again_of else {}
    if options.require_runner:
        _require_runner(config, git, plan)
    if options.dry_run:
        document |= {
            "status": "dry-run",
            "exit_code": 0,
            "manifest": json.loads(plan.manifest.to_bytes()),
            "argv": list(plan.argv),
            "remote": plan.remote.shown,
            "transport": plan.route.transport,
            "transport_why": plan.route.why,
            "starts_by": plan.route.start,
            "warnings": [*plan.route.warnings, *changes],
        }
        lines = [json.dumps(document, indent=2, sort_keys=True)]
        # `again` repeats what others asked
        return show(options.as_json, document, lines, untrusted=("manifest", "argv", "warnings"))
    # Before the push: whatever ends this program now, the caller knows what to look for.
    click.echo(f"pushing request {plan.manifest.nonce} to {plan.remote.shown}", err=True)
    if plan.route.transport == "actions":
        click.echo(f"over GitHub Actions: {plan.route.why}", err=True)
    submission = submit_request(config, plan, git)
    asked = submission.manifest
    remember(config.state_dir, [(asked.nonce, asked.preset)])
    warnings = [*submission.warnings, *changes]
    warn(warnings)
    state, runners, hints = _find_runners(config, git, submission)
    warn(hints)
    update = Update(Phase.QUEUED, state.ahead if state else None)
    known = OpenRequest(asked, typical_s=runners.typical_s if runners else None)
    document |= open_document(config, asked.nonce, asked.preset, update, known)
    document |= {
        "runners": runners and runners.to_json(),
        "warnings": [*warnings, *hints],
        "ref": asked.result_ref,
        "request_commit": submission.commit,
        "workload_sha": asked.workload_sha,
        "remote": submission.remote.shown,
        "transport": asked.transport,
        "run_id": submission.run_id,
        "signed": submission.signed_with is not None,
        "signed_with": submission.signed_with,
    }
    lines = [f"queued  {asked.nonce} on {submission.remote.shown}"]
    if submission.signed_with is not None:
        lines.append(f"  signed with {clean_line(submission.signed_with)}")
    if document["commit_measured"] is False:
        lines.append(f"  {not_measured(asked.preset, 'is')}")
    if runners is not None and runners.able:
        lines.append(f"  {runners.sentence}")
    if options.wait_s is None:
        waits = waiting_text(state.ahead if state else None, runners.expected_s if runners else None)
        lines += [f"  {text}" for text in (waits, f"follow it: kakeya_mac wait {asked.nonce}") if text]
        document["exit_code"] = 0
        return show(options.as_json, document, lines, untrusted=("runners",))
    click.echo("\n".join(lines), err=True)
    request = None
    if asked.transport == "actions":
        request = RequestRef(asked.nonce, asked.result_ref, submission.commit, submission.run_id)
    how = Presentation(options.as_json, options.output, document=document, expected=submission.expected)
    link = Connection(config, git, submission.remote)
    return follow(link, asked.nonce, how, wait_s=options.wait_s, state=state, request=request, known=known)


def _require_runner(config: Settings, git: GitRepo, plan: Plan) -> None:
    """Raise `NoRunner` where no live runner would take a planned request."""
    if plan.route.transport == "actions":
        raise NoRunner(
            "--require-runner is for runners' daemons, and this request would go over GitHub Actions, whose"
            " runners do not register",
            "leave --require-runner out, or ask a daemon: --transport embedded",
        )
    runners = check_availability(
        read_runners(config, git, plan.remote),
        plan.manifest,
        signed=choose(config, git).sign(signing.REQUEST_NAMESPACE, plan.manifest.to_bytes()) is not None,
        settings=config,
        now=datetime.now(UTC),
    )
    if not runners.able:
        message = f"nothing was pushed to {plan.remote.shown}: {'; '.join(runners.warnings)}"
        raise NoRunner(message, "see who is there: kakeya_mac runners; without --require-runner it waits")


def _find_runners(
    config: Settings, git: GitRepo, submission: Submission
) -> tuple[RequestState | None, Availability | None, list[str]]:
    """The request among the others, which runners can take it, and warnings; None: not known."""
    state, remote = None, submission.remote
    try:
        prefixes = (*OWN_REFS, *PLACES, submission.manifest.result_ref)
        found = git.list_refs(remote.address, *prefixes, timeout_s=REGISTRY_TIMEOUT_S)
        state = state_of(found, submission.manifest.nonce)
        if submission.manifest.transport == "actions":  # no daemon registers for it
            return state, None, []
        registry = read_runners(config, git, remote, found=found, timeout_s=REGISTRY_TIMEOUT_S)
    except BridgeError as error:  # only a hint
        return state, None, [f"cannot tell which runners are there: {error.message}"]
    runners = check_availability(
        registry,
        submission.manifest,
        signed=submission.signed_with is not None,
        settings=config,
        now=datetime.now(UTC),
        ahead=state.ahead,
    )
    return state, runners, list(runners.warnings)

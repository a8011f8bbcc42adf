"""What `run` and `again` do once a request is planned: show it, or push it and follow it home."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bridge.cli import echo_json

if TYPE_CHECKING:
    from bridge.bus.git import Git
    from bridge.client.lookout import Lookout
    from bridge.client.submit import Plan, Submission
    from bridge.settings import Settings


def show_plan(plan: Plan, warnings: list[str], *, as_json: bool, extra: dict[str, Any] | None = None) -> None:
    """What a dry run shows: the manifest, where it would go and what would run."""
    manifest = json.loads(plan.manifest.to_bytes())
    if as_json:
        echo_json(
            {
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
            },
            untrusted=("manifest", "argv", "warnings"),  # `again` repeats what others asked
        )
        return
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    click.echo(json.dumps(manifest, indent=2, sort_keys=True))
    click.echo(f"\nwould push to  {plan.remote.shown}")
    click.echo(f"transport      {_route(plan)}")
    click.echo(f"would run      {' '.join(plan.argv)}")


def send(config: Settings, plan: Plan, *, repository: Path | Git, check_tree: bool) -> Submission:
    """Push a planned request; warnings go to standard error.

    Args:
        config: The client's settings.
        plan: From `plan_request`.
        repository: What the plan was made in.
        check_tree: Warn of uncommitted changes, which do not travel.
    """
    from bridge.client.submit import submit_request
    from bridge.protocol.refs import is_local

    if not is_local(plan.remote.address):
        click.echo(f"pushing the request to {plan.remote.shown}", err=True)
    if plan.route.transport == "actions":
        click.echo(f"over {_route(plan)}", err=True)
    submission = submit_request(config, plan, repository=repository, check_tree=check_tree)
    for warning in submission.warnings:
        click.echo(f"warning: {warning}", err=True)
    return submission


def _route(plan: Plan) -> str:
    by = {"daemon": "", "push": ", started by the push", "dispatch": ", started by a dispatch"}
    name = "GitHub Actions" if plan.route.transport == "actions" else plan.route.transport
    return f"{name}{by[plan.route.start]}: {plan.route.why}"


def finish(
    config: Settings,
    git: Git,
    submission: Submission,
    *,
    wait_s: float | None,
    as_json: bool,
    output: Path | None,
    allow_unsigned: bool,
    lookout: Lookout,
    resend_after_s: float | None,
    extra: dict[str, Any] | None = None,
) -> int:
    """Say that a request is on its way, or with `wait_s` follow it home; returns the exit code.

    Args:
        config: The client's settings.
        git: The checkout.
        submission: From `send`.
        wait_s: Seconds to follow it; None: not at all.
        as_json: End with one JSON line instead of text.
        output: Folder to save the result in.
        allow_unsigned: Show what no trusted runner signed all the same.
        lookout: Who is there to take it, begun before the push.
        resend_after_s: See `bridge.cli.attending`.
        extra: More keys for the JSON line.
    """
    from bridge.cli.attending import Attending
    from bridge.cli.follow import follow
    from bridge.cli.outlook import outlook
    from bridge.client.runs import Request
    from bridge.protocol.sanitize import clean_line
    from bridge.render.outcome import waiting_line

    preset = submission.manifest.preset
    handle = {
        **(extra or {}),
        **outlook(config, lookout, submission),
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
    if wait_s is not None:
        click.echo(f"submitted {submission.nonce} to {submission.remote.shown}", err=True)
        attending = None
        if submission.manifest.transport == "actions":
            attending = Attending(
                config,
                git,
                submission.remote,
                submission.manifest,
                Request(submission.nonce, submission.ref, submission.commit, submission.run_id),
                resend_after_s=resend_after_s,
            )
        return follow(
            config,
            git,
            submission.remote,
            submission.nonce,
            attending=attending,
            wait_s=wait_s,
            as_json=as_json,
            asked=submission.asked,
            output=output,
            extra=handle,
            allow_unsigned=allow_unsigned,
            expect=lambda ahead: lookout.expected_s(preset, ahead),
        )
    if as_json:
        echo_json({"status": "queued", "exit_code": 0, **handle}, untrusted=("runners",))
    else:
        click.echo(f"queued  {submission.nonce}")
        click.echo(f"  {submission.ref} at {submission.commit[:12]}")
        if submission.signed_with is not None:
            click.echo(f"  signed with {clean_line(submission.signed_with)}")
        if (waits := waiting_line(handle["ahead"], (handle["runners"] or {}).get("expected_s"))) is not None:
            click.echo(f"  {waits}")
        click.echo(f"  follow it: kakeya_mac wait {submission.nonce}")
    return 0

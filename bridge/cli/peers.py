"""``kakeya_mac runner peers`` and ``runner key``: which runners know each other, and by which keys."""

from __future__ import annotations

import logging

import click

from bridge import settings
from bridge.cli import show
from bridge.cli.keys import add_list_commands
from bridge.cli.options import json_option
from bridge.runner.config import RunnerConfig, checked_name, ensure_key, host_name, renew_key
from bridge.signing import public_key
from bridge.signing.ssh import read_key
from bridge.signing.trust import CLAIM_NAMESPACE, RUNNER_NAMESPACE

log = logging.getLogger(__name__)


@click.group()
def peers() -> None:
    """Runners of other Macs that this one knows: the list known_runners of the configuration folder.

    It matters where the policy requires signatures: there only claims of known runners hold a request.
    """


add_list_commands(
    peers,
    "known_runners",
    (CLAIM_NAMESPACE, RUNNER_NAMESPACE),
    owner="runner",
    state="known",
    empty="no runner of another Mac is known here",
    texts={
        "add": "Respect the claims and registrations that the key signed as those of the runner NAME.",
        "list": "Show every known runner, and whether its key counts.",
        "remove": "Remove the keys of the runner NAME from the list.",
    },
    example="""\b
Examples:
  kakeya_mac runner peers add studio --key 'ssh-ed25519 AAAA… kakeya-mac runner studio'

The other Mac's owner gets this command from `kakeya_mac runner key`. Macs of one bus list each other.""",
)


@click.command(
    epilog="""\b
Examples:
  kakeya_mac runner key
  kakeya_mac runner key --name studio --renew

--renew makes a new key in place of the old one, which is deleted; a serving runner uses it from its next
signature on. Give the printed commands to everyone who trusts the old one, and have them revoke that."""
)
@click.option("--name", metavar="NAME", help="The runner's name (default: the host's).")
@click.option("--renew", is_flag=True, help="Make a new key, for good.")
@json_option
def key(name: str | None, renew: bool, as_json: bool) -> int:
    """Show the key with which this runner signs, and the commands that make others believe it."""
    runner, state = checked_name(name or host_name()), settings.load().state_dir
    file = str(public_key(ensure_key(state, runner)))
    replaced = None
    if renew:
        replaced = read_key(file).fingerprint
        renew_key(state, runner)
    public = read_key(file)
    line = f"{public.line} {public.comment}".strip()
    document = {
        "name": runner,
        "key": public.line,
        "fingerprint": public.fingerprint,
        "clients": f"kakeya_mac runners trust {runner} --key '{line}'",
        "macs": f"kakeya_mac runner peers add {runner} --key '{line}'",
        "replaced": replaced,
        "exit_code": 0,
    }
    lines = [
        f"{runner}  {public.fingerprint}",
        f"clients trust its results with\n  {document['clients']}",
        f"other Macs on the bus know it with\n  {document['macs']}",
    ]
    if replaced is not None:
        command = f"kakeya_mac runners revoke {runner} --key {replaced}"
        lines.append(f"those who trust the old one revoke it with\n  {command}")
    return show(as_json, document, lines)


def log_key(config: RunnerConfig) -> None:
    """Log how clients come to trust the results of a runner that starts."""
    name, own = config.identity.name, config.public_key
    if own is None:
        log.warning("results are unsigned: ssh-keygen is not installed")
    else:
        log.info("clients trust this runner with: kakeya_mac runners trust %s --key '%s'", name, own)

"""``kakeya_mac runner peers``: which other Macs a Mac knows, by their keys."""

from __future__ import annotations

from bridge.cli.signers import key_group
from bridge.signing import trust

peers = key_group(
    "peers",
    "known_runners",
    (trust.CLAIM_NAMESPACE, trust.RUNNER_NAMESPACE),
    about="Runners of other Macs, in the list known_runners: whose claims hold a signed request.",
    examples="""\
  kakeya_mac runner peers add studio --key 'ssh-ed25519 AAAA… kakeya-mac runner studio'

The other Mac's owner gets this command from `kakeya_mac runner key`. Macs of one bus list each other.""",
)

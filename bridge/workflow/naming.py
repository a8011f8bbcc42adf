"""The name under which a machine executes workflow runs: not that of a daemon, which may run beside it."""

from __future__ import annotations

from bridge.runner.station import host_name

_SUFFIX = "-actions"
_LONGEST = 64


def runner_name() -> str:
    """The host's name with ``-actions`` behind it."""
    return host_name()[: _LONGEST - len(_SUFFIX)] + _SUFFIX

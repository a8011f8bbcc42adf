"""Switches of a server that make no sense are refused before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from engine.cli.serve import command
from engine.errors import ConfigurationError
from engine.server.scheduler import SchedulerLimits
from engine.server.serve import ServerSettings
from engine.server.service import RequestLimits

NAN = float("nan")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"largest_body": 0}, "--max-body in bytes must be at least 1, not 0"),
        ({"request_limits": RequestLimits(max_tokens=0)}, "--max-tokens must be at least 1, not 0"),
        ({"request_limits": RequestLimits(default_tokens=0)}, "--default-tokens must be at least 1, not 0"),
        ({"request_limits": RequestLimits(queue=-1)}, "--queue must be at least 0, not -1"),
        ({"limits": SchedulerLimits(parallel=0)}, "--parallel must be at least 1, not 0"),
        ({"limits": SchedulerLimits(models=0)}, "--models must be at least 1, not 0"),
        ({"limits": SchedulerLimits(sessions=-1)}, "--cache-sessions must be at least 0, not -1"),
        ({"limits": SchedulerLimits(session_bytes=-1)}, "--cache-mib in bytes must be at least 0, not -1"),
        ({"limits": SchedulerLimits(session_s=NAN)}, "--cache-seconds must be at least 0, not nan"),
        ({"limits": SchedulerLimits(disk_bytes=0)}, "--cache-dir-mib in bytes must be at least 1, not 0"),
        (
            {"limits": SchedulerLimits(hourly_bytes=-1)},
            "--cache-write-mib-per-hour in bytes must be at least 0, not -1",
        ),
        ({"limits": SchedulerLimits(chunk=0)}, "--prefill-chunk must be at least 1, not 0"),
        ({"grace_s": -5.0}, "--grace must be at least 0, not -5.0"),
        ({"grace_s": float("inf")}, "--grace must be a number of seconds, not inf"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_impossible_numbers_are_refused_by_name(fields: dict[str, Any], says: str):
    with pytest.raises(ConfigurationError, match=f"^{says}$"):
        ServerSettings(**fields).check()


@pytest.mark.parametrize(
    "flag", ["--max-body", "--cache-mib", "--cache-dir-mib", "--cache-write-mib-per-hour"]
)
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_sizes_must_be_finite(flag: str, value: str):
    with pytest.raises(ConfigurationError, match=f"^{flag} must be a number of MiB, not {value}$"):
        command.main(["--check", flag, value], standalone_mode=False)


def test_zeros_that_disable_features_are_valid():
    nothing_kept = SchedulerLimits(sessions=0, session_bytes=0, session_s=0.0)
    ServerSettings(limits=nothing_kept, request_limits=RequestLimits(queue=0), grace_s=0.0).check()

"""Switches of a server that make no sense are refused before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from engine.cli.serve import command
from engine.errors import ConfigurationError
from engine.server.decoding.worker import Limits
from engine.server.serve import Serving
from engine.server.service import Bounds

NAN = float("nan")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"largest_body": 0}, "--max-body in bytes must be at least 1, not 0"),
        ({"bounds": Bounds(max_tokens=0)}, "--max-tokens must be at least 1, not 0"),
        ({"bounds": Bounds(default_tokens=0)}, "--default-tokens must be at least 1, not 0"),
        ({"bounds": Bounds(admitted=3)}, "--queue must be at least 0, not -1"),
        ({"limits": Limits(parallel=0)}, "--parallel must be at least 1, not 0"),
        ({"limits": Limits(models=0)}, "--models must be at least 1, not 0"),
        ({"limits": Limits(sessions=-1)}, "--cache-sessions must be at least 0, not -1"),
        ({"limits": Limits(session_bytes=-1)}, "--cache-mib in bytes must be at least 0, not -1"),
        ({"limits": Limits(session_s=NAN)}, "--cache-seconds must be at least 0, not nan"),
        ({"limits": Limits(chunk=0)}, "--prefill-chunk must be at least 1, not 0"),
        ({"grace_s": -5.0}, "--grace must be at least 0, not -5.0"),
        ({"grace_s": float("inf")}, "--grace must be a number of seconds, not inf"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_numbers_that_no_server_can_work_with_are_refused_by_name(fields: dict[str, Any], says: str):
    with pytest.raises(ConfigurationError, match=f"^{says}$"):
        Serving(**fields).check()


@pytest.mark.parametrize("flag", ["--max-body", "--cache-mib"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_sizes_are_numbers(flag: str, value: str):
    with pytest.raises(ConfigurationError, match=f"^{flag} must be a number of MiB, not {value}$"):
        command.main(["--check", flag, value], standalone_mode=False)


def test_what_switches_something_off_is_no_mistake():
    nothing_kept = Limits(sessions=0, session_bytes=0, session_s=0.0)
    Serving(limits=nothing_kept, bounds=Bounds(admitted=4), grace_s=0.0).check()

"""Who may ask, and on which branch: names and patterns, and how unsigned requests are named."""

from pathlib import Path

import pytest

from bridge import presets
from bridge.errors import PolicyError
from bridge.runner import policy
from bridge.runner.policy import PolicyRefusal


def read(text: str) -> policy.Policy:
    return policy.parse(Path("/etc/policy.toml"), text.encode())


@pytest.mark.parametrize(
    ("listed", "requester", "allowed"),
    [
        (["ann@example.org"], "ann@example.org", True),
        (["ann@example.org"], "bob@example.org", False),
        (["*@example.org"], "bob@example.org", True),
        (["*@example.org"], "bob@example.org.evil", False),
        (["*"], "bob", True),
        (["*"], None, False),
        (["unsigned"], None, True),
        (["unsigned"], "unsigned", False),
        (["ann", "unsigned"], None, True),
        (["un*"], None, False),
        ([], "ann", False),
        ([], None, False),
        (["ANN"], "ann", False),
    ],
    ids=str,
)
def test_requester_is_allowed_by_name_or_pattern(
    listed: list[str], requester: str | None, allowed: bool
) -> None:
    """Everywhere and for one preset alone the same list means the same."""
    probe = presets.get("probe")
    for text in (f"allow_requesters = {listed}", f"[presets.probe]\nrequesters = {listed}"):
        loaded = read(text)
        if allowed:
            loaded.check_requester(probe, requester)
            continue
        with pytest.raises(PolicyRefusal) as caught:
            loaded.check_requester(probe, requester)
        assert loaded.setting(caught.value.key).startswith("policy.toml: ")
        assert not any(name in caught.value.message for name in listed if name not in (requester, "unsigned"))


def test_requesters_of_one_preset_are_not_asked_for_another() -> None:
    loaded = read('[presets.probe]\nrequesters = ["ann"]')
    loaded.check_requester(presets.get("gate"), "bob")
    with pytest.raises(PolicyError, match="policy: bob may not run the preset probe"):
        loaded.check_requester(presets.get("probe"), "bob")


@pytest.mark.parametrize(
    ("patterns", "ref", "allowed"),
    [
        (["mac-bridge/*"], "refs/heads/mac-bridge/probe-1", True),
        (["refs/heads/mac-bridge/*"], "refs/heads/mac-bridge/probe-1", True),
        (["mac-bridge/gate-*"], "refs/heads/mac-bridge/probe-1", False),
        (["AgentMemory/*"], "refs/heads/mac-bridge/probe-1", False),
        (["AgentMemory/*", "mac-bridge/*"], "refs/heads/AgentMemory/mac-bridge-probe-1-x", True),
        ([], "refs/heads/mac-bridge/probe-1", False),
    ],
    ids=str,
)
def test_request_is_allowed_on_the_branches_listed(patterns: list[str], ref: str, allowed: bool) -> None:
    loaded = read(f"allow_refs = {patterns}")
    if allowed:
        loaded.check_ref(ref)
        return
    with pytest.raises(PolicyRefusal, match="requests on the branch mac-bridge/probe-1 are not allowed"):
        loaded.check_ref(ref)

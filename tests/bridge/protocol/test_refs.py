"""Names on the bus: what we make we can read, what others make is refused."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.protocol import refs

PRESETS = st.from_regex(r"\A[a-z0-9]+(-[a-z0-9]+){0,3}\Z").filter(lambda name: len(name) <= 64)
BRANCHES = st.none() | st.just("main") | st.from_regex(r"\AAgentMemory/[a-z]{1,8}-[a-z0-9]{1,8}\Z")


@given(
    PRESETS,
    st.datetimes(datetime(2020, 1, 1), datetime(2090, 1, 1)),
    st.binary(min_size=6, max_size=9),
    BRANCHES,
)
def test_request_ref_names_its_preset_and_nonce(
    preset: str, now: datetime, entropy: bytes, branch: str | None
):
    nonce = refs.new_nonce(now.replace(tzinfo=UTC), entropy)
    named = refs.parse_request_ref(refs.request_ref(preset, nonce, branch))
    assert named == refs.RequestName(preset, nonce)


@pytest.mark.parametrize(
    "ref",
    [
        "refs/heads/mac-bridge/probe",
        "refs/heads/mac-bridge/--upload-pack=x-20260301t120000z0123456789ab",
        "refs/heads/mac-bridge/Probe-20260301t120000z0123456789ab",
        "refs/heads/mac-bridge/probe-20260301t120000z0123456789ab-suffix",
        "refs/heads/mac-bridge/probe-20260301t120000z0123456789AB",
        "refs/heads/mac-bridge/probe-\u0662\u0660\u0662\u0666\u0660\u0663\u0660\u0661t120000z0123456789ab",
        "refs/heads/mac-bridge/../probe-20260301t120000z0123456789ab",
        "refs/heads/mac-bridge/probe-20260301t120000z0123456789ab\n",
        "refs/tags/mac-bridge/probe-20260301t120000z0123456789ab",
        "refs/heads/mac-bridge/" + "a" * 65 + "-20260301t120000z0123456789ab",
    ],
)
def test_other_refs_are_no_requests(ref: str):
    assert refs.parse_request_ref(ref) is None


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("git@Example.org:team/repo.git", "ssh://git@example.org/team/repo"),
        ("https://user:secret@example.org/team/repo.git/", "git@example.org:team/repo"),
        ("https://example.org:443/team/repo", "http://example.org/team/repo"),
    ],
)
def test_one_remote_has_one_spelling(left: str, right: str):
    assert refs.audience_of(left) == refs.audience_of(right)
    assert "secret" not in refs.audience_of(left)


def test_folder_is_its_real_path_and_a_port_another_remote(tmp_path: Path):
    (tmp_path / "real.git").mkdir()
    (tmp_path / "link.git").symlink_to(tmp_path / "real.git")
    assert refs.audience_of(str(tmp_path / "link.git")) == refs.audience_of(f"file://{tmp_path}/real.git")
    assert refs.audience_of("ssh://example.org:2222/r") != refs.audience_of("ssh://example.org/r")


@pytest.mark.parametrize(
    ("address", "audience"),
    [
        ("http://127.0.0.1:3333/team/x", "127.0.0.1:3333/team/x"),
        ("https://example.org:8443/team/x.git", "example.org:8443/team/x"),
        ("ssh://git@example.org:2222/team/x", "example.org:2222/team/x"),
        ("git@example.org:team/x.git", "example.org/team/x"),
    ],
)
def test_the_spelling_of_a_remote_keeps_its_port(address: str, audience: str):
    """Manifests of every version name a remote so."""
    assert refs.audience_of(address) == audience

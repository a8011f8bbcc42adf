"""What ``doctor`` says of keys is what signing and believing will do with them."""

from __future__ import annotations

import pytest

from bridge import settings
from bridge.doctor.client import examine
from bridge.doctor.finding import Check, Level
from tests.bridge.signing.keyring import private, public
from tests.worlds import World


def check(world: World, name: str) -> Check:
    return next(found for found in examine(settings.load(), world.house.clone) if found.name == name)


def test_the_key_that_would_sign_is_named_with_where_it_was_found(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = check(world, "request key")
    assert (none.level, "kakeya_mac key --make" in none.finding) == (Level.OK, True)
    world.house.git("config", "gpg.format", "ssh")
    world.house.git("config", "user.signingkey", str(private("ann")))
    found = check(world, "request key")
    assert public("ann").fingerprint in found.finding
    assert "git's user.signingkey" in found.finding
    monkeypatch.setenv("KAKEYA_SIGNING_KEY", "/no/such/key")
    missing = check(world, "request key")
    assert (missing.level, missing.fix) == (Level.FAIL, "correct the path, or unset it")


def test_a_list_of_trusted_runners_that_cannot_be_believed_is_a_fault(world: World) -> None:
    path = settings.load().trusted_runners
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"# ours\nstudio {public('ann').line}\n")
    assert "1 key(s)" in check(world, "trusted runners").finding
    path.chmod(0o666)
    found = check(world, "trusted runners")
    assert (found.level, found.fix) == (Level.FAIL, f"chmod go-w {path}")
    path.chmod(0o600)
    path.write_text("studio rubbish\n")
    assert f"{path}:1: " in check(world, "trusted runners").finding

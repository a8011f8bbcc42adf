"""What ``doctor`` says of keys is what signing and believing will do with them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from bridge import settings
from bridge.client.remotes import Remote
from bridge.doctor import Check, Level, bus_load, examine
from bridge.git.repo import GitRepo
from bridge.protocol import refs
from tests.bridge.registrations import info, put
from tests.bridge.signing.keyring import private, public
from tests.fixtures.bus import BusFixture


def check(bus: BusFixture, name: str) -> Check:
    return next(found for found in examine("client", settings.load(), bus.repo.clone) if found.name == name)


def test_the_key_that_would_sign_is_named_with_where_it_was_found(
    bus: BusFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = check(bus, "request key")
    assert (none.level, "kakeya_mac key --make" in none.finding) == (Level.OK, True)
    bus.repo.git("config", "gpg.format", "ssh")
    bus.repo.git("config", "user.signingkey", str(private("ann")))
    found = check(bus, "request key")
    assert public("ann").fingerprint in found.finding
    assert "git's user.signingkey" in found.finding
    monkeypatch.setenv("KAKEYA_SIGNING_KEY", "/no/such/key")
    missing = check(bus, "request key")
    assert (missing.level, missing.fix) == (Level.FAIL, "correct the path, or unset it")


def test_a_list_of_trusted_runners_that_cannot_be_believed_is_a_fault(bus: BusFixture) -> None:
    path = settings.load().trusted_runners
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"# ours\nstudio {public('ann').line}\n")
    assert "1 key(s)" in check(bus, "trusted runners").finding
    path.chmod(0o666)
    found = check(bus, "trusted runners")
    assert (found.level, found.fix) == (Level.FAIL, f"chmod go-w {path}")
    path.chmod(0o600)
    path.write_text("studio rubbish\n")
    assert f"{path}:1: " in check(bus, "trusted runners").finding


def load_of(bus: BusFixture, address: str, *intervals: float) -> list[Check]:
    """What is said of a remote with live runners that register so often, under this address."""
    for number, interval_s in enumerate(intervals):
        live = info(f"mac{number}", now=datetime.now(UTC), interval_s=interval_s, id=f"{number:016x}")
        put(bus.remote, refs.RUNNERS + live.name, live.to_bytes())
    git = GitRepo(bus.repo.clone)
    return list(bus_load(settings.load(), git, Remote(address, "shown", "audience")))


@pytest.mark.parametrize(
    ("intervals", "level", "found"),
    [
        ((), Level.OK, "0 live runner(s): at most about 0.0 pushes and 0 reads a minute"),
        ((600.0,) * 5, Level.OK, "5 live runner(s): at most about 5.5 pushes and 60 reads a minute"),
        ((600.0,) * 6, Level.WARN, "6 live runner(s): at most about 6.6 pushes and 72 reads a minute"),
        ((60.0,) * 2, Level.WARN, "2 live runner(s): at most about 10.0 pushes and 1,200 reads a minute"),
    ],
    ids=["none", "few", "many", "of an earlier version"],
)
def test_pushes_and_reads_on_a_public_host_are_totalled(
    bus: BusFixture, monkeypatch: pytest.MonkeyPatch, intervals: tuple[float, ...], level: Level, found: str
) -> None:
    address = "https://github.com/me/repo"
    for name, value in {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{bus.remote}.insteadOf",
        "GIT_CONFIG_VALUE_0": address,
    }.items():
        monkeypatch.setenv(name, value)
    [check] = load_of(bus, address, *intervals)
    assert (check.name, check.level) == ("load", level)
    assert check.finding.startswith(found), check.finding
    if level is Level.WARN:
        assert "6 pushes a minute and 15 reads a second" in check.finding


def test_a_server_of_ones_own_gets_advice_on_what_heartbeats_leave(bus: BusFixture) -> None:
    load, server = load_of(bus, bus.remote, 60.0)
    assert (load.level, server.level) == (Level.OK, Level.OK)
    assert load.finding.startswith("1 live runner(s): at most about 31.0 pushes and 3,000 reads a minute")
    assert "178,560 a day" in server.finding
    assert "gc.cruftPacks true" in server.fix


def test_a_remote_that_is_away_gives_no_load(bus: BusFixture) -> None:
    [check] = load_of(bus, "/no/such/remote")
    assert (check.name, check.level) == ("load", Level.WARN)

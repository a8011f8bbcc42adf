"""Which runners can take a request: every reason why not, and what people are told."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from bridge import settings
from bridge.bus.registry import Registration, Registry
from bridge.client.remotes import Remote
from bridge.client.runners import (
    Availability,
    check_availability,
    read_runners,
    require_signatures,
    typical_duration_s,
)
from bridge.errors import KeyListError, RemoteUnreachable
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest, ParamValue, format_time
from bridge.protocol.runner_info import Limits, RunnerInfo, State
from bridge.signing.trust import TrustLevel
from tests.bridge.registrations import NOW, info, offer, publish_info
from tests.fixtures.bus import BusFixture

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"


@pytest.fixture
def config(tmp_path: Path) -> settings.Settings:
    folders = {"state_dir": tmp_path / "state", "config_dir": tmp_path / "config"}
    return settings.load().model_copy(update=folders)


def seen(base: RunnerInfo | None = None, *, trusted: bool = False, **changes: Any) -> Registration:
    one = base or info(**changes)
    trust = TrustLevel.TRUSTED if trusted else TrustLevel.UNSIGNED
    ref = f"refs/mac-bridge/runners/{one.name}"
    return Registration(one.name, ref, "0" * 40, one, trust, "x" if trusted else None)


def manifest(
    preset: str = "probe", params: Mapping[str, ParamValue] | None = None, **changes: Any
) -> Manifest:
    nonce = "20260301t120000z0123456789ab"
    fields: dict[str, Any] = {
        "nonce": nonce,
        "preset": preset,
        "params": {"limit": 4} if params is None else params,
        "workload_sha": "ab" * 20,
        "result_ref": refs.request_ref(preset, nonce, None),
        "created_at": NOW,
        "expires_at": NOW + timedelta(hours=1),
        "audience": "/bus",
    }
    return Manifest(**{**fields, **changes})


def ask(
    config: settings.Settings,
    *infos: Registration,
    signed: bool = False,
    ahead: int | None = 0,
    **changes: Any,
) -> Availability:
    registry = Registry(infos, 0, {})
    return check_availability(
        registry, manifest(**changes), signed=signed, settings=config, now=NOW, ahead=ahead
    )


def test_a_live_runner_that_offers_the_preset_can_take_it(config: settings.Settings):
    found = ask(config, seen(), seen(name="other", id="f" * 16))
    assert (found.live, found.able, dict(found.unable)) == (2, ("mac", "other"), {})
    assert found.sentence == "2 runners are live; mac, other can take it"
    assert found.warnings == ()
    assert ask(config, seen(presets=(offer("bench", aliases=("probe",)),))).able == ("mac",)


def test_every_obstacle_has_its_reason(config: settings.Settings):
    def why(one: Registration, **changes: Any) -> str:
        found = ask(config, one, **changes)
        assert found.able == ()
        return found.unable[one.name]

    assert why(seen(age_s=3600)) == f"not seen since {format_time(NOW - timedelta(seconds=3600))}"
    assert why(seen(state=State.STOPPED)) == f"stopped at {format_time(NOW)}"
    assert why(seen(age_s=-100_000)).startswith("its registration is from the future")
    assert why(seen(presets=())) == "it has no preset probe"
    refused = offer(available=False, why="its policy does not allow probe")
    assert why(seen(presets=(refused,))) == "its policy does not allow probe"
    assert why(seen(presets=(offer(available=False),))) == "it cannot run probe now"
    assert len(why(seen(presets=(offer(available=False, why="x" * 1000),)))) == 300
    strict = Limits(max_timeout_s=60, require_signature=True)
    assert why(seen(limits=strict)) == "it takes only signed requests, and this one is unsigned"
    assert ask(config, seen(limits=strict), signed=True).able == ("mac",)
    other = why(seen(), audience="/another")
    assert other == "it serves /bus, and this request is meant for /another"


def test_the_reasons_of_live_runners_are_told_first(config: settings.Settings):
    away = seen(name="away", age_s=3600, id="a" * 16)
    here = seen(name="here", presets=(offer(available=False, why="its policy does not allow probe"),))
    found = ask(config, away, here)
    assert found.live == 1
    assert found.warnings == (
        "no live runner can take this request now: here: its policy does not allow probe;"
        f" away: not seen since {format_time(NOW - timedelta(seconds=3600))}",
    )
    assert ask(config).warnings == ("no runner has been seen on this remote: probe waits until one comes",)
    crowd = ask(config, *(seen(name=f"m{n}", id=f"{n:016x}", age_s=3600) for n in range(30)))
    assert crowd.warnings[0].endswith("; and 25 more")
    assert len(crowd.to_json()["unable"]) == 30


def test_client_is_told_when_only_untrusted_runners_can_take_it(config: settings.Settings):
    config.config_dir.mkdir()
    assert ask(config, seen()).warnings == ()
    config.trusted_runners.write_text(f"studio {KEY}\n")
    found = ask(config, seen())
    assert found.able == ("mac",)
    assert "not trusted here" in found.warnings[0]
    assert ask(config, seen(trusted=True), seen(name="b", id="b" * 16)).warnings == ()


def test_expected_wait_is_median_duration_times_older_requests(config: settings.Settings):
    runners = [
        seen(name=f"m{n}", id=f"{n:016x}", presets=(offer(typical_s=typical),))
        for n, typical in enumerate((10.0, 30.0, 500.0, None))
    ]
    assert ask(config, *runners, ahead=3).expected_s == 90.0
    assert ask(config, *runners, ahead=0).expected_s == 0.0
    assert ask(config, *runners, ahead=None).expected_s is None
    assert ask(config, seen(), ahead=3).expected_s is None
    assert typical_duration_s(runners, "other") is None


def test_a_live_runner_that_obeys_only_signatures_is_named():
    strict = Limits(max_timeout_s=60, require_signature=True)
    registrations = (seen(), seen(name="strict", limits=strict), seen(name="gone", limits=strict, age_s=3600))
    assert require_signatures(Registry(registrations, 0, {}), NOW) == ["strict"]


def test_the_registry_is_read_into_one_cache_of_the_remote(bus: BusFixture, config: settings.Settings):
    remote = Remote(bus.remote, bus.remote, refs.audience_of(bus.remote))
    publish_info(bus.cache, info(now=datetime.now(UTC)))
    for _ in range(2):
        assert [one.name for one in read_runners(config, bus.git, remote).seen] == ["mac"]
    [cache] = (config.state_dir / "caches").glob("*.git")
    assert cache.is_dir()


def test_a_remote_that_is_away_and_a_damaged_key_list_are_errors(bus: BusFixture, config: settings.Settings):
    with pytest.raises(RemoteUnreachable):
        read_runners(config, bus.git, Remote("/nothing.git", "/nothing.git", "/nothing"))
    config.config_dir.mkdir()
    config.trusted_runners.write_text('mac namespaces="kakeya-mac-result" ssh-ed25519 A*A\n')
    remote = Remote(bus.remote, bus.remote, refs.audience_of(bus.remote))
    with pytest.raises(KeyListError, match=":1: 'ssh-ed25519 A"):
        read_runners(config, bus.git, remote)


def test_parameters_outside_a_runners_bounds_are_an_obstacle(config: settings.Settings):
    found = ask(config, seen(), params={"limit": 10})
    assert found.able == ()
    assert "limit: 10 is greater than the maximum of 9" in found.unable["mac"]

"""What the commands say of runners: `runners`, `runners trust`, `presets --remote`, and `run` at once."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bridge import presets, signing
from bridge.protocol import refs
from bridge.protocol.runner_info import Property, RunnerInfo, State
from tests.bridge.registrations import info, offer, public_line, put, signed
from tests.houses import House

RUN = ("run", "--preset", "probe", "--json")


def here(house: House, name: str = "mac", **changes: Any) -> RunnerInfo:
    """A registration of a runner that is live now and serves this house's remote."""
    fields: dict[str, Any] = {
        "now": datetime.now(UTC),
        "audience": refs.audience_of(str(house.remote)),
        "presets": (real("probe"),),
        "machine": {"chip": "Apple M4", "memory_bytes": 64 * 2**30, "labels": "lab,quiet"},
    }
    return info(name, **{**fields, **changes})


def real(name: str, **changes: Any) -> Any:
    """An installed preset as a runner offers it."""
    preset = presets.get(name)
    known = {
        key: Property.model_validate({**schema, "enum": tuple(schema["enum"]) if "enum" in schema else None})
        for key, schema in preset.params_schema()["properties"].items()
    }
    return offer(name, digest=preset.digest, parameters=known, **changes)


def publish(house: House, base: RunnerInfo, key: Path | None = None) -> RunnerInfo:
    whole, signature = (base, None) if key is None else signed(key, base)
    put(house.remote, refs.RUNNERS + base.name, whole.to_bytes(), signature)
    return whole


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return signing.ensure_key(tmp_path / "key", "a runner")


@pytest.mark.slow
def test_runners_are_listed_with_what_they_do_and_whether_their_key_counts(house: House, key: Path):
    publish(house, here(house), key)
    publish(house, here(house, "old", age_s=86_400, id="e" * 16, state=State.STOPPED))
    house.kakeya("runners", "trust", "studio", "--key", public_line(key))
    other = signing.ensure_key(house.root / "other", "absent")
    house.kakeya("runners", "trust", "absent", "--key", public_line(other))
    done = house.kakeya("runners", "--json")
    assert done.code == 0, done.err
    entries = {entry["name"]: entry for entry in done.json["runners"]}
    assert list(entries) == ["mac", "old", "absent"]
    mac = entries["mac"]
    assert (mac["trusted"], mac["trusted_as"], mac["live"], mac["state"]) == (True, "studio", True, "idle")
    assert mac["key"] == public_line(key)
    assert mac["fingerprint"] == signing.fingerprint(mac["key"])
    assert mac["presets"] == ["probe"]
    assert mac["machine"]["chip"] == "Apple M4"
    named = {name: value for name, value in mac["properties"].items() if value is not None}
    assert named == {"chip": "Apple M4", "memory": 64, "label": ["lab", "quiet"], "runner": "mac"}
    assert (entries["old"]["trusted"], entries["old"]["live"], entries["old"]["key"]) == (False, False, None)
    assert (entries["absent"]["key"], entries["absent"]["seen_at"]) == (public_line(other), None)
    assert set(mac) == set(entries["absent"])
    assert done.json["remote"] == str(house.remote)
    text = house.kakeya("runners").out
    assert "mac  idle, seen " in text
    assert "(trusted as studio)" in text
    assert "old  stopped at " in text
    assert "offers   probe" in text
    assert "machine  chip=Apple M4, label=lab,quiet, memory=64.0, runner=mac; kakeya-mac" in text
    assert "absent  not seen on this remote" in text


def test_a_key_that_is_not_trusted_cannot_be_distrusted(house: House, key: Path):
    none = house.kakeya("runners", "distrust", "studio")
    assert none.code == 2
    assert "keys in it: none" in none.err
    house.kakeya("runners", "trust", "studio", "--key", public_line(key))
    done = house.kakeya("runners", "distrust", "studi")
    assert done.code == 2
    assert f"{house.root / 'config' / 'trusted_runners'} has no key of 'studi'" in done.err
    assert "keys in it: studio" in done.err
    gone = house.kakeya("runners", "distrust", "studio")
    assert (gone.code, "1 key(s) of studio removed" in gone.out) == (0, True)


@pytest.mark.slow
def test_runners_without_a_remote_lists_the_trusted_keys_and_says_so(house: House, key: Path):
    house.kakeya("runners", "trust", "studio", "--key", public_line(key))
    house.git("remote", "remove", "origin")
    done = house.kakeya("runners", "--json")
    assert done.code == 0
    assert [(entry["name"], entry["key"]) for entry in done.json["runners"]] == [("studio", public_line(key))]
    assert done.json["remote"] is None
    assert "only the trusted keys are listed" in done.err
    outside = house.kakeya("runners", cwd=house.root)
    assert outside.code == 0
    assert f"studio  (trusted)  {public_line(key)}" in outside.out
    assert house.kakeya("runners", "--remote", "nowhere").code == 6
    assert house.kakeya("runners", "--remote", "/no/such.git").code == 6


def test_hostile_infos_are_counted_and_show_nothing_to_a_terminal(house: House):
    put(house.remote, refs.RUNNERS + "evil", b'{"name": "\x1b]0;owned\x07"}')
    put(house.remote, refs.RUNNERS + "thief", here(house, "mac").to_bytes())
    publish(house, here(house, "mac", machine={"chip": "M4 " + "x" * 900}))
    done = house.kakeya("runners")
    assert done.code == 0, done.err
    assert "\x1b" not in done.out + done.err
    assert "2 invalid registration(s)" in done.err
    assert max(len(line) for line in done.out.splitlines()) < 300


@pytest.mark.slow
def test_a_key_from_the_bus_is_shown_and_never_trusted(house: House, key: Path):
    whole = publish(house, here(house), key)
    done = house.kakeya("runners", "trust", "mac")
    assert done.code == 2
    assert signing.fingerprint(whole.public_key or "") in done.out
    assert f"kakeya_mac runners trust mac --key '{whole.public_key}'" in done.out
    assert "compare it" in done.out
    assert house.kakeya("runners", "--json").json["runners"][0]["trusted"] is False
    assert not (house.root / "config" / "trusted_runners").exists()
    unknown = house.kakeya("runners", "trust", "nobody")
    assert unknown.code == 2
    assert "runners seen: mac" in unknown.err
    publish(house, here(house, "plain", id="d" * 16))
    assert (
        "no runner named 'plain' publishes a signed registration"
        in house.kakeya("runners", "trust", "plain").err
    )


def test_the_first_key_is_pinned_on_request_and_never_replaced(house: House, key: Path):
    pinned = house.root / "config" / "trusted_runners"
    nothing = house.kakeya("runners", "trust", "--first")
    assert (nothing.code, "no runner publishes a signed registration" in nothing.err) == (2, True)
    whole = publish(house, here(house), key)
    done = house.kakeya("runners", "trust", "--first")
    assert done.code == 0, done.err
    assert f"trusted: mac {signing.fingerprint(whole.public_key or '')} ({pinned})" in done.out
    assert "compare it" in done.out
    before = pinned.read_bytes()
    again = house.kakeya("runners", "trust", "--first")
    assert (again.code, "already trusted: mac" in again.out) == (0, True)
    other = signing.ensure_key(house.root / "other", "another")
    publish(house, here(house), other)
    for name in ((), ("mac",)):
        changed = house.kakeya("runners", "trust", "--first", *name)
        assert changed.code == 2
        assert signing.fingerprint(public_line(other)) in changed.err
        assert f"pinned is mac {signing.fingerprint(public_line(key))}" in changed.err
    assert pinned.read_bytes() == before


def test_of_several_published_keys_none_is_first_without_a_name(house: House, key: Path):
    other = signing.ensure_key(house.root / "other", "another")
    publish(house, here(house), key)
    publish(house, here(house, "second", id="b" * 16), other)
    several = house.kakeya("runners", "trust", "--first")
    assert several.code == 2
    assert "2 different keys" in several.err
    assert not (house.root / "config" / "trusted_runners").exists()
    assert house.kakeya("runners", "trust", "--first", "second").out.startswith("trusted: second ")
    assert house.kakeya("runners", "trust", "--first", "mac").out.startswith("trusted: mac ")
    house.kakeya("runners", "revoke", "mac")
    revoked = house.kakeya("runners", "trust", "--first", "mac")
    assert (revoked.code, "revoked" in revoked.err) == (2, True)


def test_first_goes_without_a_key_and_trust_without_neither(house: House):
    assert house.kakeya("runners", "trust", "--first", "--key", "x").code == 2
    assert "Missing argument 'NAME'" in house.kakeya("runners", "trust").err


@pytest.mark.slow
def test_presets_of_live_runners_are_listed_with_who_takes_them(house: House, key: Path):
    probe = real("probe", typical_s=2.5)
    tests = real("tests", available=False, why="its policy does not allow tests")
    special = offer("special", summary="Theirs alone.")
    publish(house, here(house, presets=(probe, tests, special)), key)
    publish(house, here(house, "second", id="b" * 16, presets=(real("probe"),)))
    publish(house, here(house, "gone", id="c" * 16, age_s=86_400, presets=(real("kv"),)))
    house.kakeya("runners", "trust", "mac", "--key", public_line(key))
    done = house.kakeya("presets", "--remote", "--json")
    assert done.code == 0, done.err
    found = {entry["name"]: entry for entry in done.json["presets"]}
    assert list(found) == ["probe", "special", "tests"]
    assert [entry["name"] for entry in found["probe"]["runners"]] == ["mac", "second"]
    assert found["probe"]["runners"][0] == {
        "name": "mac",
        "trusted": True,
        "available": True,
        "why": None,
        "typical_s": 2.5,
    }
    assert found["probe"]["installed_here"] is True
    assert found["special"]["installed_here"] is None
    assert found["special"]["params"]["properties"]["limit"]["maximum"] == 9
    assert found["tests"]["runners"][0]["why"] == "its policy does not allow tests"
    text = house.kakeya("presets", "tests", "--remote", str(house.remote)).out
    assert "-p path=<string>" in text
    assert "mac (trusted key): not now: its policy does not allow tests" in text
    missing = house.kakeya("presets", "nothing", "--remote")
    assert missing.code == 2
    assert "mac" in missing.err


def test_run_says_at_once_when_nobody_can_take_it_and_pushes_it_all_the_same(house: House):
    refused = offer("probe", available=False, why="its policy does not allow probe")
    publish(house, here(house, presets=(refused,)))
    publish(house, here(house, "old", id="e" * 16, age_s=86_400))
    done = house.kakeya(*RUN)
    assert done.code == 0, done.err
    assert "no live runner can take this request now: mac: its policy does not allow probe;" in done.err
    assert "old: not seen since " in done.err
    answer = done.json
    assert (answer["runners"]["live"], answer["runners"]["able"]) == (1, [])
    assert set(answer["runners"]["unable"]) == {"mac", "old"}
    assert answer["warnings"][0].startswith("no live runner")
    assert f"refs/mac-bridge/inbox/{answer['nonce']}" in house.remote_refs()


def test_run_says_at_once_which_conditions_no_live_runner_meets(house: House):
    publish(house, here(house))
    publish(house, here(house, "mini", id="e" * 16, machine={}))
    done = house.kakeya(*RUN, "--on", "chip=M4*,memory>=128,label=studio")
    assert done.code == 0, done.err
    assert done.json["runners"]["able"] == []
    assert done.json["runners"]["unable"] == {
        "mac": "the request is for machines with memory>=128, label=studio;"
        " its memory is 64.0, its label is lab, quiet",
        "mini": "the request is for machines with chip=M4*, memory>=128, label=studio;"
        " its chip is not known, its memory is not known, its label is not known",
    }
    assert "no live runner can take this request now: mac: the request is for machines with" in done.err
    able = house.kakeya(*RUN, "--on", "chip=M4*,memory>=64,label=lab").json["runners"]
    assert (able["able"], list(able["unable"])) == (["mac"], ["mini"])

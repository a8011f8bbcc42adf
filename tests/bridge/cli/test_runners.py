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
from tests.fixtures.repo import RepoFixture

RUN = ("run", "--preset", "probe", "--json")


def here(repo: RepoFixture, name: str = "mac", **changes: Any) -> RunnerInfo:
    """A registration of a runner that is live now and serves this repository's remote."""
    fields: dict[str, Any] = {
        "now": datetime.now(UTC),
        "audience": refs.audience_of(str(repo.remote)),
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
        if schema.get("format") != "model"  # of which a runner shows its choices
    }
    return offer(name, digest=preset.digest, parameters=known, **changes)


def publish(repo: RepoFixture, base: RunnerInfo, key: Path | None = None) -> RunnerInfo:
    whole, signature = (base, None) if key is None else signed(key, base)
    put(repo.remote, refs.RUNNERS + base.name, whole.to_bytes(), signature)
    return whole


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return signing.ensure_key(tmp_path / "key", "a runner")


@pytest.mark.slow
def test_runners_are_listed_with_their_state_and_trust(repo: RepoFixture, key: Path):
    publish(repo, here(repo), key)
    publish(repo, here(repo, "old", age_s=86_400, id="e" * 16, state=State.STOPPED))
    repo.kakeya("runners", "trust", "studio", "--key", public_line(key))
    other = signing.ensure_key(repo.root / "other", "absent")
    repo.kakeya("runners", "trust", "absent", "--key", public_line(other))
    done = repo.kakeya("runners", "--json")
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
    assert done.json["remote"] == str(repo.remote)
    text = repo.kakeya("runners").out
    assert "mac  idle, seen " in text
    assert "(trusted as studio)" in text
    assert "old  stopped at " in text
    assert "offers   probe" in text
    assert "machine  chip=Apple M4, label=lab,quiet, memory=64.0, runner=mac; kakeya-mac" in text
    assert "absent  not seen on this remote" in text


def test_a_key_that_is_not_trusted_cannot_be_distrusted(repo: RepoFixture, key: Path):
    none = repo.kakeya("runners", "distrust", "studio")
    assert none.code == 2
    assert "keys in it: none" in none.err
    repo.kakeya("runners", "trust", "studio", "--key", public_line(key))
    done = repo.kakeya("runners", "distrust", "studi")
    assert done.code == 2
    assert f"{repo.root / 'config' / 'trusted_runners'} has no key of 'studi'" in done.err
    assert "keys in it: studio" in done.err
    gone = repo.kakeya("runners", "distrust", "studio")
    assert (gone.code, "1 key(s) of studio removed" in gone.out) == (0, True)


@pytest.mark.slow
def test_runners_without_a_remote_lists_the_trusted_keys_and_says_so(repo: RepoFixture, key: Path):
    repo.kakeya("runners", "trust", "studio", "--key", public_line(key))
    repo.git("remote", "remove", "origin")
    done = repo.kakeya("runners", "--json")
    assert done.code == 0
    assert [(entry["name"], entry["key"]) for entry in done.json["runners"]] == [("studio", public_line(key))]
    assert done.json["remote"] is None
    assert "only the trusted keys are listed" in done.err
    outside = repo.kakeya("runners", cwd=repo.root)
    assert outside.code == 0
    assert f"studio  (trusted)  {public_line(key)}" in outside.out
    assert repo.kakeya("runners", "--remote", "nowhere").code == 6
    assert repo.kakeya("runners", "--remote", "/no/such.git").code == 6


def test_hostile_infos_are_counted_and_show_nothing_to_a_terminal(repo: RepoFixture):
    put(repo.remote, refs.RUNNERS + "evil", b'{"name": "\x1b]0;owned\x07"}')
    put(repo.remote, refs.RUNNERS + "thief", here(repo, "mac").to_bytes())
    publish(repo, here(repo, "mac", machine={"chip": "M4 " + "x" * 900}))
    done = repo.kakeya("runners")
    assert done.code == 0, done.err
    assert "\x1b" not in done.out + done.err
    assert "2 invalid registration(s)" in done.err
    assert max(len(line) for line in done.out.splitlines()) < 300


@pytest.mark.slow
def test_a_key_from_the_bus_is_shown_and_never_trusted(repo: RepoFixture, key: Path):
    whole = publish(repo, here(repo), key)
    done = repo.kakeya("runners", "trust", "mac")
    assert done.code == 2
    assert signing.fingerprint(whole.public_key or "") in done.out
    assert f"kakeya_mac runners trust mac --key '{whole.public_key}'" in done.out
    assert "compare it" in done.out
    assert repo.kakeya("runners", "--json").json["runners"][0]["trusted"] is False
    assert not (repo.root / "config" / "trusted_runners").exists()
    unknown = repo.kakeya("runners", "trust", "unknown")
    assert unknown.code == 2
    assert "runners seen: mac" in unknown.err
    publish(repo, here(repo, "plain", id="d" * 16))
    assert (
        "no runner named 'plain' publishes a signed registration"
        in repo.kakeya("runners", "trust", "plain").err
    )


def test_the_first_key_is_pinned_on_request_and_never_replaced(repo: RepoFixture, key: Path):
    pinned = repo.root / "config" / "trusted_runners"
    nothing = repo.kakeya("runners", "trust", "--first")
    assert (nothing.code, "no runner publishes a signed registration" in nothing.err) == (2, True)
    whole = publish(repo, here(repo), key)
    done = repo.kakeya("runners", "trust", "--first")
    assert done.code == 0, done.err
    assert f"trusted: mac {signing.fingerprint(whole.public_key or '')} ({pinned})" in done.out
    assert "compare it" in done.out
    before = pinned.read_bytes()
    again = repo.kakeya("runners", "trust", "--first")
    assert (again.code, "already trusted: mac" in again.out) == (0, True)
    other = signing.ensure_key(repo.root / "other", "another")
    publish(repo, here(repo), other)
    for name in ((), ("mac",)):
        changed = repo.kakeya("runners", "trust", "--first", *name)
        assert changed.code == 2
        assert signing.fingerprint(public_line(other)) in changed.err
        assert f"pinned is mac {signing.fingerprint(public_line(key))}" in changed.err
    assert pinned.read_bytes() == before


def test_of_several_published_keys_none_is_first_without_a_name(repo: RepoFixture, key: Path):
    other = signing.ensure_key(repo.root / "other", "another")
    publish(repo, here(repo), key)
    publish(repo, here(repo, "second", id="b" * 16), other)
    several = repo.kakeya("runners", "trust", "--first")
    assert several.code == 2
    assert "2 different keys" in several.err
    assert not (repo.root / "config" / "trusted_runners").exists()
    assert repo.kakeya("runners", "trust", "--first", "second").out.startswith("trusted: second ")
    assert repo.kakeya("runners", "trust", "--first", "mac").out.startswith("trusted: mac ")
    repo.kakeya("runners", "revoke", "mac")
    revoked = repo.kakeya("runners", "trust", "--first", "mac")
    assert (revoked.code, "revoked" in revoked.err) == (2, True)


def test_first_goes_without_a_key_and_trust_without_neither(repo: RepoFixture):
    assert repo.kakeya("runners", "trust", "--first", "--key", "x").code == 2
    assert "Missing argument 'NAME'" in repo.kakeya("runners", "trust").err


@pytest.mark.slow
def test_presets_of_live_runners_are_listed_with_who_takes_them(repo: RepoFixture, key: Path):
    probe = real("probe", typical_s=2.5)
    tests = real("tests", available=False, why="its policy does not allow tests")
    special = offer("special", summary="Theirs alone.")
    publish(repo, here(repo, presets=(probe, tests, special)), key)
    publish(repo, here(repo, "second", id="b" * 16, presets=(real("probe"),)))
    publish(repo, here(repo, "gone", id="c" * 16, age_s=86_400, presets=(real("kv"),)))
    repo.kakeya("runners", "trust", "mac", "--key", public_line(key))
    done = repo.kakeya("presets", "--remote", "--json")
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
    text = repo.kakeya("presets", "tests", "--remote", str(repo.remote)).out
    assert "-p path=<string>" in text
    assert "mac (trusted key): not now: its policy does not allow tests" in text
    missing = repo.kakeya("presets", "nothing", "--remote")
    assert missing.code == 2
    assert "mac" in missing.err


def test_run_warns_when_no_runner_can_take_it_and_still_pushes(repo: RepoFixture):
    refused = offer("probe", available=False, why="its policy does not allow probe")
    publish(repo, here(repo, presets=(refused,)))
    publish(repo, here(repo, "old", id="e" * 16, age_s=86_400))
    done = repo.kakeya(*RUN)
    assert done.code == 0, done.err
    assert "no live runner can take this request now: mac: its policy does not allow probe;" in done.err
    assert "old: not seen since " in done.err
    answer = done.json
    assert (answer["runners"]["live"], answer["runners"]["able"]) == (1, [])
    assert set(answer["runners"]["unable"]) == {"mac", "old"}
    assert answer["warnings"][0].startswith("no live runner")
    assert f"refs/mac-bridge/inbox/{answer['nonce']}" in repo.remote_refs()


def test_run_says_at_once_which_conditions_no_live_runner_meets(repo: RepoFixture):
    publish(repo, here(repo))
    publish(repo, here(repo, "mini", id="e" * 16, machine={}))
    done = repo.kakeya(*RUN, "--on", "chip=M4*,memory>=128,label=studio")
    assert done.code == 0, done.err
    assert done.json["runners"]["able"] == []
    assert done.json["runners"]["unable"] == {
        "mac": "the request is for machines with memory>=128, label=studio;"
        " its memory is 64.0, its label is lab, quiet",
        "mini": "the request is for machines with chip=M4*, memory>=128, label=studio;"
        " its chip is not known, its memory is not known, its label is not known",
    }
    assert "no live runner can take this request now: mac: the request is for machines with" in done.err
    able = repo.kakeya(*RUN, "--on", "chip=M4*,memory>=64,label=lab").json["runners"]
    assert (able["able"], list(able["unable"])) == (["mac"], ["mini"])


def test_an_owners_preset_is_asked_for_by_what_its_runner_publishes(repo: RepoFixture):
    own = {
        "shots": Property(type="integer", minimum=1, maximum=9),
        "word": Property(type="string", pattern="(a+)+"),
    }
    publish(repo, here(repo, presets=(offer("photo", parameters=own, aliases=("picture",)),)))
    done = repo.kakeya(
        "run", "--preset", "picture", "-p", "shots=3", "-p", "word=x", "--require-runner", "--json"
    )
    assert done.code == 0, done.err
    assert "photo is not installed here" in done.err
    assert (done.json["preset"], done.json["commit_measured"]) == ("photo", None)
    assert done.json["runners"]["able"] == ["mac"]
    wrong = repo.kakeya("run", "--preset", "photo", "-p", "shots=10", "-p", "word=x")
    assert (wrong.code, "10 is greater than the maximum of 9" in wrong.err) == (2, True)
    unknown = repo.kakeya("run", "--preset", "foto")
    assert (unknown.code, "no preset is named 'foto' here, and no live runner on" in unknown.err) == (2, True)


def test_require_runner_pushes_nothing_that_no_live_runner_takes(repo: RepoFixture):
    publish(repo, here(repo, presets=(offer("probe", available=False, why="it is draining"),)))
    before = repo.remote_refs()
    done = repo.kakeya("run", "--preset", "probe", "--require-runner", "--json")
    assert (done.code, done.json["error"]) == (9, "NoRunner")
    assert "nothing was pushed" in done.json["message"]
    assert "mac: it is draining" in done.json["message"]
    assert repo.remote_refs() == before
    # Without it the request waits; what is known is said.
    waits = repo.kakeya("run", "--preset", "probe", "--json")
    assert (waits.code, waits.json["commit_measured"]) == (0, False)
    assert "mac: it is draining" in waits.err
    [row] = repo.kakeya("queue", "--json").json["requests"]
    assert row["commit_measured"] is False

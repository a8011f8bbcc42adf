"""Registrations of runners on real remotes: published, read back, and what is left out."""

from __future__ import annotations

import json
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest

from bridge import signing
from bridge.bus.registry import MAX_REGISTRATIONS, Registry, read_registry, register, remove_old_registrations
from bridge.errors import BusError, RemoteUnreachable
from bridge.git.cache import GitCache
from bridge.protocol import refs
from bridge.protocol.runner_info import MAX_BYTES, RunnerLoad, State, Work, is_live, parse_info
from bridge.signing.trust import TrustLevel
from tests.bridge.registrations import NOW, altered, info, offer, put, signed
from tests.fixtures.bus import BusFixture, snapshot

REF = refs.RUNNERS + "mac"


def read(bus: BusFixture, **trusted: str) -> Registry:
    return read_registry(bus.cache, trusted={value: name for name, value in trusted.items()})


def test_registration_comes_back_as_it_was_published(bus: BusFixture):
    job = Work(nonce="20260301t120000z0123456789ab", preset="probe", elapsed_s=3.5)
    busy = info(
        state=State.BUSY, job=job, load=RunnerLoad(pending=2, done=7, load_1m=1.5), models={"m": "missing"}
    )
    before = snapshot(bus.repo.clone)
    place = register(bus.cache, busy, None, now=NOW)
    assert (place.ref, place.name) == (REF, "mac")
    found = read(bus)
    assert [seen.info for seen in found.seen] == [busy]
    assert found.seen[0].trust is TrustLevel.UNSIGNED
    assert found.left_out == 0
    assert found.held == {REF: place.commit}
    assert snapshot(bus.repo.clone) == before
    shown = bus.repo.git("show", "--no-patch", "--format=%P|%s", place.ref, cwd=bus.repo.remote)
    assert shown == "|kakeya-mac runner: mac [skip ci]"


def test_next_registration_replaces_the_last_one(bus: BusFixture):
    place = register(bus.cache, info(), None, now=NOW)
    later = info(now=NOW + timedelta(minutes=1))
    again = register(bus.cache, later, None, place=place, now=NOW)
    assert again.ref == place.ref
    assert again.commit != place.commit
    assert [seen.info for seen in read(bus).seen] == [later]


def test_restarted_runner_takes_its_own_name_back(bus: BusFixture):
    register(bus.cache, info(), None, now=NOW)
    place = register(bus.cache, info(session="00000000000000bb"), None, now=NOW)
    assert place.name == "mac"


def test_second_live_runner_of_a_name_gets_another_one(bus: BusFixture):
    first, second = info(), info(id="fedcba9876543210")
    one = register(bus.cache, first, None, now=NOW)
    two = register(bus.cache, second, None, now=NOW)
    assert (one.name, two.name) == ("mac", "mac-fedcba")
    assert {seen.name: seen.info for seen in read(bus).seen} == {"mac": first, "mac-fedcba": second}
    again = register(bus.cache, first, None, place=one, now=NOW)
    assert again.name == "mac"


def test_name_of_a_dead_runner_is_free(bus: BusFixture):
    register(bus.cache, info(age_s=3600), None, now=NOW)
    assert register(bus.cache, info(id="f" * 16), None, now=NOW).name == "mac"
    register(bus.cache, info("b", state=State.STOPPED), None, now=NOW)
    assert register(bus.cache, info("b", id="e" * 16), None, now=NOW).name == "b"


def test_runner_that_lost_its_ref_takes_another(bus: BusFixture):
    place = register(bus.cache, info(), None, now=NOW)
    put(bus.remote, REF, info(id="f" * 16).to_bytes())
    again = register(bus.cache, info(), None, place=place, now=NOW)
    assert again.name == "mac-012345"
    bus.repo.git("update-ref", "-d", again.ref, cwd=bus.repo.remote)
    third = register(bus.cache, info(session="c" * 16), None, place=again, now=NOW)
    assert third.name == "mac-012345"


def test_rubbish_in_a_runners_ref_is_overwritten(bus: BusFixture):
    put(bus.remote, REF, b"rubbish")
    assert register(bus.cache, info(), None, now=NOW).name == "mac"
    assert [seen.name for seen in read(bus).seen] == ["mac"]


def test_server_that_takes_only_branches_gets_a_branch(bus: BusFixture):
    bus.allow_only_branches()
    place = register(bus.cache, info(), None, now=NOW)
    assert place.ref == refs.BRANCH_RUNNERS + "mac"
    again = register(bus.cache, info(), None, place=place, now=NOW)
    assert again.ref == place.ref
    assert [seen.name for seen in read(bus).seen] == ["mac"]


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("name", ["a..b", "a.lock", "a.", "x.y"])
def test_every_runner_name_gets_a_ref_that_git_takes(bus: BusFixture, name: str):
    register(bus.cache, info(name), None, now=NOW)
    assert [seen.info.name for seen in read(bus).seen] == [name]


def test_signature_is_worth_what_its_key_is_worth_here(bus: BusFixture, tmp_path: Path):
    key = signing.ensure_key(tmp_path / "key", "a runner")
    whole, signature = signed(key, info())
    register(bus.cache, whole, signature, now=NOW)
    number = signing.fingerprint(whole.public_key or "")
    listed = subprocess.run(["ssh-keygen", "-lf", signing.public_key(key)], capture_output=True, text=True)
    assert listed.stdout.split()[1] == number
    [unknown] = read(bus).seen
    assert (unknown.trust, unknown.signer) == (TrustLevel.UNTRUSTED_KEY, number)
    [known] = read(bus, studio=number).seen
    assert (known.trust, known.signer) == (TrustLevel.TRUSTED, "studio")


def test_registration_of_a_key_that_did_not_sign_it_is_left_out(bus: BusFixture, tmp_path: Path):
    key = signing.ensure_key(tmp_path / "key", "a runner")
    other = signing.ensure_key(tmp_path / "other", "stranger")
    whole, signature = signed(key, info())
    _, others = signed(other, info())
    as_result = signing.sign(key, signing.RESULT_NAMESPACE, whole.to_bytes())
    bad_key = altered(whole, public_key="ssh-ed25519 " + "A" * 33)
    for data, wrong in (
        (whole.to_bytes(), others),  # another key's signature of other bytes
        (whole.to_bytes(), signing.sign(other, signing.RUNNER_NAMESPACE, whole.to_bytes())),
        (whole.to_bytes(), as_result),
        (whole.to_bytes(), b"no signature"),
        (whole.to_bytes(), None),
        (altered(whole, version="9"), signature),
        (info().to_bytes(), signing.sign(key, signing.RUNNER_NAMESPACE, info().to_bytes())),
        (bad_key, signing.sign(key, signing.RUNNER_NAMESPACE, bad_key)),
    ):
        put(bus.remote, REF, data, wrong)
        found = read(bus)
        assert (found.seen, found.left_out) == ((), 1)


GOOD = info()
HOSTILE = {
    "huge": altered(GOOD, version="x" * MAX_BYTES),
    "not JSON": b"{",
    "not UTF-8": b"\xff\xfe",
    "a list": b"[]",
    "duplicate keys": GOOD.to_bytes().replace(b'"name"', b'"version": "1", "name"', 1),
    "an unknown key": altered(GOOD, trusted=True),
    "a text where a number belongs": altered(GOOD, interval_s="60"),
    "a number where a text belongs": altered(GOOD, version=1),
    "true as a number": altered(GOOD, interval_s=True),
    "infinite": GOOD.to_bytes().replace(b"60.0", b"1e999"),
    "not a number": GOOD.to_bytes().replace(b"60.0", b"NaN"),
    "an escape": altered(GOOD, version="\x1b]0;owned\x07"),
    "a right-to-left override": altered(GOOD, machine={"chip": "\u202egnp.exe"}),
    "an escape in a key": altered(GOOD, models={"\x1b[2J": "missing"}),
    "half a surrogate": altered(GOOD).replace(b'"0.1.0"', b'"\\ud800"'),
    "an unknown state": altered(GOOD, state="dead"),
    "no such day": altered(GOOD, seen_at="2026-02-31T00:00:00Z"),
    "a slash in the name": altered(GOOD, name="a/b"),
    "a line break in the key": altered(GOOD, public_key="ssh-ed25519 " + "A" * 40 + "\n* x"),
    "another version of the schema": altered(GOOD, schema_version=2),
    "never renewed": altered(GOOD, interval_s=1e8),
    "too many presets": altered(GOOD, presets=[json.loads(offer().model_dump_json())] * 257),
    "nested": altered(GOOD, machine=json.loads("[" * 50 + "]" * 50)),
    "a bound beyond all floats": altered(GOOD).replace(
        b'"minimum": 1,', b'"minimum": -1' + b"0" * 400 + b","
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_info_is_refused(what: str):
    with pytest.raises(BusError):
        parse_info(HOSTILE[what])
    assert parse_info(GOOD.to_bytes()) == GOOD


def test_hostile_registrations_are_left_out_and_counted(bus: BusFixture):
    for index, data in enumerate(HOSTILE.values()):
        put(bus.remote, f"{refs.RUNNERS}bad{index}", data)
    put(bus.remote, f"{refs.RUNNERS}elsewhere", GOOD.to_bytes())  # a registration under another name
    put(bus.remote, f"{refs.RUNNERS}deep/mac", GOOD.to_bytes())
    register(bus.cache, GOOD, None, now=NOW)
    head = bus.repo.head()
    bus.point(f"{refs.RUNNERS}commit", head)  # no registration in it
    bus.point(f"{refs.RUNNERS}blob", bus.repo.git("rev-parse", "HEAD:README.md"))
    found = read(bus)
    assert [seen.name for seen in found.seen] == ["mac"]
    assert found.left_out == len(HOSTILE) + 4


@pytest.mark.slow
def test_flood_of_registrations_has_a_bounded_cost(bus: BusFixture):
    text = info("b").to_bytes().decode()
    flood = [
        f"commit {refs.RUNNERS}b{index:04d}\ncommitter A <a@b.org> {index} +0000\ndata 5\nflood\n"
        f"M 100644 inline runner.json\ndata {len(text)}\n{text}\n"
        for index in range(2 * MAX_REGISTRATIONS + 10)
    ]
    bus.repo.git("fast-import", "--quiet", cwd=bus.repo.remote, input="".join(flood))
    register(bus.cache, info("a"), None, now=NOW)
    register(bus.cache, info("zebra"), None, now=NOW)
    # Anyone with push rights can hide a registration; nothing is decided by its absence.
    found = read(bus)
    assert ([seen.name for seen in found.seen], found.left_out) == (["a"], 2 * MAX_REGISTRATIONS + 11)


def test_runner_is_listed_once(bus: BusFixture):
    put(bus.remote, f"{refs.RUNNERS}mac-012345", info(age_s=30).to_bytes())
    put(bus.remote, REF, info().to_bytes())
    put(bus.remote, f"{refs.BRANCH_RUNNERS}mac", info(id="f" * 16).to_bytes())
    assert [(seen.name, seen.ref) for seen in read(bus).seen] == [
        ("mac", REF),
        ("mac", f"{refs.BRANCH_RUNNERS}mac"),
    ]


def test_runner_is_live_for_three_intervals_and_a_minute():
    def live(age_s: float, **changes: object) -> bool:
        return is_live(info(age_s=age_s, **changes), NOW)

    assert live(0)
    assert live(3 * 60 + 60)
    assert not live(3 * 60 + 61)
    assert live(3 * 5 + 60, interval_s=5.0)
    assert not live(3 * 5 + 61, interval_s=5.0)
    assert live(-86_400)
    assert not live(-86_401)
    assert not live(0, state=State.STOPPED)


def test_texts_are_written_on_one_plain_line():
    odd = info(machine={"chip": "M4\x1b[31m\nMax\u202e"}, tools={"git": "2.39\t"})
    assert parse_info(odd.to_bytes()).machine == {"chip": "M4 Max"}


def test_remote_that_is_away_is_one_clear_error(bus: BusFixture, tmp_path: Path):
    cache = GitCache(tmp_path / "cache.git", str(tmp_path / "nothing.git"))
    for reach in (read_registry, lambda cache: register(cache, info(), None, now=NOW)):
        with pytest.raises(RemoteUnreachable):
            reach(cache)


def test_registration_too_large_to_be_read_is_not_published(bus: BusFixture):
    presets = tuple(offer(f"p{n}", summary="x" * 1000, aliases=("y" * 64,) * 32) for n in range(256))
    with pytest.raises(BusError, match="at most"):
        register(bus.cache, info(presets=presets), None, now=NOW)


@pytest.mark.slow
def test_old_registrations_are_removed_and_no_others(bus: BusFixture):
    register(bus.cache, info("old", age_s=20 * 86_400), None, now=NOW)
    register(bus.cache, info("away", age_s=3600, id="a" * 16), None, now=NOW)
    register(bus.cache, info("here", id="b" * 16), None, now=NOW)
    assert remove_old_registrations(bus.cache, older_than=timedelta(days=14), now=NOW) == ["old"]
    assert [seen.name for seen in read(bus).seen] == ["away", "here"]

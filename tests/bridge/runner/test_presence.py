"""A runner's card, kept current: what it says of this machine, when it is pushed, what if it cannot be."""

from __future__ import annotations

import json
import shutil
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bridge import signing
from bridge.bus.catalogue import publish_card, read_cards
from bridge.bus.git import Git
from bridge.bus.results import Standing
from bridge.protocol import refs
from bridge.protocol.runner_info import RunnerCard, State, Work
from bridge.runner.durations import KEPT, Durations
from bridge.runner.policy.hours import DAYS
from bridge.runner.presence import Presence
from tests.bridge.cards import card
from tests.bridge.runner.bench import Bench
from tests.bridge.runner.folders import model_folder
from tests.houses import House

REF = refs.RUNNERS + "mac"
JOB = Work(nonce="20260301t120000z0123456789ab", preset="echo", elapsed_s=1.0)


class Clock:
    """A monotonic clock and the time of day, both moved by hand."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.start = datetime.now(UTC)

    def __call__(self) -> float:
        return self.seconds

    def now(self) -> datetime:
        return self.start + timedelta(seconds=self.seconds - 1000.0)


@pytest.fixture
def bench(house: House, monkeypatch: pytest.MonkeyPatch) -> Bench:
    for name, value in house.env.items():
        monkeypatch.setenv(name, value)
    bench = Bench(house)
    bench.install({"echo": "print(arg)", "quiet": "pass"})
    return bench


@pytest.fixture
def clock() -> Clock:
    return Clock()


def presence(bench: Bench, clock: Clock, name: str = "mac", **changes: object) -> Presence:
    station = bench.station(name)
    git = Git(bench.house.clone)
    return Presence(station, git, clock=clock, now=clock.now, **changes)  # type: ignore[arg-type]


def tip(bench: Bench, ref: str = REF) -> str | None:
    lines = bench.house.git("for-each-ref", "--format=%(objectname)", ref, cwd=bench.house.remote)
    return lines or None


def published(bench: Bench) -> RunnerCard:
    [seen] = read_cards(Git(bench.house.clone), str(bench.house.remote)).seen
    return seen.card


def test_a_card_says_what_this_machine_is_and_offers(bench: Bench, clock: Clock):
    bench.policy(
        'allow_presets = ["echo", "gate", "tests", "throughput"]\nmax_timeout_s = 77\n'
        '[quotas]\nunsigned = 20\n"ci@example.org" = 500\n'
    )
    found = presence(bench, clock).card(State.BUSY, JOB, pending=3, done=4)
    assert found.name == "mac"
    assert found.audience == refs.audience_of(str(bench.house.remote))
    assert found.limits.max_timeout_s == 77
    assert found.limits.quotas["max_queued_unsigned"] == 20
    assert b"ci@example.org" not in found.to_bytes()
    assert (found.load.pending, found.load.done) == (3, 4)
    assert found.machine["python"]
    assert found.tools["git"]
    echo = found.offer("echo")
    assert echo is not None
    assert (echo.available, echo.why) == (True, None)
    assert echo.parameters["word"].default == "test"
    assert echo.parameters["word"].pattern == "[^-].*"
    quiet = found.offer("quiet")
    assert quiet is not None
    assert not quiet.available
    assert quiet.why == "its policy does not allow quiet"
    tests = found.offer("tests")
    assert tests is not None
    assert not tests.available  # it runs code of the commit, which the policy does not allow
    available = [offer.available for offer in found.presets]
    assert available == sorted(available, reverse=True)


def test_a_card_says_which_model_is_missing_and_which_stands_in(bench: Bench, clock: Clock):
    need = '[models.big]\nmac = "a big one"\n'
    bench.preset("big", ["${python}", "-c", "pass", "${model:big}"], tail=need)
    stand_in = '[models.small]\nmac = "a small one"\nstand_in = "demo-target"\n'
    bench.preset("small", ["${python}", "-c", "pass", "${model:small}"], tail=stand_in)
    found = presence(bench, clock).card(State.IDLE)
    big = found.offer("big")
    assert big is not None
    assert big.why == "it lacks models of big: big"
    assert found.models["big"] == "missing"
    if not found.machine["metal"]:
        assert found.models["small"].startswith("stand-in demo-target: ")
    folder = model_folder(bench.house.root / "weights")
    bench.policy(f'[models]\nbig = "{folder}"\n')
    found = presence(bench, clock).card(State.IDLE)
    again = found.offer("big")
    assert again is not None
    assert again.available
    assert found.models["big"] == str(folder)


def test_a_card_shows_what_the_policy_leaves_of_a_preset(bench: Bench, clock: Clock):
    bench.policy(
        '[presets.echo]\ntimeout_s = 10\n[presets.echo.params.word]\nmaxLength = 4\nenum = ["test", "x"]\n'
    )
    echo = presence(bench, clock).card(State.IDLE).offer("echo")
    assert echo is not None
    assert echo.timeout_s == 10
    assert (echo.parameters["word"].maxLength, echo.parameters["word"].enum) == (4, ("test", "x"))


def test_a_card_tells_of_hours(bench: Bench, clock: Clock):
    never = f'hours = ["{DAYS[(clock.now().astimezone().weekday() + 3) % 7]}"]\n'
    for text, available in ((never, True), (never + 'outside_hours = "refuse"\n', False)):
        bench.policy(text)
        echo = presence(bench, clock).card(State.IDLE).offer("echo")
        assert echo is not None
        assert echo.available is available
        assert echo.why is not None
        assert echo.why.startswith("it begins jobs only within ")


def test_a_card_offers_nothing_while_the_policy_is_wrong(bench: Bench, clock: Clock):
    station = bench.station()
    shown = Presence(station, Git(bench.house.clone), clock=clock, now=clock.now)
    assert shown.card(State.IDLE).presets[0].available
    bench.policy("allow = 1")
    assert station.rulebook.refresh()
    shown.look_again()
    offers = shown.card(State.IDLE).presets
    assert {(offer.available, offer.why) for offer in offers} == {
        (False, "its policy is broken, so it takes nothing")
    }


def test_a_preset_for_another_machine_is_not_available_here(bench: Bench, clock: Clock):
    bench.preset("giant", ["${python}", "-c", "pass"], tail="[requires]\nmemory_gb = 100000\n")
    giant = presence(bench, clock).card(State.IDLE).offer("giant")
    assert giant is not None
    assert giant.why is not None
    assert giant.why.startswith("it cannot run giant: it needs 100000 GB")


def test_secrets_of_the_environment_are_not_published(
    bench: Bench, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KAKEYA_MODEL_BIG", str(bench.house.root / "hunter2-hunter2"))
    monkeypatch.setenv("API_TOKEN", "hunter2-hunter2")
    model_folder(bench.house.root / "hunter2-hunter2")
    bench.preset("big", ["${python}", "-c", "pass", "${model:big}"], tail='[models.big]\nmac = "a big one"\n')
    data = presence(bench, clock).card(State.IDLE).to_bytes()
    assert b"hunter2" not in data
    assert b"[redacted:API_TOKEN]" in data


def test_it_is_told_at_once_then_every_interval_and_not_in_between(bench: Bench, clock: Clock):
    here = presence(bench, clock)
    assert here.tell() is None
    first = tip(bench)
    assert first is not None
    for _ in range(5):
        clock.seconds += 11
        assert here.tell(pending=3) is None
    assert tip(bench) == first
    clock.seconds += 6
    assert here.tell(done=2) is None
    assert tip(bench) != first
    assert published(bench).load.done == 2


def test_a_change_is_told_after_it_settled(bench: Bench, clock: Clock):
    here = presence(bench, clock)
    here.tell()
    first = tip(bench)
    clock.seconds += 9
    here.tell(State.BUSY, JOB)
    assert tip(bench) == first
    clock.seconds += 1
    here.tell(State.BUSY, JOB)
    assert published(bench).state is State.BUSY
    assert published(bench).job == JOB
    assert len(bench.house.remote_refs() - {"refs/heads/main"}) == 1


def test_what_is_available_is_looked_at_once_a_minute(bench: Bench, clock: Clock):
    need = '[models.big]\nmac = "a big one"\n'
    bench.preset("big", ["${python}", "-c", "pass", "${model:big}"], tail=need)
    here = presence(bench, clock, interval_s=300)
    assert here.tell() is None
    model_folder(Path(bench.house.env["HOME"]) / "kakeya-models" / "big")
    clock.seconds += 59
    here.tell()
    big = published(bench).offer("big")
    assert big is not None
    assert not big.available
    clock.seconds += 1
    here.tell()
    big = published(bench).offer("big")
    assert big is not None
    assert big.available


def test_it_is_signed_by_the_runners_key_in_a_namespace_of_its_own(bench: Bench, clock: Clock):
    here = presence(bench, clock)
    here.tell()
    key = bench.station().public_key
    assert key is not None
    trusted = {signing.fingerprint(key): "studio"}
    [seen] = read_cards(Git(bench.house.clone), str(bench.house.remote), trusted=trusted).seen
    assert (seen.standing, seen.signer) == (Standing.TRUSTED, "studio")


def test_a_runner_whose_key_cannot_sign_is_listed_unsigned(bench: Bench, clock: Clock):
    here = presence(bench, clock)
    (bench.state / "runner" / "mac" / "id_ed25519").write_text("damaged")
    assert here.tell() is None
    [seen] = read_cards(Git(bench.house.clone), str(bench.house.remote)).seen
    assert seen.standing is Standing.UNSIGNED


def test_a_remote_that_is_away_costs_one_sentence_and_longer_pauses(bench: Bench, clock: Clock):
    here = presence(bench, clock)
    away = bench.house.remote.with_name("away.git")
    bench.house.remote.rename(away)
    said = here.tell()
    assert said is not None
    assert "not published" in said
    clock.seconds += 9
    assert here.tell() is None
    clock.seconds += 1
    assert here.tell() is None  # tried again, and the sentence was said
    away.rename(bench.house.remote)
    clock.seconds += 15
    here.tell()
    assert tip(bench) is None  # the pause has doubled
    clock.seconds += 5
    here.tell()
    assert tip(bench) is not None


def test_a_second_runner_of_one_name_is_told_under_which_it_is_listed(bench: Bench, clock: Clock):
    other = card("mac", now=clock.now(), audience="/elsewhere", id="f" * 16)
    publish_card(Git(bench.house.clone), str(bench.house.remote), other, None)
    here = presence(bench, clock)
    said = here.tell()
    listed = f"mac-{bench.station().identity.id[:6]}"
    assert said is not None
    assert f"listed as {listed}" in said
    clock.seconds += 60
    assert here.tell() is None
    names = [seen.name for seen in read_cards(Git(bench.house.clone), str(bench.house.remote)).seen]
    assert names == sorted(["mac", listed])


def test_the_end_is_told_at_once_and_only_by_who_was_there(bench: Bench, clock: Clock):
    here = presence(bench, clock)
    assert here.stopped() is None
    assert tip(bench) is None
    here.tell()
    assert here.stopped(done=5) is None
    assert published(bench).state is State.STOPPED
    assert published(bench).load.done == 5


@pytest.mark.slow
def test_a_deleted_card_comes_back(bench: Bench, clock: Clock):
    here = presence(bench, clock)
    here.tell()
    bench.house.git("update-ref", "-d", REF, cwd=bench.house.remote)
    clock.seconds += 60
    here.tell()
    assert published(bench).state is State.IDLE


@pytest.mark.slow
def test_a_server_that_stops_taking_our_refs_gets_a_branch(bench: Bench, clock: Clock):
    here = presence(bench, clock)
    here.tell()
    hook = bench.house.remote / "hooks" / "update"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text('#!/bin/sh\ncase "$1" in refs/heads/*) exit 0;; *) exit 1;; esac\n')
    hook.chmod(0o755)
    clock.seconds += 60
    assert here.tell() is not None
    clock.seconds += 60
    here.tell()
    assert tip(bench, refs.BRANCH_RUNNERS + "mac") is not None


def test_two_threads_do_not_push_at_once(bench: Bench, clock: Clock):
    here = presence(bench, clock)
    said: list[str | None] = []
    threads = [threading.Thread(target=lambda: said.append(here.tell())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert said == [None] * 4
    assert tip(bench) is not None


def test_typical_times_are_medians_and_outlive_the_process(bench: Bench, clock: Clock):
    here = presence(bench, clock)
    for seconds in (1.0, 100.0, 3.0):
        here.took("echo", seconds)
    here.took("somebody-elses", 5.0)
    found = presence(bench, clock).card(State.IDLE).offer("echo")
    assert found is not None
    assert found.typical_s == 3.0
    stored = json.loads((bench.state / "runner" / "mac" / "durations.json").read_text())
    assert list(stored) == ["echo"]


def test_durations_are_bounded_and_survive_a_damaged_file(tmp_path: Path):
    path = tmp_path / "durations.json"
    for damage in (
        "",
        "[]",
        "{",
        '{"echo": 3}',
        '{"echo": ["x", true, -1, NaN]}',
        "\x00" * 100,
        "[" * 9999,
    ):
        path.write_text(damage)
        assert Durations(path, ["echo"]).typical("echo") is None
    known = Durations(path, ["echo"])
    for seconds in range(100):
        known.add("echo", float(seconds))
    known.add("echo", float("nan"))
    known.add("echo", -1.0)
    assert len(json.loads(path.read_text())["echo"]) == KEPT
    assert Durations(path, ["echo"]).typical("echo") == 89.5
    assert [file.name for file in tmp_path.iterdir()] == ["durations.json"]


def test_a_folder_that_is_gone_is_an_error_of_the_caller(tmp_path: Path):
    folder = tmp_path / "gone"
    folder.mkdir()
    known = Durations(folder / "durations.json", ["echo"])
    shutil.rmtree(folder)
    with pytest.raises(OSError):
        known.add("echo", 1.0)
    assert known.typical("echo") == 1.0

"""A runner's registration: what it says of this machine, when it is pushed, and what if it cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bridge import signing
from bridge.bus.registry import Registration, read_registry, register
from bridge.git.cache import GitCache
from bridge.protocol import refs
from bridge.protocol.runner_info import RunnerInfo, State, Work
from bridge.runner.config import PUBLIC_HOST, RunnerConfig
from bridge.runner.policy import DAYS
from bridge.runner.registration import Registrar
from bridge.runner.store import Store
from bridge.signing.trust import TrustLevel
from tests.bridge.runner.folders import model_folder
from tests.fixtures.repo import RepoFixture
from tests.fixtures.runner import Clock, RunnerFixture

REF = refs.RUNNERS + "mac"
JOB = Work(nonce="20260301t120000z0123456789ab", preset="echo", elapsed_s=1.0)


@pytest.fixture
def runner(repo: RepoFixture, monkeypatch: pytest.MonkeyPatch) -> RunnerFixture:
    for name, value in repo.env.items():
        monkeypatch.setenv(name, value)
    runner = RunnerFixture(repo)
    runner.install({"echo": "print(arg)", "quiet": "pass"})
    return runner


@pytest.fixture
def clock() -> Clock:
    return Clock()


def registrar(runner: RunnerFixture, clock: Clock, *, config: RunnerConfig | None = None) -> Registrar:
    config = config or runner.config_of()
    store = Store(config.folder / "store.sqlite")
    return Registrar(config, cache_of(runner), store, clock=clock, now=clock.now)


def cache_of(runner: RunnerFixture) -> GitCache:
    cache = GitCache(runner.repo.root / "cache.git", str(runner.repo.remote))
    cache.prepare()
    return cache


def seen(runner: RunnerFixture, trusted: dict[str, str] | None = None) -> list[Registration]:
    return list(read_registry(cache_of(runner), trusted=trusted).seen)


def published(runner: RunnerFixture) -> RunnerInfo:
    [only] = seen(runner)
    return only.info


def test_registration_says_what_the_machine_is_and_offers(runner: RunnerFixture, clock: Clock) -> None:
    runner.policy(
        'allow_presets = ["echo", "gate", "tests", "throughput"]\nmax_timeout_s = 77\n'
        '[quotas]\nunsigned = 20\n"ci@example.org" = 500\n'
    )
    found = registrar(runner, clock).info(State.BUSY, JOB, pending=3, done=4)
    assert found.name == "mac"
    assert found.audience == refs.audience_of(str(runner.repo.remote))
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
    assert quiet.why == "policy: the preset quiet is not allowed on this machine"
    tests = found.offer("tests")
    assert tests is not None
    assert not tests.available  # it runs code of the commit, which the policy does not allow
    available = [offer.available for offer in found.presets]
    assert available == sorted(available, reverse=True)


def test_registration_says_which_model_is_missing(runner: RunnerFixture, clock: Clock) -> None:
    need = '[models.big]\nmac = "a big one"\n'
    runner.preset("big", ["${python}", "-c", "pass", "${model:big}"], tail=need)
    stand_in = '[models.small]\nmac = "a small one"\nstand_in = "demo-target"\n'
    runner.preset("small", ["${python}", "-c", "pass", "${model:small}"], tail=stand_in)
    found = registrar(runner, clock).info(State.IDLE)
    big = found.offer("big")
    assert big is not None
    assert big.why is not None
    assert big.why.startswith("the model big is not on this machine")
    assert found.models["big"] == "missing"
    if not found.machine["metal"]:
        assert found.models["small"].startswith("stand-in demo-target: ")
    folder = model_folder(runner.repo.root / "weights")
    runner.policy(f'[models]\nbig = "{folder}"\n')
    found = registrar(runner, clock).info(State.IDLE)
    again = found.offer("big")
    assert again is not None
    assert again.available
    assert found.models["big"] == str(folder)


def test_registration_shows_the_bounds_of_the_policy(runner: RunnerFixture, clock: Clock) -> None:
    runner.policy(
        '[presets.echo]\ntimeout_s = 10\n[presets.echo.params.word]\nmaxLength = 4\nenum = ["test", "x"]\n'
    )
    echo = registrar(runner, clock).info(State.IDLE).offer("echo")
    assert echo is not None
    assert echo.timeout_s == 10
    assert (echo.parameters["word"].maxLength, echo.parameters["word"].enum) == (4, ("test", "x"))


def test_registration_tells_of_hours(runner: RunnerFixture, clock: Clock) -> None:
    never = f'hours = ["{DAYS[(clock.now().astimezone().weekday() + 3) % 7]}"]\n'
    for text, available in ((never, True), (never + 'outside_hours = "refuse"\n', False)):
        runner.policy(text)
        echo = registrar(runner, clock).info(State.IDLE).offer("echo")
        assert echo is not None
        assert echo.available is available
        assert echo.why is not None
        assert "jobs only within " in echo.why


def test_registration_offers_nothing_while_the_policy_is_wrong(runner: RunnerFixture, clock: Clock) -> None:
    config = runner.config_of()
    shown = registrar(runner, clock, config=config)
    assert shown.info(State.IDLE).presets[0].available
    runner.policy("allow = 1")
    assert config.rulebook.refresh()
    offers = shown.info(State.IDLE).presets
    assert not any(offer.available for offer in offers)
    assert len({offer.why for offer in offers}) == 1


def test_preset_for_another_machine_is_not_available(runner: RunnerFixture, clock: Clock) -> None:
    runner.preset("giant", ["${python}", "-c", "pass"], tail="[requires]\nmemory_gb = 100000\n")
    giant = registrar(runner, clock).info(State.IDLE).offer("giant")
    assert giant is not None
    assert giant.why is not None
    assert giant.why.startswith("the preset giant cannot run here: it needs 100000 GB")


def test_secrets_of_the_environment_are_not_published(
    runner: RunnerFixture, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAKEYA_MODEL_BIG", str(runner.repo.root / "hunter2-hunter2"))
    monkeypatch.setenv("API_TOKEN", "hunter2-hunter2")
    model_folder(runner.repo.root / "hunter2-hunter2")
    runner.preset(
        "big", ["${python}", "-c", "pass", "${model:big}"], tail='[models.big]\nmac = "a big one"\n'
    )
    data = registrar(runner, clock).info(State.IDLE).to_bytes()
    assert b"hunter2" not in data
    assert b"[redacted:API_TOKEN]" in data


def test_registration_is_renewed_at_each_interval(runner: RunnerFixture, clock: Clock) -> None:
    here = registrar(runner, clock)
    here.tell(State.IDLE)
    first = runner.tip(REF)
    assert first is not None
    for _ in range(5):
        clock.seconds += 11
        here.tell(State.IDLE, pending=3)
    assert runner.tip(REF) == first
    clock.seconds += 6
    here.tell(State.IDLE, done=2)
    assert runner.tip(REF) != first
    assert published(runner).load.done == 2


@pytest.mark.slow
def test_change_is_told_after_it_settled(runner: RunnerFixture, clock: Clock) -> None:
    here = registrar(runner, clock)
    here.tell(State.IDLE)
    first = runner.tip(REF)
    clock.seconds += 9
    here.tell(State.BUSY, JOB)
    assert runner.tip(REF) == first
    clock.seconds += 1
    here.tell(State.BUSY, JOB)
    assert published(runner).state is State.BUSY
    assert published(runner).job == JOB
    assert len(runner.repo.remote_refs() - {"refs/heads/main"}) == 1


def test_public_host_hears_of_a_change_with_the_next_registration(
    runner: RunnerFixture, clock: Clock
) -> None:
    here = registrar(runner, clock, config=replace(runner.config_of(), timing=PUBLIC_HOST))
    here.tell(State.IDLE)
    first = runner.tip(REF)
    clock.seconds += 599
    here.tell(State.BUSY, JOB)
    assert runner.tip(REF) == first
    clock.seconds += 1
    here.tell(State.BUSY, JOB)
    assert published(runner).state is State.BUSY


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [False, True])
def test_registration_is_signed_where_the_key_can_sign(
    runner: RunnerFixture, clock: Clock, damaged: bool
) -> None:
    here, key = registrar(runner, clock), runner.config_of().public_key
    assert key is not None
    if damaged:
        (runner.state / "runner" / "mac" / "id_ed25519").write_text("damaged")
    here.tell(State.IDLE)
    [only] = seen(runner, {signing.fingerprint(key): "studio"})
    expected = (TrustLevel.UNSIGNED, None) if damaged else (TrustLevel.TRUSTED, "studio")
    assert (only.trust, only.signer) == expected


def test_registration_that_failed_is_tried_again_after_the_interval(
    runner: RunnerFixture, clock: Clock
) -> None:
    here = registrar(runner, clock)
    away = runner.repo.remote.with_name("away.git")
    runner.repo.remote.rename(away)
    here.tell(State.IDLE)
    away.rename(runner.repo.remote)
    clock.seconds += 59
    here.tell(State.IDLE)
    assert runner.tip(REF) is None
    clock.seconds += 1
    here.tell(State.IDLE)
    assert runner.tip(REF) is not None


def test_second_runner_of_one_name_is_listed_under_another(runner: RunnerFixture, clock: Clock) -> None:
    here = registrar(runner, clock)
    other = here.info(State.IDLE).model_copy(update={"id": "f" * 16, "public_key": None})
    register(cache_of(runner), other, None, now=clock.now())
    here.tell(State.IDLE)
    clock.seconds += 60
    here.tell(State.IDLE)
    listed = f"mac-{runner.config_of().identity.id[:6]}"
    assert sorted(one.name for one in seen(runner)) == ["mac", listed]


def test_end_is_told_only_by_a_runner_that_was_registered(runner: RunnerFixture, clock: Clock) -> None:
    here = registrar(runner, clock)
    here.stopped()
    assert runner.tip(REF) is None
    here.tell(State.IDLE)
    here.stopped(done=5)
    assert (published(runner).state, published(runner).load.done) == (State.STOPPED, 5)

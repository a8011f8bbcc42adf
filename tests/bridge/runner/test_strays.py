"""A wish to stop that came too late is cleared away; one that may still count is never touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from bridge.bus.git import Update
from bridge.bus.handles import Held
from bridge.bus.requests import Submitted
from bridge.errors import RemoteUnreachable
from bridge.protocol import refs
from bridge.runner.strays import Strays
from tests.worlds import World


def wish(world: World, submitted: Submitted, *, number: int = 0, branch: bool = False) -> Held:
    """A commit of its own where a wish belongs; what it says plays no part here."""
    ref = (refs.BRANCH_CANCELS if branch else refs.CANCELS) + submitted.nonce
    commit = world.commit(submitted.commit, {"cancel.json": f"{number}".encode()})
    world.point(ref, commit)
    return Held(ref, commit)


def wishes(world: World) -> set[str]:
    """Nonces of the wishes that stand."""
    return {ref.rpartition("/")[2] for ref in world.house.remote_refs() if "cancel" in ref}


def seen(world: World) -> dict[str, Held]:
    """What the runner passes on: every wish whose request is not in the inbox."""
    pending = {one.nonce for one in world.mirror.refresh()}
    return {nonce: held for nonce, held in world.mirror.cancels().items() if nonce not in pending}


def drop(world: World, *names: str) -> None:
    for ref in names:
        world.house.git("update-ref", "-d", ref, cwd=world.house.remote)


def waiting(world: World) -> Submitted:
    return world.submit()


def waiting_on_its_branch_alone(world: World) -> Submitted:
    submitted = world.submit()
    drop(world, refs.inbox_ref(submitted.nonce))
    return submitted


def running(world: World) -> Submitted:
    submitted = world.submit()
    [pending] = [one for one in world.mirror.refresh() if one.nonce == submitted.nonce]
    world.claim(pending)
    return submitted


def running_and_out_of_the_inbox(world: World) -> Submitted:
    submitted = running(world)
    drop(world, refs.inbox_ref(submitted.nonce))
    return submitted


def running_with_nothing_else_left(world: World) -> Submitted:
    submitted = running_and_out_of_the_inbox(world)
    drop(world, submitted.ref)
    return submitted


def answered(world: World) -> Submitted:
    submitted = world.submit()
    world.answer(submitted)
    return submitted


def answered_beside_its_branch(world: World) -> Submitted:
    submitted = world.submit()
    drop(world, submitted.ref)
    world.answer(submitted)
    return submitted


def answered_under_somebodys_own_work(world: World) -> Submitted:
    submitted = answered(world)
    tip = world.house.git("rev-parse", submitted.ref, cwd=world.house.remote)
    world.point(submitted.ref, world.commit(tip, {"README.md": b"mine\n"}))
    return submitted


def gone(world: World) -> Submitted:
    submitted = world.submit()
    drop(world, submitted.ref, refs.inbox_ref(submitted.nonce))
    return submitted


KEPT: tuple[Callable[[World], Submitted], ...] = (
    waiting,
    waiting_on_its_branch_alone,
    running,
    running_and_out_of_the_inbox,
    running_with_nothing_else_left,
)
CLEARED: tuple[Callable[[World], Submitted], ...] = (
    answered,
    answered_beside_its_branch,
    answered_under_somebodys_own_work,
    gone,
)


@pytest.mark.slow
def test_only_wishes_for_what_is_answered_or_gone_are_cleared_away(world: World) -> None:
    kept = {make.__name__: make(world) for make in KEPT}
    cleared = {make.__name__: make(world) for make in CLEARED}
    late = {
        submitted.nonce: wish(world, submitted, branch=number % 2 == 1)
        for number, submitted in enumerate((*kept.values(), *cleared.values()))
    }
    Strays(world.mirror).clear(late)  # all of them, as if the look at the inbox were an old one
    left = wishes(world)
    names = {submitted.nonce: name for name, submitted in (kept | cleared).items()}
    assert {names[nonce] for nonce in left} == kept.keys()


def test_a_wish_that_was_made_anew_meanwhile_is_not_deleted(world: World) -> None:
    submitted = answered(world)
    old = wish(world, submitted)
    again = wish(world, submitted, number=1)
    strays = Strays(world.mirror)
    strays.clear({submitted.nonce: old})
    assert world.git.ls_remote(world.remote)[again.ref] == again.commit
    strays.clear(seen(world))
    assert wishes(world) == set()


def count_looks(world: World, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    looks: list[str] = []
    look = world.mirror.git.ls_remote

    def counted(remote: str, *patterns: str) -> dict[str, str]:
        looks.append(remote)
        return look(remote, *patterns)

    monkeypatch.setattr(world.mirror.git, "ls_remote", counted)
    return looks


def test_each_wish_is_looked_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted = waiting_on_its_branch_alone(world)
    held = wish(world, submitted)
    world.mirror.refresh()
    strays = Strays(world.mirror)
    looks = count_looks(world, monkeypatch)
    for _ in range(3):
        strays.clear({submitted.nonce: held})
    assert len(looks) == 1
    strays.clear({submitted.nonce: wish(world, submitted, number=1)})
    assert len(looks) == 2, "another wish is looked at again"
    strays.clear({})
    assert len(looks) == 2, "without a wish the remote is not asked"
    assert wishes(world) == {submitted.nonce}


def test_a_flood_of_wishes_is_cleared_away_a_few_at_a_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.runner.strays._AT_ONCE", 3)
    pushed: list[str] = []
    push = world.mirror.git.push

    def counted(remote: str, updates: Sequence[Update], **options: object) -> None:
        pushed.extend(update.ref for update in updates)
        push(remote, updates, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(world.mirror.git, "push", counted)
    commit = world.house.git("rev-parse", "HEAD")
    for number in range(7):
        world.point(refs.cancel_ref(f"20260301t120000z{number:012x}"), commit)
    strays = Strays(world.mirror)
    for expected in (4, 1, 0):
        strays.clear(seen(world))
        assert len(wishes(world)) == expected
    assert len(pushed) == 7


def test_a_server_that_keeps_its_refs_is_asked_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted = answered(world)
    late = {submitted.nonce: wish(world, submitted)}
    world.hook("update", 'case "$3" in *[1-9a-f]*) ;; *) echo "nothing is deleted here"; exit 1;; esac')
    strays = Strays(world.mirror)
    looks = count_looks(world, monkeypatch)
    for _ in range(2):
        strays.clear(late)
    assert len(looks) == 1
    assert wishes(world) == {submitted.nonce}


def test_a_remote_that_is_away_is_said_and_the_wish_is_cleared_away_later(world: World) -> None:
    submitted = answered(world)
    late = {submitted.nonce: wish(world, submitted)}
    strays = Strays(world.mirror)
    away = world.house.remote.with_name("away.git")
    world.house.remote.rename(away)
    with pytest.raises(RemoteUnreachable):
        strays.clear(late)
    away.rename(world.house.remote)
    strays.clear(late)
    assert wishes(world) == set()


def test_a_remote_that_vanishes_in_between_leaves_the_wish_for_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = answered(world)
    late = {submitted.nonce: wish(world, submitted)}
    strays = Strays(world.mirror)

    def broken(*_: object, **__: object) -> None:
        raise RemoteUnreachable("it broke off in the middle")

    with monkeypatch.context() as cut:
        cut.setattr(world.mirror.git, "push", broken)
        with pytest.raises(RemoteUnreachable):
            strays.clear(late)
    strays.clear(late)
    assert wishes(world) == set()

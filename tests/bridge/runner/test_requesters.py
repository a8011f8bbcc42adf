"""Who asked is found out in bounded work, and nobody's requests can be counted for another."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bridge import signing
from bridge.bus.mirror import Mirror, Pending
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest
from bridge.protocol.result import Reason
from bridge.runner.check import examine
from bridge.runner.requesters import Requesters
from bridge.runner.turns import Requester
from tests.bridge.runner.bench import Bench
from tests.houses import House


@pytest.fixture
def bench(house: House) -> Bench:
    made = Bench(house)
    made.install({"echo": "print(arg)"})
    return made


def make_key(bench: Bench, name: str) -> Path:
    """A key that the machine lists for requests."""
    key = signing.ensure_key(bench.house.root / "keys" / name, name)
    bench.config.mkdir(exist_ok=True)
    with (bench.config / "allowed_signers").open("a") as listed:
        listed.write(signing.allowed_line(signing.public_key(key), name, signing.REQUEST_NAMESPACE))
    return key


def signed(bench: Bench, key: Path, **changes: object) -> Manifest:
    manifest = bench.manifest(**changes)
    signature = signing.sign(key, signing.REQUEST_NAMESPACE, manifest.to_bytes())
    return bench.ask(signature=signature, **dict(manifest))


class Look:
    """A runner's view of its queue, look by look."""

    def __init__(self, bench: Bench, **limits: int) -> None:
        self.station = bench.station()
        self.mirror = Mirror(self.station.folder / "mirror.git", self.station.remote)
        self.requesters = Requesters(self.mirror.git, self.station, **limits)

    def pending(self) -> list[Pending]:
        return self.mirror.refresh()

    def known(self, after: timedelta = timedelta()) -> dict[str, Requester]:
        """Nonce → requester, of those known after one more look."""
        asking = self.requesters.look(self.pending(), (), datetime.now(UTC) + after)
        return {one.nonce: one.requester for one in asking if one.known}


def test_signed_requests_are_their_signers_and_all_others_are_nobodys(bench: Bench) -> None:
    ann = make_key(bench, "ann")
    stranger = signing.ensure_key(bench.house.root / "keys" / "stranger", "stranger")
    hers, plain, strangers = signed(bench, ann), bench.ask(), signed(bench, stranger)
    broken = bench.ask(signature=b"-----BEGIN SSH SIGNATURE-----\nU1NIU0lH\n-----END SSH SIGNATURE-----\n")
    unshaped = bench.manifest()
    bench.push_commit(unshaped, hers.workload_sha)
    known = Look(bench).known()
    assert known[hers.nonce] == "ann"
    assert [known[m.nonce] for m in (plain, strangers, broken, unshaped)] == [None] * 4


def test_a_signed_request_counts_neither_under_another_name_nor_once_it_expired(bench: Bench) -> None:
    ann = make_key(bench, "ann")
    hers = signed(bench, ann)
    copy = refs.inbox_ref(bench.manifest().nonce)
    bench.house.git("update-ref", copy, refs.inbox_ref(hers.nonce), cwd=bench.house.remote)
    view = Look(bench)
    assert view.known() == {hers.nonce: "ann", copy.rpartition("/")[2]: None}
    assert set(view.known(after=timedelta(hours=2)).values()) == {None}


def test_a_request_for_a_workflow_takes_no_turn(bench: Bench) -> None:
    bench.ask(transport="actions")
    assert Look(bench).known() == {}


def test_each_look_checks_a_few_signatures_and_remembers_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann = make_key(bench, "ann")
    asked = {signed(bench, ann).nonce for _ in range(3)}
    checks = []
    identify = signing.identify
    counted = lambda *args, **more: checks.append(1) or identify(*args, **more)  # noqa: E731 - one line
    monkeypatch.setattr(signing, "identify", counted)
    view = Look(bench, verifications=2)
    assert len(view.known()) == 2
    late = bench.ask().nonce  # does not overtake what was there before, whatever its name
    assert set(view.known()) == {*asked, late}
    assert len(view.known()) == 4
    assert len(checks) == 3


def test_who_asked_is_asked_anew_when_a_list_of_keys_changes(bench: Bench) -> None:
    ann = make_key(bench, "ann")
    asked, view = signed(bench, ann).nonce, Look(bench)
    assert view.known() == {asked: "ann"}
    revoked = bench.config / "revoked_keys"
    revoked.write_bytes(signing.public_key(ann).read_bytes())
    assert view.known() == {asked: None}
    revoked.write_text("rubbish\n")
    assert view.known() == {asked: None}
    revoked.unlink()
    assert view.known() == {asked: "ann"}


def test_each_look_reads_a_few_requests(bench: Bench) -> None:
    for _ in range(3):
        bench.ask()
    view = Look(bench, readings=2)
    assert [len(view.known()) for _ in range(3)] == [2, 3, 3]


def test_what_is_over_the_quota_is_refused_with_what_to_do(bench: Bench) -> None:
    bench.ask()
    view = Look(bench)
    [pending] = view.pending()
    now = datetime.now(UTC)
    git, station = view.mirror.git, view.station
    refused = examine(git, pending, station, now=now, answered=(), over_quota="at most 3 waiting")
    assert refused.refusal is not None
    assert refused.refusal.reason is Reason.QUOTA
    assert refused.refusal.message == "at most 3 waiting"
    assert "max_queued_per_requester" in (refused.refusal.remedy or "")
    assert examine(git, pending, station, now=now, answered=()).refusal is None

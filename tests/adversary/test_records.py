"""Each hostile document other than a request is refused by its reader, in words, at once."""

from __future__ import annotations

import time

import pytest

from tests.adversary.doors import DOORS
from tests.adversary.families import RECORDS

CASES = [
    pytest.param(family.door, record, id=f"{key}-{name}")
    for key, family in RECORDS.items()
    for name, record in family.attacks.items()
]


@pytest.mark.parametrize("kind", sorted({family.door for family in RECORDS.values()}))
def test_an_honest_document_is_read(kind: str):
    assert DOORS[kind].read(DOORS[kind].honest)


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize(("kind", "record"), CASES)
def test_a_hostile_document_is_refused(kind: str, record):
    door = DOORS[kind]
    data = record.made_of(door.honest)
    assert data != door.honest
    began = time.process_time()
    with pytest.raises(door.refusal) as refused:
        door.read(data)
    assert time.process_time() - began < 5
    assert refused.value.message.isprintable()
    assert len(refused.value.message) < 5000

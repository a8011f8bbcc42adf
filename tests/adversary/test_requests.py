"""Each hostile request is refused with its reason, in words that can be shown; harmless ones stay data."""

from __future__ import annotations

import pytest

from bridge.protocol.result import Reason, Status, Verdict
from tests.adversary.dry_runner import DryRunner
from tests.adversary.families import REQUESTS

CASES = [
    pytest.param(attack, id=f"{family}-{name}")
    for family, members in REQUESTS.items()
    for name, attack in members.attacks.items()
    if attack.whole
]


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("attack", CASES)
def test_a_hostile_request_is_answered_with_its_reason(dry_runner: DryRunner, attack, request):
    hostile = dry_runner.builder.make(request.node.callspec.id, attack)
    answer = dry_runner.ask(hostile)
    assert answer.reason is attack.expected, answer.message
    if answer.reason is not Reason.OK:
        assert answer.message.isprintable()
        assert len(answer.message) < 1000
        Verdict(status=Status.REFUSED, reason=answer.reason, message=answer.message)
    elif "word" in attack.fields.get("params", {}):
        assert answer.argv[-1] == attack.fields["params"]["word"].replace(
            "@CANARY@", str(dry_runner.builder.canary)
        )
    assert not dry_runner.builder.canary.exists()

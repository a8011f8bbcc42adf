"""What of a row can be made again without running a model: prompt, texts, end, and the sum of its rounds."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.detokenize import text_of
from engine.evaluation.prompts import answer_of
from engine.evaluation.report import needle_fields
from engine.evaluation.throughput import IGNORE_STOPS
from engine.stops import Stops
from engine.target.loading import LoadedTarget
from engine.verification.inputs import EncodedPrompt
from evidence_format.model import Arm, Round, Sample
from evidence_format.text import shown, text_digest, tokens_digest
from evidence_format.verification import Check, ReplayFinding

LONGEST = 4000  # characters of a finding's message
BEFORE = 30  # characters of a long text that are shown before the first difference


def finding(where: str, check: Check, message: str) -> ReplayFinding:
    """What the report says of a row (``arm/prompt_id``) or a model (its role), and the replay does not."""
    return ReplayFinding(where=where, check=check, message=message[:LONGEST])


def differences(
    where: str, check: Check, pairs: Mapping[str, tuple[Any, Any]], near: float = 0.0
) -> Iterator[ReplayFinding]:
    """Find values (reported, computed) that are not equal; numbers may differ by the share `near`."""
    for name, (one, other) in pairs.items():
        if one == other or (near and abs(one - other) <= near * max(abs(one), abs(other))):
            continue
        texts = [each if isinstance(each, str) else str(each) for each in (one, other)]
        is_text = isinstance(one, str) and isinstance(other, str)
        start = max(shared(one, other) - BEFORE, 0) if is_text else 0
        at = f" from character {start}" if start else ""
        reported, computed = (shown(text[start:]) for text in texts)
        yield finding(where, check, f"{name}{at}: reported {reported}, computed {computed}")


def shared(one: Sequence[object], other: Sequence[object]) -> int:
    """How many entries two sequences begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


def name_of(arm: Arm, row: Sample) -> str:
    return f"{arm.name}/{row.prompt_id}"


def check_set(arm: Arm, prompts: Mapping[str, EncodedPrompt]) -> Iterator[ReplayFinding]:
    """Find whether an arm ran just the prompts that its configuration gives, in their order."""
    ran, wanted = [row.prompt_id for row in arm.samples], list(prompts)
    faults = dict.fromkeys(prompts.keys() - ran, "the configuration asks for this prompt; it has no row")
    for name, more in (Counter(ran) - Counter(wanted)).items():
        faults[name] = f"{more} rows more are of this prompt than the configuration gives"
    if not faults and ran != wanted:
        first = next(one for one, other in zip(ran, wanted, strict=True) if one != other)
        faults[first] = "the rows are not in the order of the prompts"
    for name, fault in faults.items():
        yield finding(f"{arm.name}/{name}", "prompts", fault)


def check_row(
    target: LoadedTarget, stop_texts: Sequence[str], arm: Arm, row: Sample, asked: EncodedPrompt
) -> Iterator[ReplayFinding]:
    """Find what of a row does not follow from its prompt and its tokens."""
    where, prompt, tokenizer = name_of(arm, row), asked.prompt, target.tokenizer
    said = row.model_dump(exclude={"rounds", "tokens"}) | {"tokens": len(row.tokens)}

    def unlike(check: Check, **computed: Any) -> Iterator[ReplayFinding]:
        return differences(where, check, {name: (said[name], value) for name, value in computed.items()})

    yield from unlike(
        "prompts",
        prompt_sha256=tokens_digest(asked.tokens),
        source_sha256=prompt.source_sha256,
        prompt_tokens=len(asked.tokens),
        instruction_sha256=text_digest(prompt.instruction),
    )
    if outside := [token for token in row.tokens if token >= target.target.vocab_size]:
        message = f"token {outside[0]} is not one of the model's {target.target.vocab_size}"
        yield finding(where, "rows", message)
        return
    ends = () if arm.control == IGNORE_STOPS else target.stops
    stops = Stops(ends, stop_texts, tokenizer if stop_texts else None)
    stops.start(asked.tokens)
    end = stops.find(row.tokens)
    yield from unlike(
        "rows",
        tokens_sha256=tokens_digest(row.tokens),
        tokens=asked.limit if end is None else min(end, asked.limit),
        finish_reason="length" if end is None else "stop",
    )
    text = text_of(tokenizer, row.tokens, Stops(ends, stop_texts, tokenizer), asked.tokens)
    answer = answer_of(tokenizer, asked.tokens, text)
    needle: dict[str, Any] = {}
    if prompt.needle is not None and prompt.text is not None:
        needle = needle_fields(prompt.needle, prompt.text, answer, text)
    hidden = said["needle"] or {}
    said["hit"] = hidden.pop("hit", None)
    stripped, hit = None if answer == text else answer, needle.pop("hit", None)
    yield from unlike("text", text=text, answer_text=stripped, hit=hit)
    both = {name: (hidden.get(name), needle.get(name)) for name in {**hidden, **needle}}
    yield from differences(where, "prompts", both)
    if row.rounds and kept_by(row.rounds, len(row.tokens)) is None:
        message = f"{len(row.rounds)} rounds do not give {len(row.tokens)} tokens"
        yield finding(where, "rounds", message)


def kept_by(rounds: Sequence[Round], tokens: int) -> list[int] | None:
    """How many tokens each round gave; None where they do not give just these tokens.

    The prompt gave the first token of all, and the end may cut the last round.
    """
    kept, left = [], tokens - 1
    for each in rounds:
        if left < 1 or each.accepted >= each.block:
            return None
        kept.append(min(each.accepted + 1, left))
        left -= kept[-1]
    return None if left else kept

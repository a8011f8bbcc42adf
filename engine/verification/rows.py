"""What of a row can be made again without running a model: prompt, texts, end, and the sum of its rounds."""

from collections.abc import Iterator, Mapping, Sequence

from engine.detokenize import text_of
from engine.evaluation.prompts import answer_of
from engine.evaluation.report import needle_fields
from engine.evaluation.throughput import IGNORE_STOPS
from engine.stops import Stops
from engine.target.loading import LoadedTarget
from engine.verification.prompts import Asked
from engine.verification.record import Check, finding
from engine.verification.replay import kept_by
from evidence_format.model import Arm, Sample
from evidence_format.text import text_digest, tokens_digest
from evidence_format.verification import ReplayFinding

SHOWN = 60  # characters of a value in a finding


def name_of(arm: Arm, row: Sample) -> str:
    """A row as findings name it."""
    return f"{arm.name}/{row.prompt_id}"


def check_set(arm: Arm, asked: Mapping[str, Asked]) -> Iterator[ReplayFinding]:
    """Whether an arm ran just the prompts that its configuration gives, in their order."""
    ran = [row.prompt_id for row in arm.samples]
    wanted = list(asked)
    if ran == wanted:
        return
    for identifier in [name for name in wanted if name not in ran]:
        yield finding(
            f"{arm.name}/{identifier}",
            "prompts",
            "the configuration asks for this prompt, and there is no row of it",
        )
    for identifier in dict.fromkeys(name for name in ran if name not in asked):
        yield finding(f"{arm.name}/{identifier}", "prompts", "the configuration gives no prompt of this id")
    if sorted(ran) == sorted(wanted):
        first = next(one for one, other in zip(ran, wanted, strict=True) if one != other)
        yield finding(f"{arm.name}/{first}", "prompts", "the rows are not in the order of the prompts")
    elif len(set(ran)) < len(ran):
        twice = next(name for name in ran if ran.count(name) > 1)
        yield finding(f"{arm.name}/{twice}", "prompts", "there are several rows of this prompt")


def check_row(
    target: LoadedTarget, stop_texts: Sequence[str], arm: Arm, row: Sample, asked: Asked
) -> Iterator[ReplayFinding]:
    """Everything of a row that follows from its prompt and its tokens."""
    where = name_of(arm, row)

    def differs(check: Check, what: str, said: object, found: object) -> ReplayFinding:
        skipped = 0
        if isinstance(said, str) and isinstance(found, str) and len(said) > SHOWN:
            pairs = enumerate(zip(said, found, strict=False))
            same = next((at for at, (one, other) in pairs if one != other), min(len(said), len(found)))
            skipped = max(same - SHOWN // 2, 0)
            said, found = said[skipped:], found[skipped:]
        at = f" from character {skipped}" if skipped else ""
        return finding(where, check, f"{what}{at}: reported {_short(said)}, computed {_short(found)}")

    for what, said, found in (
        ("prompt_sha256", row.prompt_sha256, tokens_digest(asked.tokens)),
        ("source_sha256", row.source_sha256, asked.prompt.source_sha256),
        ("prompt_tokens", row.prompt_tokens, len(asked.tokens)),
        ("instruction_sha256", row.instruction_sha256, text_digest(asked.prompt.instruction)),
    ):
        if said != found:
            yield differs("prompts", what, said, found)
    if outside := [token for token in row.tokens if token >= target.target.vocab_size]:
        yield finding(
            where, "rows", f"token {outside[0]} is not one of the model's {target.target.vocab_size}"
        )
        return
    if row.tokens_sha256 != tokens_digest(row.tokens):
        yield differs("rows", "tokens_sha256", row.tokens_sha256, tokens_digest(row.tokens))
    ends = () if arm.control == IGNORE_STOPS else target.stops
    stops = Stops(ends, stop_texts, target.tokenizer if stop_texts else None)
    stops.start(asked.tokens)
    yield from _check_end(where, stops, row, asked)
    text = text_of(target.tokenizer, row.tokens, Stops(ends, stop_texts, target.tokenizer), asked.tokens)
    if row.text != text:
        yield differs("text", "text", row.text, text)
    answer = answer_of(target.tokenizer, asked.tokens, text)
    if row.answer_text != (None if answer == text else answer):
        yield differs("text", "answer_text", row.answer_text, None if answer == text else answer)
    yield from _check_needle(where, row, asked, answer, text)
    try:
        kept_by(row.rounds, len(row.tokens)) if row.rounds else None
    except ValueError as error:
        yield finding(where, "rounds", str(error))


def _check_end(where: str, stops: Stops, row: Sample, asked: Asked) -> Iterator[ReplayFinding]:
    """Whether the text ends where and as it should."""
    end, many = stops.find(row.tokens), len(row.tokens)
    if end is not None and end < many:
        yield finding(where, "rows", f"a stop follows {end} tokens, but the row has {many}")
    elif end is None and many != asked.most:
        yield finding(where, "rows", f"{many} tokens and no stop; expected {asked.most} (max_tokens)")
    elif many > asked.most:
        yield finding(where, "rows", f"{many} tokens, but max_tokens is {asked.most}")
    finish = "length" if end is None else "stop"
    if row.finish_reason != finish:
        yield finding(
            where, "rows", f"finish_reason: reported {_short(row.finish_reason)}, computed {finish!r}"
        )


def _check_needle(where: str, row: Sample, asked: Asked, answer: str, text: str) -> Iterator[ReplayFinding]:
    """Whether what was hidden, and what of it was found, is as the prompt and the text have it."""
    prompt = asked.prompt
    hidden = prompt.needle is not None and prompt.text is not None
    if (row.needle is not None) != hidden:
        said = "hides nothing" if row.needle is None else "hides something"
        yield finding(
            where, "prompts", f"the report says that the prompt {said}, and it is the other way round"
        )
        return
    if row.needle is None or prompt.needle is None or prompt.text is None:
        return
    found = needle_fields(prompt.needle, prompt.text, answer, text)
    for name, said in row.needle.model_dump().items():
        if said != found[name]:
            check: Check = "text" if name == "hit" else "prompts"
            yield finding(
                where,
                check,
                f"needle.{name}: reported {_short(said)}, computed {_short(found[name])}",
            )


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."

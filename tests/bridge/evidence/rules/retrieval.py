"""Reports whose recall means nothing."""

from __future__ import annotations

from tests.bridge.evidence.breakers import Breaker, Rules, chain, change, claims, rows
from tests.bridge.evidence.reports import Document, filler, settle


def same_answers(document: Document) -> None:
    for arm in ("speculative", "oracle", "no_needle"):
        for row in rows(document, arm):
            row["needle"] |= {"answer": "4821", "needle": "The code is 4821."}
            row["text"] = "nothing" if arm == "no_needle" else "4821"
    settle(document)


def short_answers(document: Document) -> None:
    for arm in ("speculative", "oracle", "no_needle"):
        rows(document, arm)[0]["needle"] |= {"answer": "4", "needle": "The digit is 4."}
    settle(document)


def recited(document: Document) -> None:
    """One text that holds every answer, which no prompt gave."""
    answers = [row["needle"]["answer"] for row in rows(document, "speculative")]
    for arm in ("speculative", "oracle"):
        for row in rows(document, arm):
            row["text"] = " ".join(answers)
    settle(document)


def deaf_oracle(document: Document) -> None:
    claims(document, "recall_parity")
    for arm in ("speculative", "oracle"):
        for row in rows(document, arm):
            row["text"] = "no idea"
    settle(document)


def recall_vacuous(document: Document) -> None:
    for arm in ("speculative", "oracle"):
        rows(document, arm)[0]["needle"]["prompt_contains_answer_outside_needle"] = True


FIRST_DEPTH = ("arms", 0, "samples", 0, "needle", "depth")


def at_one_depth(document: Document) -> None:
    for arm in document["arms"]:
        for row in arm["samples"]:
            row["needle"]["depth"] = 0.5


def few_prompts(count: int) -> Breaker:
    """So many prompts in every arm."""

    def apply(document: Document) -> None:
        claims(document, "recall")
        for arm in document["arms"]:
            del arm["samples"][count:]
        settle(document)

    return apply


def needle_elsewhere(document: Document) -> None:
    """A needle that was never in its prompt, and that no arm claims to have found."""
    document["claims"] = []
    for arm in ("speculative", "oracle"):
        rows(document, arm)[0] |= {"tokens": filler(88, 12), "text": "no idea"}
        rows(document, arm)[0]["needle"]["prompt_contains_needle"] = False
    settle(document)


def recall_below_oracle(document: Document) -> None:
    claims(document, "recall_parity")
    for row in rows(document, "speculative")[:2]:
        row["tokens"], row["text"] = filler(77, 12), "I forgot."
    settle(document)


def honest_low_recall(document: Document) -> None:
    document["claims"] = [{"name": "recall", "arm": "speculative", "at_least": 0.5}]
    for row in rows(document, "speculative")[:4]:
        row["tokens"], row["text"] = filler(99, 12), "I forgot."
    settle(document)


def reasoning(*arms: str, text: str = "<think>hm</think> {answer}.", answer: str = "{answer}.") -> Breaker:
    """Give every row of the arms a text with reasoning, and what is left of it as its answer."""

    def apply(document: Document) -> None:
        for arm in arms:
            for row in rows(document, arm):
                found = row["needle"]["answer"]
                row |= {"text": text.format(answer=found), "answer_text": answer.format(answer=found)}
        settle(document)

    return apply


def unstripped(document: Document) -> None:
    reasoning("speculative", "oracle")(document)
    for row in rows(document, "speculative") + rows(document, "oracle"):
        del row["answer_text"]


def deaf_by_reasoning(document: Document) -> None:
    """The oracle's answers, where the arm under test has none, are called reasoning."""
    for row in rows(document, "speculative")[:5]:
        row["tokens"], row["text"] = filler(70, 12), "I forgot."
    for row in rows(document, "oracle")[:5]:
        row["answer_text"] = ""
    document["claims"] = [{"name": "recall_parity", "arm": "speculative"}]
    settle(document)


def opened_by_the_template(document: Document) -> None:
    """Prompts that end inside reasoning: texts close it, or were cut short before they could."""
    reasoning("speculative", "oracle", text="hm</think>\n{answer}.")(document)
    reasoning("no_needle", text="hm, what code", answer="")(document)
    document["claims"] = [{"name": "recall_parity", "arm": "speculative"}]
    for arm in ("speculative", "oracle"):
        rows(document, arm)[3] |= {"text": "hm, still", "answer_text": ""}
    settle(document)


def joined_by_hand(document: Document) -> None:
    """An answer that is nowhere until what is between its halves is removed."""
    both = ("speculative", "oracle")
    for arm in both:
        for row in rows(document, arm):
            found = row["needle"]["answer"]
            row["text"] = f"{found[:2]}<think></think>{found[2:]}"
            row["answer_text"] = found
    document["claims"] = []
    settle(document)
    for arm in both:
        for row in rows(document, arm):
            row["needle"]["hit"] = True


ANSWERED = ("speculative", "oracle")


def oracle_cut_short(document: Document) -> None:
    """An oracle whose answers were stopped before they came."""
    claims(document, "recall_parity")
    for row in rows(document, "oracle")[:5]:
        row["tokens"], row["text"] = row["tokens"][:2], "the"
    for row in rows(document, "speculative")[:5]:
        row["tokens"], row["text"] = filler(70, 12), "I forgot."
    settle(document)


RULES = Rules(
    alone={
        "RECALL_VACUOUS": ("recall", recall_vacuous),
        "RECALL_TOO_FEW": ("recall", at_one_depth),
        "RECALL_BELOW_ORACLE": ("recall", recall_below_oracle),
    },
    variants=[
        ("RECALL_TOO_FEW", "recall", few_prompts(4)),
        ("RECALL_TOO_FEW", "recall", chain(at_one_depth, change(*FIRST_DEPTH, to=0.500000001))),
        ("RECALL_VACUOUS", "recall", needle_elsewhere),
        ("RECALL_VACUOUS", "recall", oracle_cut_short),
        ("RECALL_VACUOUS", "recall", same_answers),
        ("RECALL_VACUOUS", "recall", short_answers),
        ("RECALL_VACUOUS", "recall", recited),
        ("RECALL_VACUOUS", "recall", deaf_oracle),
        (
            "RECALL_VACUOUS",
            "recall",
            change("arms", 0, "samples", 0, "needle", "prompt_contains_needle", to=False),
        ),
        ("ROW_INCONSISTENT", "recall", unstripped),
        ("ROW_INCONSISTENT", "recall", deaf_by_reasoning),
        ("ROW_INCONSISTENT", "recall", joined_by_hand),
        ("ROW_INCONSISTENT", "recall", reasoning(*ANSWERED, text="{answer}.")),
        ("ROW_INCONSISTENT", "recall", reasoning(*ANSWERED, text="I forgot.")),
        ("ROW_INCONSISTENT", "recall", reasoning(*ANSWERED, text="<plan>hm</plan> {answer}.")),
        ("ROW_INCONSISTENT", "recall", reasoning(*ANSWERED, text="<think>hm</think> {answer}, I think.")),
    ],
    honest=[
        ("recall", few_prompts(5)),
        ("recall", reasoning(*ANSWERED)),
        ("recall", reasoning(*ANSWERED, text="[THINK]{answer}[/THINK]{answer}.")),
        ("recall", reasoning(*ANSWERED, text="{answer}.\n<|channel>thought off")),
        ("recall", opened_by_the_template),
        ("recall", honest_low_recall),
    ],
)

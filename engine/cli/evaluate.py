"""``kakeya_engine eval``: measurements that end in an evidence report and one JSON line."""

from dataclasses import replace
from typing import Any

import click

from engine.cli.evaluate_server import server
from engine.cli.evaluation_options import (
    EvaluationCall,
    claim_option,
    common_options,
    haystack_options,
    max_tokens_option,
    seed_of,
    seed_option,
    set_options,
    take_haystack,
)
from engine.cli.options import option


@click.group("eval", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Measure the engine; each command writes one evidence report and ends with one JSON line."""


@command.command("throughput")
@set_options
@claim_option(
    "What to claim in addition to identical output; auto: a speed-up where blocks are cheap.",
    *("speedup", "no-slowdown", "identity"),
)
@option("--min-speedup", "Speed-up to claim.", 1.0)
@option(
    "--min-stops",
    "Also claim that this share of the texts, 0.5 to 1, ends at a stop token.",
    type=float,
    metavar="SHARE",
)
@click.option(
    "--ignore-stops",
    is_flag=True,
    help="Add an arm that decodes past stop tokens up to --max-tokens (forced over-generation), to compare.",
)
@common_options
def throughput(**values: Any) -> None:
    """Speculative against plain decoding of the same prompts, interleaved.

    \b
    Examples:
      kakeya_engine eval throughput --report throughput.json
      kakeya_engine eval throughput --prompts code --limit 4 --block 8
      kakeya_engine eval throughput --prompts chat --max-tokens 384 --min-stops 0.9 --ignore-stops
      kakeya_engine eval throughput --model ~/models/qwen3-4b --drafter ~/models/qwen3-4b-dflash
    """  # noqa: D301 - click wants the character itself
    call = EvaluationCall(values)
    from engine.cli.tables import throughput_table
    from engine.evaluation.throughput import Switches, measure_throughput

    call.run_set(measure_throughput, Switches(**values, chat=call.chat), [throughput_table])


@command.command("recall")
@option(
    "--prompts",
    "The shipped set, a FILE.jsonl with needles, or generated, which takes the shipped set's place "
    "with --chat and --kv restored.",
    "retrieval",
)
@option("--limit", "At most so many prompts [default: all].", type=int)
@max_tokens_option(16)
@seed_option("Of generated prompts; of others their order, 0 as in the file")
@claim_option(
    "Claim that nothing is lost beside the oracle; auto: where --kv is native or sliding-bounded.", "parity"
)
@option("--min-recall", "Also claim this recall.", type=float)
@option("--batch", "Decode so many prompts together (not the oracle's).", 1)
@haystack_options(
    "Make prompts of so many tokens up [default: 440].",
    "… with the needle at these shares of the haystack [default: 0,0.25,0.5,0.75,1].",
    "… so many at each depth [default: 4].",
)
@common_options
def recall(**values: Any) -> None:
    """Needle in a haystack, with the plain model as oracle and prompts without the needle as control.

    \b
    Examples:
      kakeya_engine eval recall --report recall.json
      kakeya_engine eval recall --limit 10 --min-recall 0.9 --json
      kakeya_engine eval recall --batch 8
      kakeya_engine eval recall --context 480 --depths 0,0.5,1 --per-depth 10 --seed 3
      kakeya_engine eval recall --chat --thinking off --model ~/models/qwen3-4b
      kakeya_engine eval recall --kv sink-window:4,64 --context 480
    """  # noqa: D301 - click wants the character itself
    call, asked, seed = EvaluationCall(values), take_haystack(values), values.pop("seed")
    from engine.cli.tables import depth_figures, depth_table, recall_table
    from engine.config import open_engine
    from engine.evaluation.haystack import GENERATED, retrieval_prompts
    from engine.evaluation.recall import RecallSwitches, measure_recall, reach

    given = RecallSwitches(**values, chat=call.chat, haystack=asked)
    given.check()

    def measure(**context: Any) -> Any:
        engine = open_engine(call.options)
        beyond = reach(engine.policy)
        haystack = asked.filled(given.prompts, unfit=call.chat.chat or beyond > 0)
        drawn = seed_of(seed, call.request if haystack.wanted else None)
        source: dict[str, Any] = {
            "limit": given.limit,
            "seed": drawn,
            "switches": call.chat,
            "beyond": beyond,
        }
        prompts = retrieval_prompts(given.prompts, haystack, engine.target.tokenizer, **source)
        # the shipped set may have been asked for and not fit
        name = GENERATED if haystack.wanted else given.prompts
        switches = replace(given, haystack=haystack, seed=drawn, prompts=name)
        return measure_recall(engine, prompts, switches, call.runtime, **context)

    call.run(measure, [recall_table, depth_table], {"recall_by_depth": depth_figures})


@command.command("kv")
@option(
    "--policies",
    "What --kv takes, several of them [default: every kind, most in several variants, a pair at "
    "equal stored bits].",
    metavar="'SPEC SPEC …'",
)
@haystack_options(
    "Tokens of a retrieval prompt [default: 440].",
    "Shares of the haystack before the needle [default: 0,0.2,0.4,0.6,0.8].",
    "Retrieval prompts at each depth [default: 4].",
)
@seed_option("Of the retrieval prompts")
@option("--answer-tokens", "Tokens to generate for one of them.", 16)
@option(
    "--speed-prompts",
    "A set or a FILE.jsonl without needles, for drafts and speed; none to leave it out.",
    "code",
)
@option("--speed-limit", "At most so many of them.", 8)
@max_tokens_option(64, "Tokens to generate for one of them.")
@option(
    "--claim-parity",
    "Claim that this policy recalls what the oracle recalls (several times; with --speed-prompts none).",
    multiple=True,
    metavar="SPEC",
)
@option(
    "--claim-bytes",
    "Claim that this policy's caches hold at most so many bytes (several times).",
    multiple=True,
    metavar="SPEC=BYTES",
)
@common_options
def kv(**values: Any) -> None:
    """Shoot-out of KV policies: stored bits, memory, distortion, recall, acceptance and speed.

    Every policy runs the same prompts in turn. Blocks are of one length (auto: 8), and the shipped target is
    drafted for by the shipped drafter alone, without look-ups.

    \b
    Examples:
      kakeya_engine eval kv --report kv.json
      kakeya_engine eval kv --policies 'affine:4,64 rotated:4,64 lattice-packed:e8,4@all'
      kakeya_engine eval kv --policies restored:learned --speed-prompts none --per-depth 8
      kakeya_engine eval kv --model ~/models/qwen3-4b --drafter ~/models/qwen3-4b-dflash --context 4000
    """  # noqa: D301 - click wants the character itself
    call, haystack, policies = EvaluationCall(values), take_haystack(values), values.pop("policies")
    seed = seed_of(values.pop("seed"), call.request)
    from engine.cli.tables import depth_figures, depth_table, kv_figures, kv_table
    from engine.evaluation.kv import DEPTHS, POLICIES, KVSwitches, measure_kv, open_shootout, settled

    switches = KVSwitches(
        policies=POLICIES if policies is None else tuple(policies.split()),
        haystack=haystack.with_defaults(depths=DEPTHS),
        seed=seed,
        chat=call.chat,
        **values,
    )
    switches.check()
    options = settled(call.options)

    def measure(**context: Any) -> Any:
        return measure_kv(open_shootout(options), switches, call.runtime, **context)

    more = {"policies": kv_figures, "recall_by_depth": depth_figures}
    call.run(measure, [depth_table, kv_table], more)


@command.command("quality")
@set_options
@claim_option(
    "Identical output but for rounding ties, or a share of equal outputs; auto: identity where --kv is "
    "native.",
    *("identity", "match"),
)
@option("--min-match", "With --claim match: the share to claim.", type=float, metavar="X")
@common_options
def quality(**values: Any) -> None:
    """Exact match of our output with plain decoding's, and a look out for runaway repetition.

    \b
    Examples:
      kakeya_engine eval quality --report quality.json
      kakeya_engine eval quality --kv affine:4,64 --claim match --min-match 0.5
      kakeya_engine eval quality --kv sink-window:4,1024 --claim identity
      kakeya_engine eval quality --prompts chat --drafter prompt-lookup --json
    """  # noqa: D301 - click wants the character itself
    call = EvaluationCall(values)
    from engine.cli.tables import quality_table
    from engine.evaluation.quality import QualitySwitches, matches_by_set, measure_quality

    switches = QualitySwitches(**values, chat=call.chat)
    more = {"identical_by_set": matches_by_set}
    call.run_set(measure_quality, switches, [quality_table], more)


command.add_command(server)

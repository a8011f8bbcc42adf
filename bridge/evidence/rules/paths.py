"""Did the declared systems run, and are they different systems?"""

from __future__ import annotations

from collections.abc import Iterator

from bridge.evidence.figures import Case
from bridge.evidence.model import Arm, Report, Sample, System
from bridge.evidence.policies import KVPolicy, parse_policy
from bridge.evidence.rules.machine import WEIGHTLESS_DRAFTERS
from bridge.evidence.text import several, shown

PLAIN_LOOP = "mlx_lm.generate.generate_step"
# What `path` must say for a loop without a drafter.
PLAIN_PATHS = {
    PLAIN_LOOP: frozenset({"plain:mlx_lm.generate_step", f"plain:{PLAIN_LOOP}"}),
    "kakeya.decode": frozenset({"plain:kakeya.decode"}),
}
# What `configuration` may say of the block where nothing drafts: the switch then means nothing.
PLAIN_BLOCKS = frozenset({"1", "auto", None})
# Fallbacks that change how fast something runs, not what ran. Every other one is a declared component lost.
HARMLESS_FALLBACKS = frozenset({"compile", "blas"})
# What the name of a drafter begins with that asks another one only where a look-up finds nothing better.
SPARING = tuple(f"{name}+" for name in sorted(WEIGHTLESS_DRAFTERS))


def engine_never_ran(case: Case) -> Iterator[str]:
    """A speculative arm has no rounds, none of two tokens or more, or its drafter's network ran less often
    than its blocks need; or a preset promises a drafter that an arm under test does not declare.
    """
    # Rounds of one token are plain steps: block lengths may adapt to them, but now and then try a longer one.
    speculative = [arm for arm in case.report.arms if arm.system.drafter is not None and arm.samples]
    for arm in speculative:
        declared = f"arm {arm.label} declares drafter {shown(arm.system.drafter)}"
        if not arm.rounds:
            yield f"{declared}, but has no rounds"
        elif arm.role == "sut" and not _drafted_blocks(arm):
            yield f"{declared}, but each of its {len(arm.rounds)} rounds is a plain step of one token"
    if not speculative:
        return
    live = case.report.liveness
    forwards = sum(len(arm.rounds) for arm in case.report.arms)
    if live.rounds != forwards:
        yield f"liveness counts {live.rounds} rounds, but the rows hold {forwards}"
    networks = [arm for arm in speculative if arm.system.drafter not in WEIGHTLESS_DRAFTERS]
    if networks and live.drafter_forwards == 0:
        yield "liveness.drafter_forwards is 0, but an arm's drafter has a network"
    needed = sum(_drafted_blocks(arm) for arm in networks if not _looks_up(arm.system))
    if 0 < live.drafter_forwards < needed:
        yield f"the rows hold {needed} drafted blocks, but the drafter ran {live.drafter_forwards} times"


def _drafted_blocks(arm: Arm) -> int:
    return sum(turn.block >= 2 for turn in arm.rounds)


def _looks_up(system: System) -> bool:
    """Whether the system drafts by look-ups, at least first; each drafts as many tokens as it finds."""
    return system.drafter in WEIGHTLESS_DRAFTERS or (system.drafter or "").startswith(SPARING)


def silent_fallback(case: Case) -> Iterator[str]:
    """A declared loop, drafter, block or other component was not what ran, or the configuration names another
    drafter, block, KV policy or dtype; or a preset promises a KV policy or a switch that no arm declares.
    """
    for arm in case.report.arms:
        paths = {sample.path for sample in arm.samples}
        if len(paths) == 1 and not paths <= expected_paths(arm.system):  # several are MIXED_PATHS
            declared = f"loop {shown(arm.system.loop)}, drafter {shown(arm.system.drafter)}"
            yield f"arm {arm.label} declares {declared}, but {several(list(paths))} ran"
        for sample in arm.samples:
            if (problem := _block_problem(arm.system, sample)) is not None:
                yield f"{arm.label}/{shown(sample.prompt_id)}: {problem}"
                break
    yield from _contradicted_switches(case)
    yield from _contradicted_parity(case.report)
    for fallback in case.report.liveness.fallbacks:
        if fallback.component not in HARMLESS_FALLBACKS:
            yield f"{shown(fallback.component)} fell back {fallback.count} times: {shown(fallback.reason)}"


def expected_paths(system: System) -> frozenset[str]:
    """What the rows of a system must say ran; empty for a loop the gate does not know."""
    if system.drafter is not None:
        return frozenset({f"speculative:{system.drafter}"}) if system.loop == "kakeya.decode" else frozenset()
    return PLAIN_PATHS.get(system.loop, frozenset())


def _block_problem(system: System, sample: Sample) -> str | None:
    """Rounds that a fixed block does not explain; it may shrink to what a look-up found or what is left."""
    if system.drafter is None:
        blocks = [turn.block for turn in sample.rounds if turn.block != 1]
        return f"a round of block {blocks[0]} without a drafter" if blocks else None
    if system.block is None or system.block == "auto":
        return None
    block, left = int(system.block), sample.decoded
    for turn in sample.rounds:
        if turn.block > block or (turn.block < min(block, left) and not _looks_up(system)):
            return f"a round of block {turn.block} where the arm declares block {block}"
        left -= turn.accepted + 1
    return None


def _contradicted_switches(case: Case) -> Iterator[str]:
    """Switches that `configuration` names otherwise than the arms under test and the target declare them."""
    report, stated = case.report, case.report.configuration
    for arm in case.tested:
        system = arm.system
        blocks = {system.block} if system.drafter is not None else {system.block, *PLAIN_BLOCKS}
        found = {
            "drafter": _as_text(stated.get("drafter")) in {system.drafter},
            "block": _as_text(stated.get("block")) in blocks,
            "kv": report.kind == "kv" or _policy(stated.get("kv")) == parse_policy(system.kv),
        }
        for switch, agrees in found.items():
            if switch in stated and not agrees:
                declared = shown(getattr(system, switch))
                yield f"configuration.{switch} is {shown(stated[switch])}, {arm.label} declares {declared}"
    target = report.environment.models.get("target")
    if target is not None and stated.get("dtype") not in (None, target.dtype):
        yield f"configuration.dtype is {shown(stated['dtype'])}, but the target's is {shown(target.dtype)}"


def _contradicted_parity(report: Report) -> Iterator[str]:
    """A comparison whose subject, dtype or tolerance is not what ran."""
    parity, stated = report.parity, report.configuration
    if parity is None:
        return
    if parity.subject.sha256 != report.environment.git.source_sha256:
        yield "parity.subject.sha256 is not the digest of the engine that ran"
    for switch, ran in (("dtype", parity.dtype), ("tolerance", parity.tolerance)):
        if stated.get(switch) not in (None, ran):
            yield f"configuration.{switch} is {shown(stated[switch])}, but parity says {shown(ran)}"


def _policy(switch: object) -> KVPolicy | None:
    """A KV policy as a switch says it; none is native."""
    return parse_policy("native" if switch is None else str(switch))


def _as_text(switch: object) -> str | None:
    """A switch as arms write it: 8 and "8" are the same block."""
    return None if switch is None else str(switch)


def mixed_paths(case: Case) -> Iterator[str]:
    """Samples of one arm ran on different paths or caches."""
    for arm in case.report.arms:
        paths = sorted({sample.path for sample in arm.samples})
        if len(paths) > 1:
            yield f"arm {arm.label} ran on several paths: {several(paths)}"
        caches = sorted({", ".join(sorted(sample.cache.classes)) for sample in arm.samples})
        if len(caches) > 1:
            yield f"arm {arm.label} ran on several kinds of cache: {several(caches)}"


def is_plain(system: System) -> bool:
    """Whether a system is nothing but mlx-lm's own plain decoding."""
    nothing_of_ours = system.drafter is None and system.restoration is None
    return system.loop == PLAIN_LOOP and nothing_of_ours and system.kv == "native"


def baseline_as_sut(case: Case) -> Iterator[str]:
    """A claim is about an arm that is not under test, or the arm under test is plain decoding."""
    for claim in case.report.claims:
        arm = case.report.arm(claim.arm) if claim.arm is not None else None
        if arm is not None and arm.role != "sut":
            yield f"{claim.name} is claimed of {arm.label}, whose role is {arm.role}"
    for arm in case.tested if case.references else ():
        if is_plain(arm.system):
            yield f"arm {arm.label} is under test, but is plain mlx-lm decoding"


def self_comparison(case: Case) -> Iterator[str]:
    """Both arms of a comparison are the same system or the same measurements."""
    for claim in case.report.claims:
        if claim.arm is not None and claim.arm == claim.baseline:
            yield f"{claim.name} compares arm {shown(claim.arm)} with itself"
    for reference in case.references:
        for arm in case.tested:
            pair = f"{arm.label} and {reference.label}"
            same = _canonical(arm.system) == _canonical(reference.system)
            if same and not is_plain(arm.system):  # that is BASELINE_AS_SUT
                yield f"{pair} declare the same system"
            if len(arm.samples) >= 2 and _clock(arm) == _clock(reference):
                yield f"{pair} hold the same measurements"


def _canonical(system: System) -> tuple[object, ...]:
    """A system by what it is, however its policy is spelt."""
    return system.loop, system.drafter, system.block, parse_policy(system.kv) or system.kv


def _clock(arm: Arm) -> dict[str, tuple[float | None, float | None]]:
    return {sample.prompt_id: (sample.prefill_s, sample.decode_s) for sample in arm.samples}

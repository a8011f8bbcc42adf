"""Did the declared systems run, and are they different systems?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bridge.evidence.case import Case
from bridge.evidence.policies import Policy, parse_policy
from bridge.evidence.report import Arm, Report, Sample, System
from bridge.evidence.rules.machine import WEIGHTLESS_DRAFTERS
from bridge.evidence.shown import several, shown

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
    """An arm declares a drafter, but nothing was drafted, or its network ran less often than the rows need.

    Rounds of one token are plain steps. A pace may choose them for most of a run, but it looks at blocks now
    and then; an arm under test without one block is plain decoding, whatever is claimed of it. A drafter
    without a network has no forwards, one beside look-ups has some, any other at least one for each block.
    """
    speculative = [arm for arm in case.report.arms if arm.system.drafter is not None and arm.samples]
    live = case.report.liveness
    for arm in speculative:
        turns = [turn for sample in arm.samples for turn in sample.rounds]
        declared = f"arm {shown(arm.name)} declares drafter {shown(arm.system.drafter)}"
        if not turns:
            yield f"{declared}, but has no rounds"
        elif arm.role == "sut" and not any(turn.block >= 2 for turn in turns):
            yield f"{declared}, but each of its {len(turns)} rounds is a plain step of one token"
    if not speculative:
        return
    forwards = sum(len(sample.rounds) for arm in case.report.arms for sample in arm.samples)
    if live.rounds != forwards:
        yield f"liveness counts {live.rounds} rounds, but the rows hold {forwards}"
    networks = [arm for arm in speculative if arm.system.drafter not in WEIGHTLESS_DRAFTERS]
    if networks and live.drafter_forwards == 0:
        yield "liveness.drafter_forwards is 0 beside an arm whose drafter has a network"
    drafted = _blocks([arm for arm in networks if not (arm.system.drafter or "").startswith(SPARING)])
    if 0 < live.drafter_forwards < drafted:
        yield f"the rows hold {drafted} drafted blocks, but the drafter ran {live.drafter_forwards} times"


def _blocks(arms: Sequence[Arm]) -> int:
    """Rounds of two tokens or more."""
    return sum(turn.block >= 2 for arm in arms for sample in arm.samples for turn in sample.rounds)


def silent_fallback(case: Case) -> Iterator[str]:
    """A declared component was not what ran, by the rows, the configuration or the recorded fallbacks."""
    for arm in case.report.arms:
        paths = {sample.path for sample in arm.samples}
        if len(paths) == 1:  # several are MIXED_PATHS
            (path,) = paths
            if path not in expected_paths(arm.system):
                yield f"arm {shown(arm.name)} declares {_declared(arm.system)}, but {shown(path)} ran"
        for sample in arm.samples:
            problem = _block_problem(arm.system, sample)
            if problem:
                yield f"{shown(arm.name)}/{shown(sample.prompt_id)}: {problem}"
                break
    yield from _contradicted_switches(case.report)
    yield from _contradicted_parity(case.report)
    for fallback in case.report.liveness.fallbacks:
        if fallback.component not in HARMLESS_FALLBACKS:
            yield f"{shown(fallback.component)} fell back {fallback.count} times: {shown(fallback.reason)}"


def expected_paths(system: System) -> frozenset[str]:
    """What the rows of a system must say ran; empty for a loop the gate does not know."""
    if system.drafter is not None:
        return frozenset({f"speculative:{system.drafter}"}) if system.loop == "kakeya.decode" else frozenset()
    return PLAIN_PATHS.get(system.loop, frozenset())


def _declared(system: System) -> str:
    return f"loop {shown(system.loop)}, drafter {shown(system.drafter)}"


def _block_problem(system: System, sample: Sample) -> str | None:
    """Rounds that a fixed block does not explain.

    A block may shrink to the tokens still to come, and to whatever a look-up found.
    """
    if system.drafter is None:
        speculative = [turn.block for turn in sample.rounds if turn.block != 1]
        return f"a round of block {speculative[0]} without a drafter" if speculative else None
    if system.block is None or system.block == "auto":
        return None
    block, left = int(system.block), sample.decoded
    looks_up = system.drafter in WEIGHTLESS_DRAFTERS or system.drafter.startswith(SPARING)
    for turn in sample.rounds:
        if turn.block > block or (turn.block < min(block, left) and not looks_up):
            return f"a round of block {turn.block} where the arm declares block {block}"
        left -= turn.accepted + 1
    return None


def _contradicted_switches(report: Report) -> Iterator[str]:
    """Switches that `configuration` names otherwise than the arms under test and the target declare them."""
    stated = report.configuration
    for arm in report.with_role("sut"):
        system = arm.system
        blocks = {system.block} if system.drafter is not None else {system.block, *PLAIN_BLOCKS}
        for switch, declared in (("drafter", {system.drafter}), ("block", blocks)):
            if switch in stated and _as_text(stated[switch]) not in declared:
                yield (
                    f"configuration.{switch} is {shown(stated[switch])}, but arm {shown(arm.name)} "
                    f"declares {shown(getattr(system, switch))}"
                )
        if "kv" in stated and report.kind != "kv" and _policy(stated["kv"]) != parse_policy(system.kv):
            yield (
                f"configuration.kv is {shown(stated['kv'])}, but arm {shown(arm.name)} "
                f"declares {shown(system.kv)}"
            )
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


def _policy(switch: object) -> Policy | None:
    """A KV policy as a switch says it; none is native."""
    return parse_policy("native" if switch is None else str(switch))


def _as_text(switch: object) -> str | None:
    """A switch as arms write it: 8 and "8" are the same block."""
    return None if switch is None else str(switch)


def mixed_paths(case: Case) -> Iterator[str]:
    """The samples of one arm ran on different paths or different caches."""
    for arm in case.report.arms:
        paths = sorted({sample.path for sample in arm.samples})
        if len(paths) > 1:
            yield f"arm {shown(arm.name)} ran on several paths: {several(paths)}"
        caches = sorted({", ".join(sorted(sample.cache.classes)) for sample in arm.samples})
        if len(caches) > 1:
            yield f"arm {shown(arm.name)} ran on several kinds of cache: {several(caches)}"


def is_plain(system: System) -> bool:
    """Whether a system is nothing but mlx-lm's own plain decoding."""
    nothing_of_ours = system.drafter is None and system.restoration is None
    return system.loop == PLAIN_LOOP and nothing_of_ours and system.kv == "native"


def baseline_as_sut(case: Case) -> Iterator[str]:
    """A claim is about an arm that is not under test, or the arm under test is plain decoding."""
    for claim in case.report.claims:
        arm = case.report.arm(claim.arm) if claim.arm is not None else None
        if arm is not None and arm.role != "sut":
            yield f"{claim.name} is claimed of {shown(arm.name)}, whose role is {arm.role}"
    if references(case):
        for arm in case.report.with_role("sut"):
            if is_plain(arm.system):
                yield f"arm {shown(arm.name)} is under test, but is plain mlx-lm decoding"


def self_comparison(case: Case) -> Iterator[str]:
    """An arm under test is compared with itself: the same system, or the same measurements."""
    for claim in case.report.claims:
        if claim.arm is not None and claim.arm == claim.baseline:
            yield f"{claim.name} compares arm {shown(claim.arm)} with itself"
    for reference in references(case):
        for arm in case.report.with_role("sut"):
            pair = f"{shown(arm.name)} and {shown(reference.name)}"
            same = _canonical(arm.system) == _canonical(reference.system)
            if same and not is_plain(arm.system):  # that is BASELINE_AS_SUT
                yield f"{pair} declare the same system"
            if len(arm.samples) >= 2 and _clock(arm) == _clock(reference):
                yield f"{pair} hold the same measurements"


def _canonical(system: System) -> tuple[object, ...]:
    """A system by what it is, however its policy is spelt."""
    return system.loop, system.drafter, system.block, parse_policy(system.kv) or system.kv


def references(case: Case) -> tuple[Arm, ...]:
    """The arms that others are compared with."""
    return case.report.with_role("baseline") + case.report.with_role("oracle")


def _clock(arm: Arm) -> dict[str, tuple[float | None, float | None]]:
    return {sample.prompt_id: (sample.prefill_s, sample.decode_s) for sample in arm.samples}

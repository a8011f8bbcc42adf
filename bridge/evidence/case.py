"""What a rule reads: the report, what this job expects of it, and the figures its rows give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from bridge.evidence.report import Arm, Claim, Report, Summary

SPEED_CLAIMS = frozenset({"speedup", "no_slowdown"})


@dataclass(frozen=True)
class Binding:
    """What a report must belong to. A field that is None is not checked.

    Attributes:
        nonce: The request's nonce.
        workload_sha: The workload commit the job ran for.
        preset_digest: sha256 of the preset file that named the job.
        engine_source: ``installed`` or ``workload``.
        started_at: When the job's command started, by this machine's clock (aware).
        finished_at: When it ended (aware).
    """

    nonce: str
    workload_sha: str | None = None
    preset_digest: str | None = None
    engine_source: str | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None


@dataclass(frozen=True)
class Case:
    """One report before the rules. `figures` is recomputed from the rows, never read from the report."""

    report: Report
    binding: Binding | None
    figures: Summary

    def claimed(self, *names: str) -> bool:
        """Whether one of these claims is made."""
        return any(claim.name in names for claim in self.report.claims)

    def arm_of(self, claim: Claim) -> Arm | None:
        """The arm a claim is about: the one it names, else the only system under test."""
        return self._one(claim.arm, "sut")

    def baseline_of(self, claim: Claim) -> Arm | None:
        """The arm a claim compares with: the one it names, else the only baseline."""
        return self._one(claim.baseline, "baseline")

    def oracle_of(self, claim: Claim) -> Arm | None:
        """The arm a claim of recall parity compares with: the one it names, else the only oracle."""
        return self._one(claim.baseline, "oracle")

    def speed_pairs(self) -> Iterator[tuple[Arm, Arm]]:
        """Each (arm, baseline) of which a speed is claimed, once, as far as both exist."""
        seen: set[tuple[str, str]] = set()
        for claim in self.report.claims:
            if claim.name not in SPEED_CLAIMS:
                continue
            arm, baseline = self.arm_of(claim), self.baseline_of(claim)
            if arm is None or baseline is None or (arm.name, baseline.name) in seen:
                continue
            seen.add((arm.name, baseline.name))
            yield arm, baseline

    def speed_arms(self) -> Iterator[Arm]:
        """Each arm that takes part in a speed claim, once."""
        seen: set[str] = set()
        for pair in self.speed_pairs():
            for arm in pair:
                if arm.name not in seen:
                    seen.add(arm.name)
                    yield arm

    def _one(self, name: str | None, role: str) -> Arm | None:
        if name is not None:
            return self.report.arm(name)
        arms = self.report.with_role(role)
        return arms[0] if len(arms) == 1 else None

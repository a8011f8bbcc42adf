"""All families of hostile inputs, in the order of docs/adversary.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.adversary import answers, branches, commits, documents, jobs, records, words, workloads


@dataclass(frozen=True)
class Family:
    """One kind of attack.

    Attributes:
        title: For people.
        attacks: The inputs by name.
        outcome: What comes of them where they do not say so themselves.
        door: Their reader in `doors`; empty: the runner.
    """

    title: str
    attacks: Mapping[str, Any]
    outcome: str = ""
    door: str = ""

    @property
    def outcomes(self) -> list[str]:
        """What comes of its attacks, as the closed set of reasons names it."""
        if self.outcome:
            return [self.outcome]
        return sorted({str(attack.expected) for attack in self.attacks.values()})


REQUESTS: dict[str, Family] = {
    "options": Family("Option injection through refs, branch, preset and parameter names", words.OPTIONS),
    "shell": Family("Shell metacharacters and placeholders", words.SHELL),
    "controls": Family("NUL, newlines and other control characters", words.CONTROLS),
    "bidirectional": Family("Bidirectional characters", words.BIDIRECTIONAL),
    "homoglyphs": Family("Homoglyphs, zero-width and tag characters", words.HOMOGLYPHS),
    "paths": Family("Path traversal in files, refs and names", words.PATHS),
    "duplicates": Family("Duplicate JSON keys", documents.DUPLICATES),
    "nesting": Family("Deep nesting", documents.NESTING),
    "numbers": Family("Huge numbers, NaN and numbers of another type", documents.NUMBERS),
    "gigantic": Family("Gigantic manifests", documents.GIGANTIC),
    "schemas": Family("Wrong schema versions, unknown and missing keys, what is no JSON", documents.SCHEMAS),
    "shapes": Family("Request commits of the wrong shape, links in them", commits.SHAPES),
    "replacements": Family(
        "Presets, policy, executor or start-up files changed in the request commit", commits.REPLACEMENTS
    ),
    "git-in-requests": Family("`.git` lookalikes in a request commit", commits.GIT_FOLDERS_IN_REQUESTS),
    "git-in-workloads": Family("`.git` lookalikes in a workload", commits.GIT_FOLDERS_IN_WORKLOADS),
    "links": Family("Symbolic links out of the workspace", workloads.LINKS),
    "names": Family("File names that lead elsewhere or come twice", workloads.NAMES),
    "git-obeys": Family("`.gitattributes`, filters, hooks and submodules", workloads.GIT_OBEYS),
    "lfs": Family("Git LFS pointers and settings", workloads.LFS),
    "stale": Family("Stale, foreign and forbidden requests", documents.STALE),
    "signatures": Family("What is no signature", documents.SIGNATURES),
}

OTHERS: dict[str, Family] = {
    "names": Family("Branches of odd names", branches.NAMES, "no request to anybody"),
    "jobs": Family(
        "Fork bombs, floods, children that outlive the job, reports that are something else",
        jobs.JOBS,
        "ended and answered, nothing of it remains",
    ),
    "answers": Family("Forged and altered results", answers.FORGED, "reported as such, exit code 3"),
}

RECORDS: dict[str, Family] = {
    "claims": Family("Forged and broken claims", records.CLAIMS, "counts for nothing", "claim"),
    "registrations": Family("Registrations of runners", records.REGISTRATIONS, "not shown", "registration"),
    "cancels": Family("Cancel requests", records.CANCELS, "not honoured", "cancel"),
    "presets": Family("Preset files", records.PRESETS, "the runner does not start", "preset"),
    "policies": Family("Policy files", records.POLICIES, "the runner takes nothing", "policy"),
    "reports": Family("Evidence reports", records.REPORTS, "rejected", "report"),
}

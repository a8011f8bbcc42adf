"""The page docs/adversary.md: what is thrown at the bridge, and how much of it."""

from __future__ import annotations

from collections.abc import Mapping

from tests.adversary.families import OTHERS, RECORDS, REQUESTS, Family

_INTRO = """# The adversary suite

What arrives over the bus is hostile until it was checked. `tests/adversary/` holds hostile inputs as tables
of data, each with what must come of it; the tests next to them give each to its reader.
This page counts the tables.

"""

_REQUESTS = """## Requests

Each is a commit that a runner's queue reads (`bridge/runner/queue.py`) and its admission decides about
(`bridge/runner/admission.py`); where it is admitted, it is laid out as a job's workspace. Either it is
refused with exactly that reason, in one line that is safe to show, or (`ok`) it is harmless and arrives as
plain data. No canary file may appear.

"""

_ATTACKED = """
The same requests are pushed with plain git to a bare repository that a real runner serves (two of each family
in `make slow`, all in `make exhaustive`). Each answer is read from the repository
itself. Afterwards no canary file exists, a listening server was never called, the user's home, configuration,
branches and hooks are as they were, no process is left, and an honest request was served in between.

A signed request is answered within 20 s among 40,000 refs that others pushed, 4,000 of them made-up
requests, request commits of 96 MB, and names of 4,000 characters or of no encoding (`make e2e`).

A workload that brings presets, policy, executor, interpreter, `sitecustomize.py`, `conftest.py` and more of
its own is laid out for presets that take data: what runs is what is installed, by the digest of its preset
and the words of its log.
"""

_RECORDS = """
## Other documents

Each is an honest document with something changed in it, given to its reader. The reader says no with its own
error, in one line, within seconds. The forged reports of `tests/bridge/evidence/` are not counted here.

"""

_OTHERS = """
## Names, jobs and answers

A branch whose name is no request's is left alone, and its name reaches nothing that would obey it. A result
is held against its request by a client that trusts one runner's key; what is wrong with it apart from its
signature is also found where no key is trusted.

Jobs run under a real runner with small limits. Each ends with a verdict of the closed set, its processes and
folders are gone, and the next request is served. What only some machines enforce (no writes outside, no
network, no look at keys or other programs) is asked where the result says that it was enforced.

"""

_FUZZ = """
## Fuzzing

Manifests, claims, registrations, results, cancel requests, reports, presets and policies are also mutated at
random: pieces cut, doubled and put in, values replaced by odd ones, lines moved. Their readers must refuse
with their own error and in words, within seconds, or take what an oracle takes that shares no code with them
(`tests/adversary/oracle.py`: the published schemas read to the letter, and rules of its own). Mutants of a
signature must not verify.

- `make test` and `make slow` do that with hypothesis, the same examples each time.
- `make fuzz` does it with [atheris](https://pypi.org/project/atheris/), guided by coverage, `FUZZ_S` seconds
  each, in an environment of its own. There are wheels for Linux on x86-64 and Python 3.11 to 3.14; elsewhere
  it says so and ends. An input that breaks the rule is left as `crash-…` or `timeout-…`.
"""


def page() -> str:
    """The whole page."""
    return (
        _INTRO
        + f"Hostile inputs in all: **{_count(REQUESTS) + _count(RECORDS) + _count(OTHERS)}**.\n\n"
        + _REQUESTS
        + _table(REQUESTS)
        + _ATTACKED
        + _RECORDS
        + _table(RECORDS)
        + _OTHERS
        + _table(OTHERS)
        + _FUZZ
    )


def _count(families: Mapping[str, Family]) -> int:
    return sum(len(family.attacks) for family in families.values())


def _table(families: Mapping[str, Family]) -> str:
    lines = ["| family | inputs | what comes of them |", "| --- | ---: | --- |"]
    for family in families.values():
        outcomes = ", ".join(outcome if family.outcome else f"`{outcome}`" for outcome in family.outcomes)
        lines.append(f"| {family.title} | {len(family.attacks)} | {outcomes} |")
    return "\n".join([*lines, f"| **all** | **{_count(families)}** | |", ""])

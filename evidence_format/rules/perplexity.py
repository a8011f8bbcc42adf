"""Do scored chunks of a text agree with themselves, and does their comparison say anything?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean

from evidence_format.claims import FEWEST_CHUNKS
from evidence_format.figures import Case, faults
from evidence_format.model import PerplexityComparison, ScoredChunk
from evidence_format.policies import NATIVE, PolicySpec
from evidence_format.text import shown

BITS = 1e-9  # relative slack of bits a value


def perplexity_inconsistent(case: Case) -> Iterator[str]:
    """Chunks of a perplexity report are not of one length, one occurs twice, the policy is none or is not
    what the configuration says, or the codes take bits a value that the policy cannot give.
    """
    if (found := case.report.perplexity) is None:
        return
    chunks, stated, policy = found.chunks, case.configuration, found.policy
    for name, ran in (("kv", found.kv), ("quantize", found.quantize), ("piece", found.piece)):
        if name in stated and stated[name] != ran:
            yield f"configuration.{name} is {shown(stated[name])}, but {shown(ran)} ran"
    lengths, digests = {each.tokens for each in chunks}, {each.tokens_sha256 for each in chunks}
    yield from faults(
        (len(lengths) > 1, f"chunks have {min(lengths, default=0)} to {max(lengths, default=0)} tokens"),
        (len(digests) < len(chunks), "a chunk occurs twice"),
        (policy is None, f"{shown(found.kv)} is no policy"),
    )
    for number, chunk in enumerate(chunks, 1):
        if policy is not None and (problem := _code_problem(chunk, policy)):
            yield f"chunk {number}: kv {policy.kind} {problem}"


def _code_problem(chunk: ScoredChunk, policy: PolicySpec) -> str | None:
    if chunk.kv is None or not policy.coded:
        has = "no kv block" if chunk.kv is None else "a kv block"
        return f"has {has}" if (chunk.kv is None) == policy.coded else None
    fewest, most = policy.stored_bits
    bits = 8 * chunk.kv.bytes / chunk.kv.values
    rounded = 8 * len(chunk.kv.layers) / chunk.kv.values  # each layer's bytes may have been rounded down
    if not fewest - rounded <= bits <= most * (1 + BITS):
        return f"stores {fewest:.4g} to {most:.4g} bits a value, not {bits:.4g}"
    return None if chunk.kv.bytes <= chunk.policy_bytes else "codes more bytes than are resident"


def perplexity_vacuous(case: Case) -> Iterator[str]:
    """A perplexity report compares native caches and weights with themselves, nothing differs in any chunk, a
    piece is as long as its chunk, an increase is claimed of fewer than 8 chunks, or the native model predicts
    the text no better than a uniform guess.
    """
    if (found := case.report.perplexity) is None:
        return
    chunks, is_claimed = found.chunks, any(claim.name == "nll_increase" for claim in case.claims)
    vocabulary = (case.target and case.target.vocab_size) or math.inf
    native = fmean([each.native_nll for each in chunks]) if chunks else math.inf
    few = f"{len(chunks)} chunks were scored, a claim needs {FEWEST_CHUNKS}"
    yield from faults(
        (not chunks, "no chunk was scored"),
        (found.policy == NATIVE and found.quantize is None, "native caches and weights are both sides"),
        (chunks and not _differs(found), f"kv {found.kv} changes nothing in any chunk"),
        (any(each.tokens < found.piece for each in chunks), "a piece covers its chunk, so no code is read"),
        (is_claimed and len(chunks) < FEWEST_CHUNKS, few),
        (chunks and native >= math.log(vocabulary), f"the native model scores {native:.4g} nats a token"),
    )


def _differs(found: PerplexityComparison) -> bool:
    return any(each.policy_nll != each.native_nll for each in found.chunks)

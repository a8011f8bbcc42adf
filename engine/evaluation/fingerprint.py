"""What rows belong to: a journal goes on only where all of this is as it was.

Every switch, the models' weights, the prompts as tokens, the engine's source, the request, the machine and
its versions, and the machine's boot: rows of two machines, or of two states of one, are not mixed.
"""

import ctypes
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.evaluation.journal import Fingerprint
from engine.evaluation.prompts import Prompt
from evidence_format.model import ReportRequest
from evidence_format.text import tokens_digest

BOOT = Path("/proc/sys/kernel/random/boot_id")
VOLATILE = ("power_source", "thermal_state", "swapping", "load", "versions", "git", "models")


def fingerprint(
    environment: Mapping[str, Any],
    configuration: Mapping[str, Any],
    prompts: Sequence[Prompt],
    encoded: Sequence[Sequence[int]],
    request: ReportRequest | None,
) -> Fingerprint:
    """The values that must be equal.

    Args:
        environment: the block of a report.
        configuration: every switch, flat.
        prompts: of the run.
        encoded: their token ids.
        request: what the report is bound to.
    """
    machine = {key: value for key, value in environment.items() if key not in VOLATILE}
    models = {
        f"{role} {key}": value
        for role, card in environment["models"].items()
        for key, value in card.items()
        if key != "cache_layers"  # a list; the weights and the engine's source settle it
    }
    bound = {} if request is None else request.model_dump()
    return {
        **configuration,
        **{f"version of {name}": value for name, value in environment["versions"].items()},
        **models,
        **{f"request {name}": value for name, value in bound.items()},
        "engine source": environment["git"]["source_sha256"],
        "prompts": prompts_digest(prompts, encoded),
        "machine": hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest(),
        "boot": boot_session(),
    }


def prompts_digest(prompts: Sequence[Prompt], encoded: Sequence[Sequence[int]]) -> str:
    """sha256 over ids, token digests and what is asked for, in order."""
    lines = [
        [
            prompt.id,
            tokens_digest(tokens),
            prompt.instruction,
            asdict(prompt.needle) if prompt.needle else None,
        ]
        for prompt, tokens in zip(prompts, encoded, strict=True)
    ]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()


def boot_session() -> str | None:
    """What the system calls the time since it was started; None where it does not say."""
    if sys.platform == "darwin":
        text = ctypes.create_string_buffer(64)
        length = ctypes.c_size_t(len(text))
        ctypes.CDLL(None).sysctlbyname(b"kern.bootsessionuuid", text, ctypes.byref(length), None, 0)
        return text.value.decode() or None
    try:
        return BOOT.read_text().strip()
    except OSError:
        return None

"""A comparison with a reference and its evidence report: every round, and the digests of both sides."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.device import Runtime
from engine.errors import ConfigurationError
from engine.evaluation.environment import LoadWatch, describe, target_card
from engine.evaluation.golden import compare_all
from engine.evaluation.measure import Progress
from engine.evaluation.parity import DIFFERENCES, Parity, finite
from engine.evaluation.prompts import load_prompts
from engine.evaluation.reference import plain_reference, stored_reference
from engine.evaluation.report import Report, now
from engine.evaluation.target_parity import compare_target, open_target
from engine.target.folder import ModelCard
from evidence_format.model import ReportRequest


@dataclass(frozen=True)
class ParitySwitches:
    """What the command line can set about a comparison.

    Attributes:
        golden: a case or a folder of cases; None compares a target with plain decoding.
        target: whether it is the target that is compared.
        model: the target's folder; None for the shipped one.
        prompts, limit, max_tokens, prefill_chunk: the texts of a target.
        dtype: what ours is computed in; None for the default.
        tolerance: largest difference that passes; None for that of the dtype.
        reference: name of the implementation behind ``golden``; None for what the cases say.
    """

    golden: Path | None = None
    target: bool = False
    model: Path | None = None
    prompts: str = "all"
    limit: int = 2
    max_tokens: int = 48
    prefill_chunk: int = 2048
    dtype: str | None = None
    tolerance: float | None = None
    reference: str | None = None

    def check(self) -> None:
        """Raise ConfigurationError where it is not clear what to compare, or a number makes no sense."""
        if (self.golden is not None) == self.target:
            raise ConfigurationError("give either --golden DIR or --target")
        if self.target and self.reference is not None:
            raise ConfigurationError("--reference names who made stored outputs; leave it out with --target")
        for name in ("limit", "prefill_chunk"):
            if getattr(self, name) < 1:
                flag = "--" + name.replace("_", "-")
                raise ConfigurationError(f"{flag} must be at least 1, not {getattr(self, name)}")


def measure_parity(
    switches: ParitySwitches, runtime: Runtime, *, progress: Progress, request: ReportRequest | None = None
) -> tuple[Parity, Report]:
    """Compare, and report it. The report claims parity within the tolerance, whatever came out.

    Raises:
        ConfigurationError: a switch does not make sense.
        ModelError: a case or the target cannot be used.
        PromptError: a prompt cannot be used.
    """
    switches.check()
    started, watch = now(), LoadWatch()
    models: dict[str, ModelCard] = {}
    if switches.golden is not None:
        parity = compare_all(switches.golden, switches.tolerance, dtype=switches.dtype or "float32")
        reference = stored_reference(switches.golden, parity, switches.reference)
        own: dict[str, Any] = {"command": "parity --golden", "golden": switches.golden.resolve().name}
    else:
        prompts = load_prompts(switches.prompts, switches.limit)
        target = open_target(switches.model, switches.dtype)
        parity = compare_target(
            target,
            prompts,
            switches.max_tokens,
            switches.prefill_chunk,
            tolerance=switches.tolerance,
            progress=progress,
        )
        models["target"], reference = target_card(target), plain_reference()
        own = {name: getattr(switches, name) for name in ("prompts", "limit", "max_tokens", "prefill_chunk")}
        own["command"] = "parity --target"
    environment = describe(runtime, watch, models)
    versions = environment["versions"]
    report = Report.build(
        "parity",
        started=started,
        claims=[{"name": "parity", "at_most": parity.tolerance}],
        environment=environment,
        configuration=own | {"dtype": parity.dtype, "tolerance": parity.tolerance},
        parity={
            "tolerance": parity.tolerance,
            "dtype": parity.dtype,
            "rounds": _rows(parity),
            "reference": asdict(reference),
            "subject": {
                "implementation": f"kakeya engine {versions['kakeya']} (mlx {versions['mlx']})",
                "sha256": environment["git"]["source_sha256"],
            },
        },
        request=request,
    )
    return parity, report


def _rows(parity: Parity) -> list[dict[str, Any]]:
    """Rounds as the schema has them; a difference that is not finite is null."""
    return [
        asdict(item) | {name: finite(getattr(item, name)) for name in DIFFERENCES} for item in parity.rounds
    ]

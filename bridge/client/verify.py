"""Replay a believed result's report on this machine, by the engine that is installed next to this client.

The engine is another program (``python -m engine verify``), so a client without it can only say so. Rows are
drawn here, after the report was sealed; the record is signed with this client's key where there is one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bridge import signing
from bridge.bus.results import Believed, evidence_report
from bridge.client.signing_key import RequestSigner
from bridge.errors import EvidenceError, MachineError
from bridge.evidence.verification import NAME, SIGNATURE_NAME, Verification, parse_verification
from bridge.proc import helper_environment, spawn

TIMEOUT_S = 3600.0
CONFIRMED, REFUTED = 0, 1  # exit codes of `kakeya_engine verify`
# What the engine sees of our environment besides what helpers see: where models lie, and which BLAS.
_PASSED = (
    "KAKEYA_BLAS",
    "KAKEYA_STATE",
    "HF_HOME",
    "HF_HUB_CACHE",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
)
_MODELS = "KAKEYA_MODEL_"


@dataclass(frozen=True)
class Verified:
    """A record and its signature.

    Attributes:
        record: What was found.
        data: Its bytes.
        signature: Of these, by this client's key; None: there is none.
    """

    record: Verification
    data: bytes
    signature: bytes | None

    @property
    def exit_code(self) -> int:
        """What a command that verifies ends with."""
        return 0 if self.record.confirmed else EvidenceError.exit_code

    def as_json(self) -> dict[str, object]:
        """The record for a command's JSON line, and whether it is signed."""
        document = self.record.model_dump(mode="json", by_alias=True)
        return document | {"signed": self.signature is not None}

    def save(self, folder: Path) -> list[Path]:
        """Write the record, and its signature, next to the files of the result."""
        files = {NAME: self.data} | ({} if self.signature is None else {SIGNATURE_NAME: self.signature})
        for name, data in files.items():
            (folder / name).write_bytes(data)
        return [folder / name for name in files]


def verify(believed: Believed, sample: int, signer: RequestSigner, *, output: int) -> Verified:
    """Replay the report of a believed result.

    Args:
        believed: The result.
        sample: Rows to draw.
        signer: Signs the record.
        output: Descriptor that the engine's table and progress go to.

    Raises:
        EvidenceError: The result holds no report, or the engine's record is none of it.
        MachineError: The engine is not installed here, or cannot replay the report.
    """
    result = believed.result
    report = evidence_report(believed)
    if importlib.util.find_spec("engine") is None or importlib.util.find_spec("mlx") is None:
        raise MachineError(
            "the engine is not installed here, so the report cannot be replayed",
            "pip install 'kakeya-mac[engine]', or let a runner do it: "
            f"kakeya_mac run --preset verify -p request={result.nonce}",
        )
    with tempfile.TemporaryDirectory(prefix="kakeya-mac-") as folder:
        path, record = Path(folder) / "report.json", Path(folder) / NAME
        path.write_bytes(report)
        argv = [sys.executable, "-I", "-m", "engine", "verify", str(path), f"--sample={sample}"]
        child = spawn([*argv, f"--record={record}"], env=_environment(), output=output)
        try:
            code = child.wait(TIMEOUT_S)
        finally:
            child.kill()
        if code not in (CONFIRMED, REFUTED) or not record.is_file():
            ended = f"did not end in {TIMEOUT_S:.0f} s" if code is None else f"ended with exit code {code}"
            raise MachineError(
                f"the report cannot be replayed here: kakeya_engine verify {ended}",
                f"see above; or let a runner do it: kakeya_mac run --preset verify -p request={result.nonce}",
            )
        data = record.read_bytes()
    found = parse_verification(data)
    if found.report.sha256 != (digest := hashlib.sha256(report).hexdigest()):
        raise EvidenceError(f"the record is for the report {found.report.sha256}, not for {digest}")
    return Verified(found, data, signer.sign(signing.VERIFICATION_NAMESPACE, data))


def _environment() -> dict[str, str]:
    """Of the engine: our helpers', and where models lie."""
    passed = {
        name: value for name, value in os.environ.items() if name in _PASSED or name.startswith(_MODELS)
    }
    return helper_environment(passed | {"LC_ALL": "C.UTF-8", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"})

"""From how a job ended and what it reported to one status and reason. Pure."""

from __future__ import annotations

import signal
from datetime import datetime

from bridge.evidence.gate import Binding
from bridge.evidence.gate import judge as gate
from bridge.evidence.promised import broken_promises
from bridge.presets import Preset
from bridge.protocol.result import Reason, Status, Verdict
from bridge.runner.child import Ended
from bridge.runner.isolation.watchdog import Breach

_GIB = 1 << 30


def of_ending(preset: Preset, ended: Ended) -> Verdict | None:
    """The verdict of a child that did not end well; None: it did, and its report decides."""
    if ended.timed_out:
        return _failed(
            Reason.TIMEOUT, f"the job did not end within its time and was killed ({_after(ended)})"
        )
    if ended.flooded:
        return _failed(Reason.OUTPUT_LIMIT, f"the job printed too much and was killed ({_after(ended)})")
    if ended.breach is not None:
        return _failed(Reason.RESOURCE_LIMIT, f"{_of(ended.breach)} ({_after(ended)})")
    if ended.exit_code == -signal.SIGXFSZ:
        return _failed(Reason.RESOURCE_LIMIT, f"the job wrote a bigger file than it may ({_after(ended)})")
    if ended.exit_code is None:
        return _failed(Reason.RUNNER_ERROR, "the job's exit code could not be collected")
    if ended.exit_code < 0:
        return _failed(Reason.EXIT_CODE, f"the job was killed by {_signal(-ended.exit_code)}; see the log")
    if ended.exit_code == preset.rejected_exit_code:
        message = f"the job rejected the evidence it was given (exit code {ended.exit_code}); see the log"
        return Verdict(status=Status.REJECTED, reason=Reason.EVIDENCE, message=message)
    if ended.exit_code > 0:
        return _failed(Reason.EXIT_CODE, f"the job ended with exit code {ended.exit_code}; see the log")
    return None


def judge(
    preset: Preset,
    report: bytes | None,
    name: str | None,
    *,
    nonce: str,
    workload_sha: str,
    began: datetime,
    finished: datetime,
) -> Verdict:
    """The verdict of a child that ended with exit code 0.

    Args:
        preset: What ran.
        report: The bytes it left; None: no report.
        name: The report's file name.
        nonce: Of the request.
        workload_sha: Of the request.
        began: When the child started (aware).
        finished: When it ended (aware).
    """
    if preset.evidence is None:
        return Verdict(status=Status.PASSED, reason=Reason.OK, message="the job ended with exit code 0")
    if report is None:
        return _failed(Reason.NO_EVIDENCE, "the job ended with exit code 0 but left no report")
    binding = Binding(nonce, workload_sha, preset.digest, preset.engine, began, finished)
    judgement = gate(report, binding=binding)
    violations = [
        violation.model_copy(update={"file": name})
        for violation in (*judgement.violations, *broken_promises(preset.evidence, judgement))
    ]
    if violations:
        codes = ", ".join(dict.fromkeys(violation.code for violation in violations))
        return Verdict(
            status=Status.REJECTED,
            reason=Reason.EVIDENCE,
            message=f"the gate rejected the report: {codes}",
            violations=tuple(violations[:1000]),
        )
    return Verdict(status=Status.PASSED, reason=Reason.OK, message="the gate accepted the report")


def cancelled(reason: Reason, message: str) -> Verdict:
    """The verdict of a job that was stopped before its end."""
    return Verdict(status=Status.CANCELLED, reason=reason, message=message)


def _failed(reason: Reason, message: str) -> Verdict:
    return Verdict(status=Status.FAILED, reason=reason, message=message)


def _of(breach: Breach) -> str:
    used, allowed = breach.used, breach.allowed
    if breach.what == "left":
        figures = f"{used / _GIB:.3g} GiB left"
    elif breach.what in ("memory", "disk"):
        figures = f"{used / _GIB:.3g} GiB, at most {allowed / _GIB:.3g}"
    else:
        figures = f"{used}, at most {allowed}"
    return {
        "memory": f"the job took more memory than it may ({figures}) and was killed",
        "processes": f"the job ran more processes and threads than it may ({figures}) and was killed",
        "disk": f"the job's files took more of the disk than they may ({figures})",
        "files": f"the job made more files than it may ({figures})",
        "left": f"the disk was about to be full ({figures}) and the job was killed",
        "depth": f"the job nested its folders deeper than they may be ({figures})",
    }[breach.what]


def _after(ended: Ended) -> str:
    return f"after {ended.seconds:.1f} s"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

"""From how a job ended and what it reported to one status and reason. Pure."""

from __future__ import annotations

import signal

from bridge.evidence.gate import Binding
from bridge.evidence.gate import judge as gate
from bridge.evidence.required import broken_promises
from bridge.presets import Preset
from bridge.protocol.result import Reason, Status, Verdict
from bridge.runner.child import JobExit
from bridge.runner.sandbox.watchdog import Breach

_GIB = 1 << 30
_BREACHES = {
    "memory": "the job took more memory than it may ({}) and was killed",
    "processes": "the job ran more processes and threads than it may ({}) and was killed",
    "disk": "the job's files took more of the disk than they may ({})",
    "files": "the job made more files than it may ({})",
    "left": "the disk was about to be full ({}) and the job was killed",
    "depth": "the job nested its folders deeper than they may be ({})",
}


def of_exit(preset: Preset, ended: JobExit) -> Verdict | None:
    """The verdict of a child that did not end well; None: it did, and its report decides."""
    code, after = ended.exit_code, f"after {ended.seconds:.1f} s"
    if ended.timed_out:
        return failed(Reason.TIMEOUT, f"the job did not end within its time and was killed ({after})")
    if ended.flooded:
        return failed(Reason.OUTPUT_LIMIT, f"the job printed too much and was killed ({after})")
    if ended.breach is not None:
        return failed(Reason.RESOURCE_LIMIT, f"{_sentence(ended.breach)} ({after})")
    if code == -signal.SIGXFSZ:
        return failed(Reason.RESOURCE_LIMIT, f"the job wrote a bigger file than it may ({after})")
    if code is None:
        return failed(Reason.RUNNER_ERROR, "the job's exit code could not be collected")
    if code < 0:
        return failed(Reason.EXIT_CODE, f"the job was killed by {_signal_name(-code)}; see the log")
    if code == preset.rejected_exit_code:
        message = f"the job rejected the evidence it was given (exit code {code}); see the log"
        return Verdict(status=Status.REJECTED, reason=Reason.EVIDENCE, message=message)
    if code > 0:
        return failed(Reason.EXIT_CODE, f"the job ended with exit code {code}; see the log")
    return None


def judge(preset: Preset, report: bytes | None, name: str | None, binding: Binding) -> Verdict:
    """The verdict of a child that ended with exit code 0, by the report that it left under this name."""
    if preset.evidence is None:
        return Verdict(status=Status.PASSED, reason=Reason.OK, message="the job ended with exit code 0")
    if report is None:
        return failed(Reason.NO_EVIDENCE, "the job ended with exit code 0 but left no report")
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


def failed(reason: Reason, message: str) -> Verdict:
    """The verdict of a job that failed, or that the runner failed to run."""
    return Verdict(status=Status.FAILED, reason=reason, message=message[:4000])


def _sentence(breach: Breach) -> str:
    used, allowed = breach.used, breach.allowed
    figures = f"{used}, at most {allowed}"
    if breach.what == "left":
        figures = f"{used / _GIB:.3g} GiB left"
    elif breach.what in ("memory", "disk"):
        figures = f"{used / _GIB:.3g} GiB, at most {allowed / _GIB:.3g}"
    return _BREACHES[breach.what].format(figures)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

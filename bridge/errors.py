"""Every error the bridge raises. `exit_code` is what a command ends in that fails with it.

Anything that is not a `BridgeError` is our own bug and ends in `EXIT_BUG`.
"""

from __future__ import annotations

import traceback

EXIT_UNVERIFIED = 7  # a result that passed and is signed by no trusted key
EXIT_BUG = 70
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class BridgeError(Exception):
    """What went wrong, with which value; and what the reader can do next, shown on a line of its own."""

    exit_code = 6

    def __init__(self, message: str, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


class RequestRefused(BridgeError):
    """The request cannot be accepted as it is."""

    exit_code = 2


class ManifestError(RequestRefused):
    """A manifest field is missing, unknown, of the wrong type or out of range."""


class PresetError(RequestRefused):
    """There is no such preset, or its file breaks the preset schema."""


class ParameterError(RequestRefused):
    """A preset parameter is unknown, mistyped, out of range or unsafe."""


class RevisionError(RequestRefused):
    """A ref or commit of the workload does not exist."""


class PolicyError(RequestRefused):
    """The machine's policy does not allow the request."""


class SignatureError(RequestRefused):
    """A signature is missing where one is required, or does not verify."""


class KeyListError(RequestRefused):
    """A list of keys on this machine says nothing: others could have written it, or it is not understood."""


class EvidenceError(BridgeError):
    """Numbers that cannot be believed."""

    exit_code = 3


class ResultError(EvidenceError):
    """A published result that does not belong to its request, or was altered."""


class WaitTimeout(BridgeError):
    """The wait ended before the job did; the job goes on."""

    exit_code = 4


class TooFewResults(BridgeError):
    """Too few results count for what was asked of a series of them."""

    exit_code = 4


class BusError(BridgeError):
    """Git or the network failed."""


class NoRemote(BusError):
    """There is no remote to talk to."""


class RemoteUnreachable(BusError):
    """The remote did not answer, or refused the credentials."""


class AccessDenied(RemoteUnreachable):
    """The remote answered, and refused the credentials or the key."""


class PushRejected(BusError):
    """The remote answered a push and said no."""


class BrokenObject(BusError):
    """An object of the remote that is there and is not what git would write, or too large to be read."""


class FetchTooLarge(BusError):
    """The remote sends too much."""


class LeaseLost(BusError):
    """Another program moved the ref that was ours to move."""


class UnknownHandle(BusError):
    """No request of that name is on this remote, or several are."""

    exit_code = 2


class RequestGone(UnknownHandle):
    """The request was on the remote, and what is needed of it is not there any more."""

    exit_code = 6


class ApiError(BusError):
    """GitHub's REST API did not answer, or said no."""

    def __init__(self, message: str, remedy: str | None = None, *, wait_s: float | None = None) -> None:
        super().__init__(message, remedy)
        self.wait_s = wait_s  # until it can be asked again; None: it does not say


class ApiFault(ApiError):
    """The API did not answer, or has a fault: what it was asked to change may have taken effect."""


class TokenRejected(ApiError):
    """The token is wrong, was revoked or has expired."""


class ScopeMissing(ApiError):
    """The token may not do this."""


class RateLimited(ApiError):
    """The API takes no more calls for a while."""


class ApiNotFound(ApiError):
    """What was asked for is not there, or the token may not see it."""


class ApiConflict(ApiError):
    """What was asked for cannot be done now."""


class NoRunner(BridgeError):
    """No live runner would take the request, so nothing was pushed (`run --require-runner`)."""

    exit_code = 9


class MachineError(BridgeError):
    """This machine lacks something that is needed: a program, disk space, a lock."""


class FolderNotEmpty(MachineError):
    """The folder that a result was to be saved in holds files."""

    exit_code = 2


def describe(error: Exception) -> str:
    """An error for a log that goes on: one of ours by its message, a bug with the place it comes from."""
    if isinstance(error, BridgeError):
        return error.message
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{text}{where} (a bug of kakeya-mac; please report it)"

"""An unanswered request as it stands on the remote, read from any clone: its manifest and its commit."""

from __future__ import annotations

from bridge.bus.git import Git
from bridge.bus.handles import RequestState
from bridge.bus.requests import bound_manifest, read_request
from bridge.client.remotes import Remote
from bridge.client.runs import Request
from bridge.errors import BusError, ManifestError
from bridge.protocol import refs
from bridge.protocol.manifest import Manifest


def standing_request(git: Git, remote: Remote, state: RequestState) -> tuple[Request, Manifest] | None:
    """The request and what it asks; None: what stands there is not readable as one, or not alone.

    Args:
        git: Any checkout; nothing is left in it.
        remote: The bus.
        state: Where the request stands.

    Raises:
        RemoteUnreachable: The remote did not answer.
    """
    branch = state.branch
    commit = state.inbox or (None if branch is None else branch.commit)
    if commit is None:
        return None
    ref = branch.ref if branch is not None and branch.commit == commit else refs.inbox_ref(state.nonce)
    with git.scratch() as scratch:
        if not scratch.exists(commit):
            scratch.fetch(remote.address, [ref])
        try:
            manifest = bound_manifest(read_request(scratch, commit), state.nonce)
        except (ManifestError, BusError):
            return None
    return Request(state.nonce, manifest.result_ref, commit), manifest

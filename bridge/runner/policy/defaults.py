"""What holds where the policy file says nothing, and the file that an owner begins with.

The file says every default, so that reading it is reading the default policy; a test holds it to that.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path

from bridge.errors import MachineError, PolicyError
from bridge.runner.policy.lines import Key

STARTER = """\
# What this machine allows to whoever can push to the remotes it serves. This is the safe default, in full.
# A running runner reads changes between two jobs; while this file is wrong it takes nothing, and says so.
#   kakeya_mac runner policy check              is everything here right?
#   kakeya_mac runner policy explain FILE       would this request run, or which line refuses it?

# Which presets may run. Left out: every installed one, and those in presets/ beside this file.
# allow_presets = ["probe", "throughput"]

# May presets run code of the requested commit? Whoever can push then decides what runs here.
allow_repo_code = false

# Take only requests that are signed by a key in allowed_signers beside this file.
require_signature = false

# Who may ask: names as in allowed_signers, or patterns. "*" is everybody in it; "unsigned" is everybody else.
# allow_requesters = ["ci@example.org", "*@lab.example.org", "unsigned"]

# On which branches requests may come. "*" matches any text.
# allow_refs = ["mac-bridge/*"]

# Of which branches a requested commit must be, tip or history. Let the server protect these branches.
# allow_workloads = ["main", "release/*"]

# When jobs may begin, by this machine's clock; outside of these hours requests "wait", or "refuse" them.
# hours = ["mon-fri 22:00-06:00", "sat,sun"]
# outside_hours = "wait"

# No job runs longer, whatever its preset says.
max_timeout_s = 7200

# What one requester has waiting beyond this is refused; how many of one run at once on all Macs (0: any).
max_queued_per_requester = 1000
max_running_per_requester = 0

# Variables of the runner's own environment that jobs get, too. What they print of them is published.
environment = []

# Another number of waiting requests for some. All unsigned ones together are one requester; 0: none is taken.
[quotas]
# "ci@example.org" = 5000
# unsigned = 20

# What one job may take, with all its processes. Left out, memory is four fifths of what the machine has.
[limits]
# memory = "8 GiB"
disk = "16 GiB"
files = 200000
processes = 1024
output = "8 MiB"
file_size = "4 GiB"
open_files = 4096

# Where ${model:NAME} of a preset lies here. Otherwise: KAKEYA_MODEL_NAME, then ~/kakeya-models/NAME.
[models]
# gemma-4-26b-a4b = "/Users/me/models/gemma"

# Workflow runs of GitHub Actions on this machine: their requests are done "here", by the account that they
# run under, or by the "daemon" of another account, `runner serve --transport actions`, while the run waits.
[actions]
execute = "here"

# Which runs the self-hosted runner's hook lets begin (docs/actions.md). Without repository it lets none.
# repository = "me/workload"
# actors = ["me", "ci-*"]               # left out: whoever can push
# fetch = "git@github.com:me/workload.git"
# key = "/Users/me/.ssh/kakeya-deploy"  # a deploy key that can only read
# Left out: the mac-bridge.yaml that came with this package.
# workflow_sha256 = ["0000000000000000000000000000000000000000000000000000000000000000"]
workflows = [".github/workflows/mac-bridge.yaml"]
events = ["push", "workflow_dispatch"]

# Where the objects of Git LFS come from. Left out, a commit with pointers in place of files is refused.
[lfs]
# endpoint = "https://github.com/me/workload.git/info/lfs"
max = "2 GiB"

# What is said of one preset. Bounds can only become tighter; the words are those of a preset file.
# [presets.throughput]
# timeout_s = 1800
# network = true                      # only for presets that ask for it
# requesters = ["ci@example.org"]
# [presets.throughput.params.max_tokens]
# maximum = 64
# default = 64
"""

_FETCH = '\n# fetch = "git@github.com:me/workload.git"\n'
_KEY = '\n# key = "/Users/me/.ssh/kakeya-deploy"  # a deploy key that can only read\n'
_SAID = {
    "allow_presets": "every installed preset",
    "allow_repo_code": "allow_repo_code = false",
    "require_signature": "require_signature = false",
    "max_timeout_s": "max_timeout_s = 7200",
    "max_queued_per_requester": "max_queued_per_requester = 1000",
    "max_running_per_requester": "max_running_per_requester = 0",
}


def default_line(key: Key) -> str | None:
    """The default that decides where the file does not: ``default: allow_repo_code = false``."""
    said = _SAID.get(key[0])
    return None if said is None else f"default: {said}"


def starter(
    *,
    require_signature: bool = False,
    repository: str | None = None,
    fetch: str | None = None,
    key: Path | None = None,
) -> str:
    """The policy to begin with.

    Args:
        require_signature: Requests must be signed.
        repository: ``owner/name``, whose workflow runs may begin; None: none may.
        fetch: Address from which the hook reads; None: the repository's page.
        key: Private SSH key with which it does; None: as git is set up.
    """
    text = STARTER
    if require_signature:
        text = text.replace("\nrequire_signature = false\n", "\nrequire_signature = true\n")
    if repository is not None:
        text = text.replace('\n# repository = "me/workload"\n', f"\nrepository = {json.dumps(repository)}\n")
    if fetch is not None:
        text = text.replace(_FETCH, f"\nfetch = {json.dumps(fetch)}\n")
    if key is not None:
        text = text.replace(_KEY, f"\nkey = {json.dumps(str(key))}  # a deploy key that can only read\n")
    return text


def write_starter(path: Path, text: str = STARTER, *, force: bool = False) -> None:
    """Write a policy for the owner alone, whole or not at all; its folder is made if it is not there.

    Args:
        path: Where the policy is read from.
        text: What it says.
        force: Replace what is there.

    Raises:
        PolicyError: A policy is there already.
        MachineError: It cannot be written.
    """
    exists = PolicyError(
        f"there is a policy already: {path}", "read it with `policy check`; --force replaces it"
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if force:
                os.replace(name, path)
            else:
                os.link(name, path)  # unlike a rename, it replaces nothing
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
    except FileExistsError:
        raise exists from None
    except OSError as error:
        raise MachineError(f"cannot write {path}: {error.strerror}") from None

"""How a request travels: the workflow file that it brings, and whether its push starts runs.

A push runs the workflows of the pushed commit. Where the workload has none of ours, the request brings the
default branch's; one that the workload has is never replaced.
"""

from __future__ import annotations

from dataclasses import dataclass

from bridge.bus import trees
from bridge.bus.git import Git
from bridge.bus.objects import Entry
from bridge.errors import RevisionError

WORKFLOW_NAME = "mac-bridge.yaml"
WORKFLOW_PATH = f".github/workflows/{WORKFLOW_NAME}"
# In a commit's message: its push starts no run.
STARTS_NO_RUN = "[skip ci]"
_PLAIN_FILE = "100644"


@dataclass(frozen=True)
class Carriage:
    """How a request travels.

    Attributes:
        workflow: Bytes of the workflow file that it brings, because the workload has none; None: none.
        starts_run: Whether a push of it may start workflow runs.
    """

    workflow: bytes | None = None
    starts_run: bool = True


PLAIN = Carriage()


def with_workflow(git: Git, root: bytes, data: bytes, workload: str) -> bytes:
    """A raw root tree with the workflow file in it.

    Args:
        git: Takes the new objects.
        root: The raw root tree.
        data: The file.
        workload: The commit whose root it is.

    Raises:
        RevisionError: It has one already, or something else where a folder belongs.
    """
    hidden, name, _ = WORKFLOW_PATH.split("/")
    outer_sha = folder_in(root, hidden, workload)
    outer = b"" if outer_sha is None else git.read_tree(outer_sha)
    inner_sha = folder_in(outer, name, workload)
    kept = [] if inner_sha is None else git.entries(inner_sha)
    if any(entry.name == WORKFLOW_NAME for entry in kept):
        raise RevisionError(f"the workload {workload[:12]} has a {WORKFLOW_PATH} of its own")
    files = [*kept, Entry(_PLAIN_FILE, "blob", git.write_blob(data), WORKFLOW_NAME)]
    outer = trees.with_folder(outer, name, git.write_tree(files))
    return trees.with_folder(root, hidden, git.write_raw_tree(outer))


def folder_in(tree: bytes, name: str, workload: str) -> str | None:
    """The sha of a folder of a raw tree; None: there is none.

    Args:
        tree: Raw, of the commit `workload`.
        name: Of the folder.
        workload: A commit's sha, for the hash's length and for people.

    Raises:
        RevisionError: Something else has its name.
    """
    row = trees.find(tree, name, len(workload) // 2)
    if row is not None and not row.is_folder:
        raise RevisionError(f"the workload {workload[:12]} has a file named {name} where a folder belongs")
    return None if row is None else row.sha

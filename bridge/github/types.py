"""What the API answers, parsed once into frozen values.

Keys that are not named here are ignored, for the API grows; the types of those that are named are held to.
Names, titles and messages are anybody's text: whoever shows them cleans them.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bridge.errors import ApiError

Text = Annotated[str, Field(max_length=2000)]
Row = TypeVar("Row", bound=BaseModel)


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class Run(_Answer):
    """A workflow run.

    Attributes:
        id: Of the run; the same for all its attempts.
        status: ``queued``, ``pending``, ``waiting``, ``requested``, ``in_progress`` or ``completed``.
        conclusion: Once completed: ``success``, ``failure``, ``cancelled``, …; None before.
        html_url: Its page.
        head_sha: The commit it runs for.
        head_branch: The branch, without ``refs/heads/``; None: it is not on one.
        event: What started it: ``push``, ``workflow_dispatch``, ….
        path: The workflow's file, perhaps with ``@ref`` behind it.
        run_attempt: From 1.
        created_at: Time, as the API writes it.
        display_title: What it is called, as its workflow or its commit says.
    """

    id: int
    status: Text | None = None
    conclusion: Text | None = None
    html_url: Text = ""
    head_sha: Text = ""
    head_branch: Text | None = None
    event: Text = ""
    path: Text = ""
    run_attempt: int = 1
    created_at: Text = ""
    display_title: Text = ""

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.status == "completed"


class Step(_Answer):
    """One step of a job; `number` counts from 1."""

    name: Text
    number: int
    status: Text | None = None
    conclusion: Text | None = None


class Job(_Answer):
    """One job of a run.

    Attributes:
        id: Of the job.
        name: As its workflow says.
        status: As of a run.
        conclusion: As of a run.
        steps: In order; empty before a runner has it.
        runner_name: The machine; None or empty: none has it.
        labels: What it asks of a machine.
        started_at: Time, as the API writes it; None: it waits.
        html_url: Its page.
    """

    id: int
    name: Text
    status: Text | None = None
    conclusion: Text | None = None
    steps: list[Step] = []
    runner_name: Text | None = None
    labels: list[Text] = []
    started_at: Text | None = None
    html_url: Text | None = None

    @property
    def step(self) -> Step | None:
        """The step that runs; None: none does."""
        return next((step for step in self.steps if step.status == "in_progress"), None)


class Artifact(_Answer):
    """What a run uploaded."""

    id: int
    name: Text
    size_in_bytes: int = 0
    expired: bool = False
    digest: Text | None = None


class _Permissions(_Answer):
    admin: bool = False
    push: bool = False
    pull: bool = False


class RepositoryFacts(_Answer):
    """What the API says of a repository.

    Attributes:
        full_name: ``owner/name`` as it is called now.
        private: Whether only members see it.
        visibility: ``public``, ``private`` or ``internal``.
        default_branch: Its name.
        fork: Whether it is one.
        permissions: What the token's user may do; None: it does not say.
    """

    full_name: Text
    private: bool
    visibility: Text = ""
    default_branch: Text
    fork: bool = False
    permissions: _Permissions | None = None


class _Label(_Answer):
    name: Text


class RunnerRow(_Answer):
    """A self-hosted runner of the repository."""

    id: int
    name: Text
    os: Text = ""
    status: Text = ""
    busy: bool = False
    labels: list[_Label] = []

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of its labels."""
        return tuple(label.name for label in self.labels)


class Dispatched(_Answer):
    """The run that a dispatch began, where the server says so."""

    workflow_run_id: int


class Issued(_Answer):
    """A token that lives for an hour, to register a runner with or to remove one."""

    token: Annotated[str, Field(min_length=1, max_length=1000, repr=False)]


class Content(_Answer):
    """A file of the repository."""

    type: Text
    encoding: Text = ""
    content: str = Field(default="", repr=False)


def read(kind: type[Row], document: Any, what: str) -> Row:
    """A value of `kind` from the API's JSON.

    Raises:
        ApiError: It is not what the API documents.
    """
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ApiError(
            f"the API's answer to {what} is not what is documented: {where or 'it'}: {first['msg']}",
            "is the address that of a GitHub API, and no proxy in between?",
        ) from None


def rows(kind: type[Row], document: Any, key: str | None, what: str) -> list[Row]:
    """The values of a page, which stand under `key` (None: the page is the list)."""
    listed = document if key is None else document.get(key) if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise ApiError(
            f"the API's answer to {what} holds no list{'' if key is None else f' {key}'}",
            "is the address that of a GitHub API, and no proxy in between?",
        )
    return [read(kind, item, what) for item in listed]

"""Whether the hook can read the repository whose jobs it judges: asked of the hook's own program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from bridge.mac.action import Action, Run
from bridge.mac.options import Options
from bridge.mac.step import Look, State, answer, reported, succeeds
from bridge.mac.steps.deploy_key import advice, public


@dataclass(frozen=True)
class HookAccess:
    """The policy's repository, seen as the hook sees it."""

    options: Options
    name: str = "hook access"
    stops: bool = False

    @property
    def _argv(self) -> tuple[str, ...]:
        return (str(self.options.program), "runner", "hook", "--probe", "--json")

    def look(self) -> Look:
        """Whether it is the one that was asked for, and can be read."""
        where = " ".join(self._argv[:-1])
        if not self.options.program.exists():
            return Look(State.TODO, where, "looked at when the rest is there")
        found = self._found()
        repository = str(found.get("repository") or "")
        said, remedy = str(found.get("found") or found.get("message") or "no answer"), found.get("remedy")
        if not repository:
            return Look(State.MISSING, where, said, str(remedy or f"try it: {where}"))
        if not is_meant(repository, self.options.slug or ""):
            fix = f'repository = "OWNER/NAME" under [actions] in {self.options.policy}, or another --url'
            finding = f"the policy lets runs of {repository} begin, and --url is {self.options.url}"
            return Look(State.MISSING, where, finding, fix)
        if found.get("reads") is True:
            return Look(State.DONE, where, said)
        if found.get("key") != str(self.options.deploy_key):
            return Look(
                State.MISSING, where, said, f"{self._lines(repository)}; then {self._advice(repository)}"
            )
        if self._can_be_added(repository):
            return Look(State.TODO, where, said)
        return Look(State.MISSING, where, said, self._advice(repository))

    def actions(self) -> tuple[Action, ...]:
        """Have GitHub take the key, where gh may."""
        if not self.options.program.exists():
            found = self.options.slug if self.options.page is not None else None
        else:
            found = self._found().get("repository")
        key = f"{self.options.deploy_key}.pub"
        if not isinstance(found, str) or not self._can_be_added(found):
            return ()
        title = f"kakeya-mac {self.options.name}"
        add = ("gh", "repo", "deploy-key", "add", key, "--repo", self._named(found), "--title", title)
        return (Run(add, remedy=self._advice(found)),)

    def _found(self) -> dict[str, Any]:
        return reported(*self._argv, env=self.options.folders) or {}

    def _can_be_added(self, repository: str) -> bool:
        """Whether gh is logged in and GitHub has not got the key: with it there, something else is wrong."""
        if not succeeds("gh", "auth", "status"):
            return False
        words = (public(self.options.deploy_key) or "").split()
        there = answer("gh", "repo", "deploy-key", "list", "--repo", self._named(repository))
        return len(words) < 2 or words[1] not in (there or "")

    def _named(self, repository: str) -> str:
        """As gh is told of it: with its server, which need not be GitHub's own."""
        return f"{urlsplit(self.options.url or '').hostname}/{repository}"

    def _advice(self, repository: str) -> str:
        parts = urlsplit(self.options.url or "")
        return advice(f"{parts.scheme}://{parts.netloc}/{repository}", self.options.deploy_key)

    def _lines(self, repository: str) -> str:
        host = urlsplit(self.options.url or "").hostname
        return (
            f'fetch = "git@{host}:{repository}.git" and key = "{self.options.deploy_key}" under [actions] in'
            f" {self.options.policy}"
        )


def is_meant(repository: str, slug: str) -> bool:
    """Whether a repository is the one, or one of the organisation, that a runner is registered for.

    Args:
        repository: ``owner/name``.
        slug: ``owner/name``, or the organisation.
    """
    wanted = slug.strip("/").lower()
    return repository.lower() == wanted or repository.lower().partition("/")[0] == wanted

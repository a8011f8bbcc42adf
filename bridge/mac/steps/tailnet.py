"""SSH over a tailnet, for interactive work on a Mac that nobody can reach otherwise. Optional."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from bridge.mac.action import Action, Run
from bridge.mac.options import Options
from bridge.mac.step import Look, State, answer


@dataclass(frozen=True)
class Tailnet:
    """tailscale, connected, with its SSH server on."""

    options: Options
    name: str = "tailnet"
    stops: bool = False

    def look(self) -> Look:
        """What tailscale says."""
        said = answer("tailscale", "status", "--json")
        if said is None:
            fix = "brew install tailscale (the App Store's has no SSH server), and start tailscaled"
            return Look(State.MISSING, "tailscale status", "not installed, or not running", fix)
        try:
            status: dict[str, Any] = json.loads(said)
            own: dict[str, Any] = status.get("Self") or {}
            is_on, keys = status.get("BackendState") == "Running", own.get("sshHostKeys")
        except (ValueError, AttributeError):
            return Look(
                State.MISSING, "tailscale status", "an answer that is not understood", "update tailscale"
            )
        if is_on and keys:
            return Look(State.DONE, "tailscale status", f"SSH at {own.get('DNSName', 'its name')}")
        finding = "SSH is off" if is_on else "not connected"
        if self.options.sudo:
            return Look(State.TODO, "tailscale status", finding)
        return Look(State.MISSING, "tailscale status", finding, f"type: {self.actions()[0].said}")

    def actions(self) -> tuple[Action, ...]:
        """Connect, with SSH; it asks to log in where it must."""
        return (Run(("tailscale", "up", "--ssh"), is_administrators=True),)

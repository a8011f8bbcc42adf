"""``kakeya_mac mcp``: the tools of an agent, over the Model Context Protocol."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import click
import psutil

from bridge.cli import Terminated
from bridge.cli.options import path_option
from bridge.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, MachineError


@click.command(
    epilog="""\b
Examples:
  kakeya_mac mcp
  kakeya_mac mcp --directory ~/work/my-repository

An agent starts this; docs/agents.md has the configuration of each. No call takes 45 s: a job is submitted
with one and looked at with others."""
)
@path_option("--directory", text="The checkout whose requests are meant (default: here).")
def mcp(directory: Path | None) -> None:
    """Serve an agent on standard input and output: submit, status, result, logs, cancel, report and more."""
    if importlib.util.find_spec("mcp") is None:
        raise MachineError(
            "the MCP server is not installed here",
            "in the checkout of kakeya-mac: scripts/install_client.sh VENV mcp",
        )
    from bridge import mcp_server

    if directory is not None:
        try:
            os.chdir(directory.expanduser())
        except OSError as error:
            raise MachineError(
                f"--directory {directory}: {error.strerror}", "name an existing folder"
            ) from None
    try:
        mcp_server.serve()
    except KeyboardInterrupt as stop:
        # The threads of calls in flight end their commands. The one that reads standard input cannot be
        # stopped, and Python would wait for it.
        psutil.wait_procs(psutil.Process().children(), timeout=5)
        os._exit(EXIT_TERMINATED if isinstance(stop, Terminated) else EXIT_INTERRUPTED)

"""The parts of a Mac, in the order in which they are set up."""

from __future__ import annotations

from bridge.mac.options import Options
from bridge.mac.step import Step
from bridge.mac.steps.actions_runner import ActionsRunner
from bridge.mac.steps.environment import Environment
from bridge.mac.steps.hook import Hook
from bridge.mac.steps.large_files import LargeFiles
from bridge.mac.steps.machine import Machine
from bridge.mac.steps.models import Models
from bridge.mac.steps.policy import PolicyFile
from bridge.mac.steps.power import Power
from bridge.mac.steps.remembered import Remembered
from bridge.mac.steps.services import Service, ServiceFile, wanted
from bridge.mac.steps.tailnet import Tailnet


def steps(options: Options) -> tuple[Step, ...]:
    """The parts that these options ask for."""
    own: list[Step] = [Machine(options), Remembered(options), Environment(options), LargeFiles(options)]
    own += [Models(options), PolicyFile(options)]
    if options.is_actions:
        own += [Hook(options), ActionsRunner(options)]
    for service in wanted(options):
        own += [ServiceFile(options, service), Service(options, service)]
    own.append(Power(options))
    if options.tailnet:
        own.append(Tailnet(options))
    return tuple(own)

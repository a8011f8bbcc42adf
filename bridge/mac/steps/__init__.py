"""The parts of a Mac, in the order in which they are set up, and that in which they are taken back."""

from __future__ import annotations

from bridge.mac import names
from bridge.mac.options import Options
from bridge.mac.step import Step
from bridge.mac.steps.access import HookAccess
from bridge.mac.steps.actions_runner import ActionsRunner
from bridge.mac.steps.deploy_key import DeployKey
from bridge.mac.steps.environment import Environment
from bridge.mac.steps.hook import Hook
from bridge.mac.steps.large_files import LargeFiles
from bridge.mac.steps.launched import Nothing, Service
from bridge.mac.steps.machine import Machine
from bridge.mac.steps.models import Models
from bridge.mac.steps.policy import PolicyFile
from bridge.mac.steps.power import Power
from bridge.mac.steps.remembered import Remembered
from bridge.mac.steps.services import ServiceFile, wanted
from bridge.mac.steps.tailnet import Tailnet
from bridge.mac.steps.unwanted import Removed, Unregistered, Unwanted


def steps(options: Options) -> tuple[Step, ...]:
    """The parts that these options ask for, and those that are there and are not asked for any more."""
    own: list[Step] = [Machine(options), Remembered(options), Environment(options), LargeFiles(options)]
    own.append(Models(options))
    if options.is_actions:
        own.append(DeployKey(options))
    own.append(PolicyFile(options))
    if options.is_actions:
        own += [Hook(options), ActionsRunner(options), HookAccess(options)]
    services = wanted(options)
    asked = [service.label for service in services]
    others = (Unwanted(options, label) for label in names.LABELS if label not in asked)
    own += [unwanted for unwanted in others if unwanted.is_there]
    if not options.is_actions and (unregistered := Unregistered(options)).is_there:
        own.append(unregistered)
    for service in services:
        own += [ServiceFile(options, service), Service(options, service)]
    if not services:
        own.append(Nothing())
    own.append(Power(options))
    if options.tailnet:
        own.append(Tailnet(options))
    return tuple(own)


def services_taken(options: Options) -> tuple[Step, ...]:
    """What uninstall takes back first, whatever was asked for: nothing is removed under what runs."""
    return tuple(Unwanted(options, label) for label in names.LABELS)


def rest_taken(options: Options) -> tuple[Step, ...]:
    """What it takes back then."""
    environments = (options.environment, options.prefix / names.ENVIRONMENTS)
    return (Unregistered(options), Removed("environment", environments))


def last_taken(options: Options) -> Step:
    """What it takes back when nothing else is left: without it nothing would be known of the rest."""
    prefix = options.prefix
    return Removed("what was asked", (prefix / names.SERVICES, prefix / names.ASKED))

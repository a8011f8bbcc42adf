"""What a server says about itself: the models it offers, and whether it is well."""

import time
from importlib.metadata import version as installed_version

from engine.errors import ConfigurationError, ModelNotHere
from engine.registry import SEPARATOR, ModelEntry, Places, locate
from engine.server.service import Service
from engine.server.wire.replies import Health, ModelCard

STARTED = int(time.time())


def version() -> str:
    """Of the product."""
    return installed_version("kakeya-mac")


def cards(service: Service) -> list[ModelCard]:
    """Every id a request may name."""
    return [each for entry in service.registry.entries for each in _cards(service, entry)]


def card(service: Service, identifier: str) -> ModelCard:
    """The card of one id.

    Raises:
        UnknownModel: no such model or channel.
        ConfigurationError: the model does not offer the channel.
    """
    entry, _ = service.registry.resolve(identifier)
    return next(each for each in _cards(service, entry) if each.id == identifier)


def health_of(service: Service) -> Health:
    """Whether requests are served, and how many."""
    figures = service.worker.figures
    reason = None
    if service.closing:
        reason = "the server is shutting down"
    elif not service.worker.healthy:
        reason = "the engine's thread died; the server's log says why"
    return Health(
        status="unavailable" if reason else "ok",
        reason=reason,
        version=version(),
        active=figures.active,
        waiting=max(service.admitted - figures.active, 0),
    )


def _cards(service: Service, entry: ModelEntry) -> list[ModelCard]:
    here, said = True, None
    try:
        locate(entry, Places.of_machine())
    except (ModelNotHere, ConfigurationError) as error:
        here, said = False, str(error)
    about = {
        "summary": entry.summary,
        "target": str(entry.target),
        "drafter": str(entry.drafter) if entry.drafter else None,
        "kv_channels": list(entry.channels),
        "here": here,
        "why_not": said,
        "loaded": entry.name in service.worker.figures.models,
    }
    return [
        ModelCard(
            id=identifier,
            created=STARTED,
            x_kakeya=about | {"kv_channel": channel, "default": identifier == service.registry.default},
        )
        for identifier, channel in [
            (entry.name, entry.default_channel),
            *((f"{entry.name}{SEPARATOR}{name}", name) for name in entry.channels),
        ]
    ]

"""What ``--kv restored:SOURCE`` needs, opened and checked before any work.

The source ``learned`` needs a projector and the DFlash network it was trained with, whether or not that
network also drafts. For the shipped target both are shipped. Otherwise the projector's folder is given; the
network is that of ``--drafter``, or of the folder ``drafter`` next to the projector's, or the shipped one.
"""

from pathlib import Path

from engine.cache.policy import KVPolicy
from engine.drafters.block import BlockDrafter
from engine.drafters.registry import QUANTIZE_MARK, WITH_LOOKUP, split_policy
from engine.errors import ConfigurationError, DrafterMismatchError, ModelError
from engine.networks.projector import DrafterFeatures, Projector, ProjectorConfig
from engine.restoration.session import RestorationPlan
from engine.restoration.sites import sites_of
from engine.restoration.sources import LEARNED, Learned
from engine.target import loading as loaders
from engine.target.folder import SHIPPED, card_of, read_json, weight_files
from engine.target.loading import SHIPPED_DRAFTER, SHIPPED_TARGET, LoadedTarget
from engine.target.model import Target
from evidence_format.model import Model
from evidence_format.weights import digest

SHIPPED_PROJECTOR = SHIPPED / "projector"


def open_restoration(
    policy: KVPolicy,
    target: LoadedTarget,
    *,
    model: Path | None = None,
    projector: Path | None = None,
    drafter: str | None = None,
    dtype: str | None = None,
    seed: int = 0,
) -> RestorationPlan | None:
    """The plan a policy asks for; None where it restores nothing.

    ``model`` and ``projector`` are folders, None for the shipped ones; ``drafter`` is the ``--drafter`` text,
    in which a DFlash folder is looked for; ``seed`` is of the source ``noise``. An InputError says what is
    not named, is named and not needed, cannot be used, or was made for another target or drafter.
    """
    if projector is not None and policy.source != LEARNED:
        raise ConfigurationError(f"--projector goes with --kv restored:{LEARNED} alone, not {policy.spec}")
    if policy.source is None:
        return None
    sites = sites_of(target.target.model, policy.chosen_layers(target.target.model))
    learned = None
    if policy.source == LEARNED:
        shipped = model is None or model.resolve() == SHIPPED_TARGET.resolve()
        folder = projector or (SHIPPED_PROJECTOR if shipped else None)
        if folder is None:
            raise ConfigurationError(
                f"--kv {policy.spec} needs a projector for this target; give --projector FOLDER "
                "(kakeya_engine train projector makes one)"
            )
        learned = load_learned(folder, target, drafter, dtype)
        for site in sites:
            learned.projector.of(site.layer).check(folder, site.layer, site.widths)
    return RestorationPlan(policy.source, policy.sink, policy.window, learned, seed)


def load_learned(
    folder: Path, target: LoadedTarget, drafter: str | None = None, dtype: str | None = None
) -> Learned:
    """Load a projector and the drafter network it was trained with."""
    files = weight_files(folder)
    config = ProjectorConfig.from_dict(read_json(folder / "config.json"))
    _refuse_other("target", config.target, target.card.weights_sha256)
    projector = Projector(config)
    loaders.fill_network(folder, files, projector, None)
    features = features_of(_drafter_folder(folder, config, drafter), target.target, dtype)[0]
    if (features.target_layers, features.size) != (config.target_layers, config.features):
        raise ModelError(
            f"{folder / 'config.json'}: target_layer_ids {list(config.target_layers)} and feature_size "
            f"{config.features} are not the drafter's {list(features.target_layers)} and {features.size}"
        )
    loaders.make_ready(folder, projector, loaders.dtype_of(dtype))
    return Learned(features, projector, card_of(folder, files, projector))


def features_of(folder: Path, target: Target, dtype: str | None) -> tuple[DrafterFeatures, Model]:
    """The features of a folder's DFlash drafter, and its card; ModelError if it holds none for the target."""
    loaded = loaders.load_drafter(folder, target, dtype)
    if not isinstance(loaded.drafter, BlockDrafter) or loaded.card is None:
        raise ModelError(f"{folder} holds no DFlash drafter")
    return DrafterFeatures(loaded.drafter.network), loaded.card


def _drafter_folder(projector: Path, config: ProjectorConfig, drafter: str | None) -> Path:
    """Where the projector's drafter is: in ``--drafter``, next to the projector, or it is the shipped one."""
    spec = split_policy(drafter or "")[0].partition(QUANTIZE_MARK)[0].removeprefix(WITH_LOOKUP)
    neighbour = projector.resolve().parent / "drafter"
    named = spec.removeprefix("dflash:").removeprefix("dflash2:")
    own = [neighbour, Path(named)] if named else [neighbour]
    folders = [each for each in (*own, SHIPPED_DRAFTER) if (each / "config.json").is_file()]
    found = {each: digest(weight_files(each)) for each in folders}
    for folder, weights in found.items():
        if weights == config.drafter:
            return folder
    if other := [each for each in own if each in found]:
        _refuse_other("drafter", config.drafter, found[other[-1]])
    raise ConfigurationError(
        f"{projector} needs the DFlash drafter it was trained with; give it as --drafter "
        f"(with --block 1 it does not draft), or put it at {neighbour}"
    )


def _refuse_other(what: str, wanted: str, found: str) -> None:
    if wanted != found:
        raise DrafterMismatchError(
            f"this projector is for another {what}: it was trained with weights {wanted[:12]}…, "
            f"this {what} has {found[:12]}…"
        )

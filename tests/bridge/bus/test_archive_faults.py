"""A prune loses nothing where servers refuse, caches break and prunes are killed, and says what was wrong."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys

import pytest

from bridge.bus.results import believe
from bridge.errors import PushRejected, RemoteUnreachable
from bridge.protocol import refs
from tests.bridge.bus.archives import (
    NOBODY,
    answered,
    archive_listing,
    archived,
    bridge_refs,
    live,
    many_answered,
    pruned,
)
from tests.worlds import World


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("how", ["setting", "hook"])
def test_a_server_that_deletes_nothing_loses_nothing_and_says_so(world: World, how: str):
    submitted = answered(world)
    if how == "setting":
        world.house.git("config", "receive.denyDeletes", "true", cwd=world.house.remote)
    else:
        world.hook("update", 'case "$3" in *[1-9a-f]*) ;; *) echo "nothing is deleted here"; exit 1;; esac')
    for _ in range(2):
        done = pruned(world)
        assert done.archived == done.deleted == ()
        assert "delet" in (done.refused or "")
        assert bridge_refs(world) == {submitted.ref}
        assert archived(world, submitted.nonce).files == live(world, submitted.nonce).files
    count = world.house.git("rev-list", "--count", refs.ARCHIVE, cwd=world.house.remote)
    assert count == "1"


def test_a_server_that_takes_no_archive_is_one_clear_error(world: World):
    submitted = answered(world)
    world.hook("update", 'case "$1" in *archive) echo "no archives"; exit 1;; esac')
    with pytest.raises(PushRejected, match="no archives"):
        pruned(world)
    assert bridge_refs(world) == {submitted.ref}


def test_a_remote_that_is_away_is_one_clear_error(world: World):
    world.house.remote.rename(world.house.remote.with_name("away.git"))
    with pytest.raises(RemoteUnreachable):
        pruned(world)


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("what", ["a file", "a tree of its own", "rubbish"])
def test_a_broken_cache_is_made_anew(world: World, what: str):
    submitted = answered(world)
    pruned(world, dry_run=True)
    [cache] = (world.root / "state" / "caches").glob("*.git")
    if what == "rubbish":
        for path in [*cache.glob("objects/pack/*.pack"), *cache.glob("objects/??/*")]:
            path.chmod(0o644)
            path.write_bytes(b"rubbish")
    elif what == "a file":
        (cache / "HEAD").unlink()
    else:
        world.house.git("init", "-q", "--bare", "--object-format=sha256", str(world.root / "x"))
        (world.root / "x" / "config").replace(cache / "config")
    assert pruned(world).archived == (submitted.nonce,)
    assert archived(world, submitted.nonce).files


@pytest.mark.exhaustive
def test_a_prune_that_is_killed_again_and_again_loses_nothing(world: World):
    nonces = many_answered(world, 120)
    script = (
        "import sys; from bridge.cli import run_edge; from bridge.cli.prune import prune;"
        f"sys.exit(run_edge(prune, ['--remote', {world.remote!r}]))"
    )
    random_ = random.Random(7)  # noqa: S311 - a seed, no secret
    for _ in range(12):
        process = subprocess.Popen([sys.executable, "-c", script], cwd=world.house.clone, env=world.house.env)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(random_.uniform(0.3, 2.0))
        process.kill()
        process.wait()
    pruned(world)
    assert bridge_refs(world) == set()
    for nonce in nonces[::10]:
        assert believe(archived(world, nonce), trusted=NOBODY).result.nonce == nonce
    records = [name for name in archive_listing(world) if name.endswith("archived.json")]
    assert len(records) == len(nonces)

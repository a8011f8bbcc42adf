"""The prompt cache in memory and on disk: what is found, what leaves first, and files that are not whole."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigurationError
from engine.server.disk_cache import SHORTEST, DiskCache, DiskLimits
from engine.server.prompt_cache import CacheKey, PromptCache
from engine.session import Session, SessionSnapshot
from tests.engine.server.test_scheduler import wait
from tests.engine.test_session import drafter_of, target_of

TEXT = [5 + 7 * at % 90 for at in range(400)]
OURS, THEIRS = CacheKey("one", "a" * 64), CacheKey("one", "b" * 64)


def empty(family: str = "llama") -> SessionSnapshot:
    with Session(target_of(family), drafter_of("prompt-lookup", family), headroom=16) as session:
        return session.snapshot()


@cache
def taken(family: str, count: int, first: int = TEXT[0]) -> SessionSnapshot:
    """Of a session that holds so many tokens of the text, the first of them another perhaps."""
    with Session(target_of(family), drafter_of("prompt-lookup", family), headroom=16) as session:
        session.prefill([first, *TEXT[1:count]])
        return session.snapshot()


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def found(kept: PromptCache, prompt: list[int], key: CacheKey = OURS, family: str = "llama") -> Any:
    """How many tokens are saved, and from where."""
    one = kept.find(key, prompt, lambda: empty(family))
    return (one.snapshot.common(prompt), one.tier) if one else None


# --- in memory ---------------------------------------------------------------------------------------------


def test_the_longest_usable_beginning_is_found_under_its_key_alone():
    kept = PromptCache(8, None, 60)
    kept.add(OURS, taken("gemma3_text", 40))
    kept.add(OURS, taken("gemma3_text", 80))
    assert found(kept, TEXT) == (80, "memory")
    assert found(kept, [*TEXT[:50], 3, 4]) == (40, "memory")  # a sliding layer cannot go back that far
    assert found(kept, [*TEXT[:35], 3, 4]) == (35, "memory")
    assert found(kept, [*TEXT[:10], 3, 4]) is None
    assert found(kept, TEXT, THEIRS) is None


def test_what_a_longer_one_serves_too_is_dropped_and_not_kept_again():
    kept = PromptCache(8, None, 60)
    for count in (40, 80, 60):
        kept.add(OURS, taken("llama", count))
    assert len(kept) == 1
    kept.add(THEIRS, taken("llama", 40))
    assert len(kept) == 2
    for count in (40, 80, 60):
        kept.add(CacheKey("two", "c" * 64), taken("qwen3_5", count))  # recurrent layers serve one length each
    assert len(kept) == 5


def test_the_least_recently_used_leaves_first_by_number_and_by_bytes():
    kept = PromptCache(2, None, 60)
    for first in (1, 2):
        kept.add(OURS, taken("llama", 40, first))
    assert found(kept, [1, *TEXT[1:60]])
    kept.add(OURS, taken("llama", 40, 3))
    assert [found(kept, [first, *TEXT[1:60]]) is not None for first in (1, 2, 3)] == [True, False, True]
    size = taken("llama", 40, 1).nbytes
    kept = PromptCache(9, 2 * size, 60)
    for first in (1, 2, 3):
        kept.add(OURS, taken("llama", 40, first))
    assert len(kept) == 2
    assert kept.nbytes <= 2 * size
    kept.add(OURS, taken("llama", 400, 4))  # larger than all there may be
    assert kept.nbytes <= 2 * size


def test_entries_expire_after_their_last_use_and_leave_with_their_model():
    clock = Clock()
    kept = PromptCache(8, None, 10, clock=clock)
    kept.add(OURS, taken("llama", 40))
    kept.add(CacheKey("two", "c" * 64), taken("llama", 40))
    clock.now += 9
    assert found(kept, TEXT)
    clock.now += 9
    kept.expire()
    assert len(kept) == 1
    kept.close("two")
    assert len(kept) == 1
    kept.close("one")
    assert len(kept) == 0


def test_a_prompt_is_waited_for_where_it_saves_much_and_leaves_a_snapshot_where_they_part():
    kept = PromptCache(8, None, 60)
    other = [*TEXT[:200], 3, 4, 5]
    with kept.prefill(OURS, TEXT, 350, 0) as prefill:
        assert not kept.coming(THEIRS, other)
        assert not kept.coming(OURS, [*TEXT[:20], 3])  # too little in common
        assert kept.coming(OURS, other)
        assert prefill.next_stop(len(TEXT)) == 200
        prefill.done = 200
        assert not kept.coming(OURS, other)
        assert prefill.next_stop(len(TEXT)) == 350
    assert not kept.coming(OURS, other)


def test_the_same_prompt_is_waited_for_however_short_it_is():
    kept, prompt = PromptCache(8, None, 60), TEXT[:12]
    with kept.prefill(OURS, prompt, 10, 0) as prefill:
        assert kept.coming(OURS, list(prompt))
        prefill.done = 10
        assert not kept.coming(OURS, list(prompt))


def test_a_prompt_that_parts_from_one_before_leaves_a_snapshot_there():
    kept = PromptCache(8, None, 60)
    kept.add(OURS, taken("gemma3_text", 300))
    prompt = [*TEXT[:150], 3, 4, 5, *TEXT[:90]]
    with kept.prefill(OURS, prompt, 200, 0) as prefill:
        assert prefill.stops == {150, 200}
    with kept.prefill(OURS, prompt, 200, 140) as prefill:  # it would save a few tokens
        assert prefill.stops == {200}
        with kept.prefill(OURS, [*prompt[:190], 7], 190, 0) as other:  # nor is one under way too late
            assert other.stops == {190}
        with kept.prefill(OURS, [*prompt[:180], 7, *TEXT[:90]], 250, 0) as other:
            assert other.stops == {180, 250}


def test_a_cache_of_nothing_keeps_nothing_and_makes_no_one_wait():
    kept = PromptCache(0, None, 60)
    kept.add(OURS, taken("llama", 40))
    assert len(kept) == 0
    with kept.prefill(OURS, TEXT, 350, 0) as prefill:
        assert not prefill.stops  # each is a forward of its own
        assert not kept.coming(OURS, TEXT)


# --- on disk -----------------------------------------------------------------------------------------------


class Disk:
    """A folder, and caches over it one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, Clock()
        self.open: list[DiskCache] = []

    def start(self, **limits: int) -> PromptCache:
        """As after a restart: nothing in memory."""
        self.stop()
        self.open = [DiskCache(DiskLimits(self.folder, **limits), clock=self.clock)]
        return PromptCache(8, None, 60, self.open[0])

    def stop(self) -> None:
        """Let what waits be written."""
        for each in self.open:
            each.close()
        self.open = []

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A folder that is not there yet."""
    made = Disk(tmp_path / "kept")
    yield made
    made.stop()


def saved(disk: Disk, family: str = "llama", count: int = 300, first: int = TEXT[0], **limits: int) -> Path:
    """Have a snapshot saved by a process that ends; return its file."""
    kept = disk.start(**limits)
    before = set(disk.files)
    kept.add(OURS, taken(family, count, first))
    kept.save(OURS, [first, *TEXT[1:count], 3])
    disk.stop()
    (new,) = set(disk.files) - before
    return new


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5"])
def test_a_saved_prompt_is_found_after_a_restart_once_from_disk(disk: Disk, family: str):
    file = saved(disk, family)
    assert file.stat().st_mode & 0o777 == 0o600
    assert disk.folder.stat().st_mode & 0o777 == 0o700
    kept = disk.start()
    assert found(kept, TEXT, THEIRS, family) is None
    assert found(kept, TEXT, OURS, family) == (300, "disk")
    assert found(kept, TEXT, OURS, family) == (300, "memory")
    assert (kept.hits["disk"], kept.hits["memory"]) == (1, 1)
    assert kept.disk_stats.nbytes == file.stat().st_size


def test_a_file_serves_no_prompt_that_its_layers_cannot_go_back_for(disk: Disk):
    saved(disk, "gemma3_text")
    kept = disk.start()
    assert found(kept, [*TEXT[:270], 3, 4], family="gemma3_text") is None
    assert kept.disk_stats.entries == 1  # and nothing was read for it


def test_what_is_written_serves_the_same_prompt_again(disk: Disk):
    """Also where that of the answer's end can go back to the end of the prompt, and no token further."""
    kept, back = disk.start(), furthest("gemma3_text", 320)
    prompt = TEXT[: 320 - back]
    kept.add(OURS, taken("gemma3_text", len(prompt) - 1))
    kept.add(OURS, taken("gemma3_text", 320))
    kept.save(OURS, prompt)
    assert found(disk.start(), prompt, family="gemma3_text") == (len(prompt) - 1, "disk")


def furthest(family: str, count: int) -> int:
    """How many of so many tokens a session can forget at most, of those that it can forget one by one."""
    snapshot = taken(family, count)
    return next(each for each in range(1, count) if not snapshot.rewindable(each + 1))


def test_short_prompts_and_such_that_a_file_serves_are_not_written(disk: Disk):
    kept = disk.start()
    for count in (SHORTEST - 1, 300, 310):
        kept.add(OURS, taken("llama", count))
        kept.save(OURS, [*TEXT[:count], 3])
    disk.stop()
    assert len(disk.files) == 1
    kept = disk.start()
    kept.add(OURS, taken("llama", 400))
    kept.save(OURS, [*TEXT[:400], 3])  # a quarter more
    disk.stop()
    (file,) = disk.files  # the shorter one is superfluous now
    assert found(disk.start(), [*TEXT, 3]) == (400, "disk")
    assert file.exists()


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-40] ^= 1
    file.write_bytes(content)


def truncated(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


def headless(file: Path) -> None:
    os.truncate(file, 20)


def of_another_version(file: Path) -> None:
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"]["version"] = "0"
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + content[end:])


def of_another_key(file: Path) -> None:
    file.rename(file.with_name(file.name.replace(OURS.digest, THEIRS.digest)))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (flipped, "other digest"),
        (truncated, "other digest"),
        (headless, "removed"),
        (of_another_version, "another format: kakeya-prompt-cache 0"),
        (of_another_key, "its name has another key"),
    ],
)
def test_a_damaged_file_is_removed_and_logged_once_and_costs_no_request(
    disk: Disk, damage: Callable[[Path], None], says: str, caplog: pytest.LogCaptureFixture
):
    damage(saved(disk))
    caplog.set_level(logging.WARNING)
    kept = disk.start()
    for key in (OURS, THEIRS, OURS):
        assert found(kept, TEXT, key) is None
    assert disk.files == []
    (record,) = caplog.records
    assert says in record.getMessage()


def test_leftovers_of_a_process_that_ended_are_removed_and_other_files_are_left(disk: Disk):
    file = saved(disk)
    part, other = file.with_suffix(".part"), disk.folder / "notes.txt"
    part.write_bytes(file.read_bytes()[:500])
    other.write_text("mine")
    assert found(disk.start(), TEXT) == (300, "disk")
    assert not part.exists()
    assert other.exists()


def test_the_folder_keeps_to_its_size_and_the_least_recently_used_leave_first(disk: Disk):
    files = {first: saved(disk, first=first) for first in (1, 2)}
    size = files[1].stat().st_size
    for age, first in enumerate((1, 2)):
        os.utime(files[first], (1000 + age, 1000 + age))
    assert found(disk.start(), [1, *TEXT[1:]]) == (300, "disk")  # the older one, but used last
    files[3] = saved(disk, first=3, most_bytes=int(2.5 * size))
    assert [files[first].exists() for first in (1, 2, 3)] == [True, False, True]
    disk.start(most_bytes=size)
    assert len(disk.files) == 1
    kept = disk.start(most_bytes=size // 2)  # no file fits
    kept.add(OURS, taken("llama", 300, 4))
    kept.save(OURS, [4, *TEXT[1:300], 3])
    disk.stop()
    assert disk.files == []


def test_no_more_is_written_in_an_hour_than_the_budget(disk: Disk):
    size = saved(disk, first=9).stat().st_size
    kept = disk.start(hourly_bytes=2 * size)
    for first, entries in ((1, 2), (2, 3), (3, 3)):
        kept.add(OURS, taken("llama", 300, first))
        kept.save(OURS, [first, *TEXT[1:300], 3])
        wait(lambda entries=entries: kept.disk_stats.entries == entries)
    assert (kept.disk_stats.skipped, kept.disk_stats.written_bytes) == (1, 2 * size)
    disk.clock.now += 3601
    kept.save(OURS, [3, *TEXT[1:300], 3])
    wait(lambda: kept.disk_stats.entries == 4)


def test_two_servers_do_not_share_a_folder_and_others_may_not_read_it(disk: Disk, tmp_path: Path):
    disk.start()
    with pytest.raises(ConfigurationError, match="another server uses it"):
        DiskCache(DiskLimits(disk.folder))
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    with pytest.raises(ConfigurationError, match="chmod 700"):
        DiskCache(DiskLimits(shared))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be used"):
        DiskCache(DiskLimits(tmp_path / "file"))

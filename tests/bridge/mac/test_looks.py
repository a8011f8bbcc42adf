"""What setup, check and dry runs say of a machine, part by part."""

from __future__ import annotations

import pytest

from tests.bridge.mac.tools import FULL, Mac


@pytest.mark.slow
def test_power_is_looked_at_as_it_is_on_mains(mac: Mac) -> None:
    (mac.fake / "power").write_text("AC Power:\n sleep 0\n autorestart 1\nBattery Power:\n sleep 1\n")
    assert mac.step(mac.setup("check", "--json"), "power")["state"] == "done"
    (mac.fake / "power").write_text("Battery Power:\n sleep 0\nAC Power:\n sleep 10\n autorestart 1\n")
    power = mac.step(mac.setup("check", "--json"), "power")
    assert (power["state"], "sleep 10" in power["finding"]) == ("advice", True)


@pytest.mark.exhaustive
def test_a_filter_that_fetches_by_itself_is_advice(mac: Mac) -> None:
    (mac.home / ".gitconfig").write_text('[filter "lfs"]\n\tprocess = git-lfs filter-process\n')
    done = mac.setup(*FULL)
    step = mac.step(done, "git-lfs")
    assert (done.code, step["state"], "--skip-smudge" in step["fix"]) == (0, "advice", True)
    assert (mac.home / ".gitconfig").read_text().endswith("filter-process\n")


@pytest.mark.exhaustive
def test_a_dry_run_says_what_is_not_done_and_no_more(mac: Mac) -> None:
    fresh = mac.setup(*FULL, "--dry-run").json
    assert all(step["done"] == [] for step in fresh["steps"])
    assert all(
        step["would"] for step in fresh["steps"] if step["state"] == "to do" and "access" not in step["name"]
    )
    assert fresh["changed"] is False
    assert mac.setup(*FULL).code == 0
    done = mac.setup(*FULL, "--dry-run").json
    assert done["ready"] is True
    assert [step["name"] for step in done["steps"] if step["would"]] == ["self-test"]


@pytest.mark.exhaustive
def test_without_a_service_it_says_that_nothing_is_kept_running(mac: Mac) -> None:
    done = mac.run("--service", "none", "--json", "--name", "studio")
    step = mac.step(done, "service")
    assert (done.code, step["state"]) == (0, "advice"), done.err
    assert "nothing is kept running" in step["finding"]

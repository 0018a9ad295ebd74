"""The fixtures that a user gets, used as a user would; and that nobody else notices them."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

import leasekit
from leasekit.testing import faults
from leasekit.testing.clock import FakeClock
from leasekit.testing.effects import Effects
from leasekit.testing.faults import Faulty

pytest_plugins = ["leasekit_pytest"]  # where it is not installed as a plugin

PATIENCE = 30.0


def held_task(client: leasekit.Client, **options: float) -> leasekit.Task:
    client.schedule("k", claim_timeout=4, heartbeat_timeout=4, **options)  # type: ignore[arg-type]
    return next(client.tasks("k"))


def go_on(held: leasekit.Lease, effects: Effects | None = None) -> None:
    """A body that behaves."""
    while True:
        held.check()
        if effects is not None:
            effects.record(held)
        time.sleep(0.005)


def robbed(effects: Effects) -> None:
    until = time.monotonic() + PATIENCE
    while not effects.lost:
        assert time.monotonic() < until, "the lease is not lost"
        time.sleep(0.005)


# Effects


def test_a_body_that_looks_before_each_side_effect_makes_none_after_loss(
    leasekit_client: leasekit.Client, leasekit_service: Faulty, leasekit_effects: Effects
) -> None:
    task = held_task(leasekit_client)
    with pytest.raises(leasekit.LeaseLost), leasekit.lease(task) as held:  # noqa: PT012 - the block raises
        leasekit_effects.record(held)
        leasekit_service.always("beat", faults.steal)
        go_on(held, leasekit_effects)
    leasekit_effects.assert_none_after_loss()


def test_a_side_effect_after_loss_fails_the_test(
    leasekit_client: leasekit.Client, leasekit_service: Faulty, leasekit_effects: Effects
) -> None:
    task = held_task(leasekit_client)
    with pytest.raises(leasekit.LeaseLost), leasekit.lease(task) as held:  # noqa: PT012 - the block raises
        leasekit_service.always("beat", faults.steal)
        robbed(leasekit_effects)
        leasekit_effects.record(held)
    with pytest.raises(AssertionError, match="s after its lease was lost"):
        leasekit_effects.assert_none_after_loss()


def test_a_test_in_which_nothing_was_lost_proves_nothing(
    leasekit_client: leasekit.Client, leasekit_effects: Effects
) -> None:
    with leasekit.lease(held_task(leasekit_client)) as held:
        leasekit_effects.record(held)
    with pytest.raises(AssertionError, match="nothing is proved"):
        leasekit_effects.assert_none_after_loss(within=0)
    leasekit_effects.assert_none_after_loss(lost=0)


def test_a_side_effect_under_a_fence_that_is_anothers_by_now_fails_the_test(
    leasekit_client: leasekit.Client, leasekit_effects: Effects
) -> None:
    first = leasekit.lease(held_task(leasekit_client))
    with first:
        first.release()
    with leasekit.lease(next(leasekit_client.tasks("k"))) as second:
        assert second.fence == 2
        leasekit_effects.record(second)
        leasekit_effects.record(first)
    with pytest.raises(AssertionError, match=r"fence 1: a side effect .* s after its task was granted again"):
        leasekit_effects.assert_none_after_loss(lost=0)


# The others


def test_the_clock_is_the_services_where_both_are_asked_for(
    leasekit_clock: FakeClock, leasekit_service: Faulty, leasekit_client: leasekit.Client
) -> None:
    at = leasekit_clock.later(3600)
    leasekit_client.schedule("k", at=at, claim_timeout=4, heartbeat_timeout=4)
    leasekit_clock.advance(3600)
    task = next(leasekit_client.tasks("k"))
    assert leasekit_service.calls["claim"] == 1
    with pytest.raises(leasekit.LeaseLost) as lost, leasekit.lease(task) as held:  # noqa: PT012 - the block raises
        leasekit_clock.advance(5)
        go_on(held)
    assert lost.value.reason == "expired"


worker = leasekit.Worker()  # of a module, made before any test


@worker.handler("mail", max_attempts=2)
def mail(to: str) -> str:
    return to


@pytest.mark.parametrize("once_more", [False, True])
def test_a_worker_without_a_url_works_in_the_service_of_the_test_alone(
    leasekit_client: leasekit.Client, leasekit_url: str, *, once_more: bool
) -> None:
    scheduled = mail.options(id="the same in each test").schedule("ada")
    assert scheduled.created
    assert worker.drain() == 1
    assert [task.result for task in leasekit_client.wait_tasks(scheduled.id, timeout=PATIENCE)] == ["ada"]
    with leasekit.connect(leasekit_url) as other:
        assert other.get(scheduled.id) is not None


def test_loading_the_plugin_loads_one_module_and_nothing_of_leasekit_or_its_libraries() -> None:
    code = "import sys, pytest; ours = set(sys.modules); import leasekit_pytest; print(*sys.modules.keys() - ours)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["leasekit_pytest"]


def test_a_run_of_pytest_that_asks_for_no_fixture_of_leasekit_imports_none_of_it(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text(
        "import sys\n"
        "def test_it(pytestconfig):\n"
        "    assert pytestconfig.pluginmanager.has_plugin('leasekit_pytest')\n"
        "    assert not {'leasekit', 'msgspec', 'httpx'} & sys.modules.keys()\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", str(tmp_path)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout


def test_all_its_fixtures_say_whose_they_are() -> None:
    import leasekit_pytest

    assert all(name.startswith("leasekit_") for name in leasekit_pytest.__all__)

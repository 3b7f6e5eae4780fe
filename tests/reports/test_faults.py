"""Which figure of an iteration is a fault: beyond the limit of the recipe, and never without one."""

from __future__ import annotations

import math

import pytest

from penstock.configs.sections.faults import FaultsConfig
from penstock.reports.faults import best_reward, fault_after, fault_before, in_a_row, too_many

ALL = FaultsConfig.model_validate(
    {
        "kl": {"limit": 1.0, "action": "rollback"},
        "update_kl": {"limit": 0.1},
        "entropy": {"limit": 0.01, "action": "rollback"},
        "reward": {"fall": 0.5, "action": "skip"},
    }
)
FINE = {"reward/mean": 0.8, "actor/kl": 0.5, "actor/approx_kl": 0.05, "actor/entropy": 0.2}
WELL = [{"reward/mean": 0.8}] * 5


def test_nothing_is_a_fault_by_default() -> None:
    """Not even figures without any sense."""
    odd = dict.fromkeys(FINE, math.nan)
    assert fault_before(FaultsConfig(), WELL, odd) is None
    assert fault_after(FaultsConfig(), odd, kl_known_before=False) is None


@pytest.mark.parametrize("beyond", [1.01, math.inf, math.nan])
def test_a_kl_beyond_its_limit_undoes_the_update_that_led_there(beyond: float) -> None:
    """Before the update where it is known there, else after it, and not twice. Control: at the limit."""
    fault = fault_before(ALL, [], FINE | {"actor/kl": beyond})
    assert fault is not None
    assert (fault.name, fault.action, fault.undone, fault.known_before) == ("kl", "rollback", 2, True)
    later = fault_after(ALL, FINE | {"actor/kl": beyond}, kl_known_before=False)
    assert later is not None
    assert (later.name, later.undone, later.known_before) == ("kl", 2, False)
    assert fault_after(ALL, FINE | {"actor/kl": beyond}, kl_known_before=True) is None
    assert fault_before(ALL, [], FINE | {"actor/kl": 1.0}) is None


def test_what_the_updates_did_is_undone_alone() -> None:
    """A KL within the iteration's own updates says nothing of those before."""
    fault = fault_after(ALL, FINE | {"actor/approx_kl": 0.2}, kl_known_before=True)
    assert fault is not None
    assert (fault.name, fault.action, fault.undone) == ("update_kl", "stop", 1)
    assert "0.2" in fault.says
    assert "0.1" in fault.says
    assert fault_after(ALL, FINE, kl_known_before=False) is None


def test_an_entropy_below_its_limit() -> None:
    """NaN is below, too; an update without a step has no figures and no fault."""
    for value in (0.009, math.nan):
        fault = fault_after(ALL, FINE | {"actor/entropy": value}, kl_known_before=True)
        assert fault is not None
        assert (fault.name, fault.undone) == ("entropy", 2)
    assert fault_after(ALL, {"actor/steps": 0.0}, kl_known_before=True) is None


def test_a_reward_is_compared_with_the_best_of_the_last_iterations() -> None:
    """Means of five in a row, so that one lucky batch sets no mark; control: a fall that is allowed."""
    fault = fault_before(ALL, WELL, FINE | {"reward/mean": 0.29})
    assert fault is not None
    assert (fault.name, fault.action, fault.known_before) == ("reward", "skip", True)
    assert fault_before(ALL, WELL, FINE | {"reward/mean": 0.31}) is None
    assert fault_before(ALL, WELL[:4], FINE | {"reward/mean": -9.0}) is None
    lucky = [{"reward/mean": 0.0}] * 4 + [{"reward/mean": 5.0}]
    assert best_reward(lucky) == pytest.approx(1.0)
    assert best_reward([{"reward/mean": 9.0}] * 5 + [{"reward/mean": 1.0}] * 30) == pytest.approx(1.0)


def test_the_third_fault_in_a_row_is_one_too_many() -> None:
    """Whatever they were; an iteration without one begins anew."""
    kl, reward = {"fault/kl": 1.0}, {"fault/reward": 1.0}
    assert in_a_row([kl, {}, kl, reward]) == 2
    assert too_many([kl, reward])
    assert not too_many([kl, reward, {}])
    assert not too_many([reward])

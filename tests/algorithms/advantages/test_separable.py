"""An estimator that says it is separable makes the same of a batch in portions; one that is not makes something else.

Portions are whole groups. A stream learns from one before the others are there (`rollout.stream`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from penstock.algorithms.advantages import ADVANTAGES
from penstock.algorithms.advantages.types import AdvantageInputs
from penstock.algorithms.declarations.settings import settings
from penstock.algorithms.registry import is_separable
from penstock.algorithms.segments import rows_of_tokens
from tests.algorithms.advantages.batches import ragged_batch, take, without_token_rewards

PORTIONS = ((-2, 3, 99), (0, 1), (-1, 2, 4, 5, 6))  # groups of the batch


def values_of(name: str, **given: Any) -> Mapping[str, Any]:
    """Return an estimator's settings, the defaults but for those given."""
    return {name: setting.default for name, setting in settings(ADVANTAGES[name]).items()} | given


def ways(name: str) -> list[dict[str, bool]]:
    """Return the settings with which an estimator may look at the whole batch, or not; one where it has none."""
    return [{"whiten": True}, {"whiten": False}] if "whiten" in settings(ADVANTAGES[name]) else [{}]


def estimated(name: str, inputs: AdvantageInputs, values: Mapping[str, Any]) -> list[np.ndarray]:
    """Return advantages of the tokens, returns if there are any, and which rows are accepted if some are not."""
    result = ADVANTAGES[name](inputs, **values)
    columns = (result.advantages_T, result.returns_T, result.accepted_B)
    return [np.asarray(column, np.float64) for column in columns if column is not None]


@pytest.mark.parametrize(("name", "given"), [(name, given) for name in sorted(ADVANTAGES) for given in ways(name)])
def test_what_is_separable_is_the_same_in_portions(name: str, given: dict[str, bool]) -> None:
    """To rounding. The control are those that are not: what they make of a portion alone is something else."""
    values = values_of(name, **given)
    batch = without_token_rewards(ragged_batch())
    row_T, group_B = rows_of_tokens(batch.offsets_B1), batch.groups_B
    whole = estimated(name, batch, values)
    same = True
    for groups in PORTIONS:
        inside_B = np.isin(group_B, groups)
        inside_T = inside_B[row_T]
        alone = estimated(name, take(batch, np.flatnonzero(inside_B).tolist()), values)
        for column, of_all in zip(alone, whole, strict=True):
            expected = of_all[inside_T if len(of_all) == len(row_T) else inside_B]
            same &= np.allclose(column, expected, rtol=1e-5, atol=1e-6)
    assert same == is_separable(name, values)


def test_most_estimators_of_groups_are_separable() -> None:
    """So a stream is of use; GAE is without whitening. Control: not with it."""
    separable = {name for name in ADVANTAGES if is_separable(name, values_of(name))}
    assert {"grpo", "rloo", "opo", "otb", "pass_at_k", "best_of_n", "rft", "returns"} <= separable
    assert is_separable("gae", values_of("gae", whiten=False)) and "gae" not in separable

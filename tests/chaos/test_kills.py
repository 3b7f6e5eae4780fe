"""What can never be equal is refused before anything is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.base.errors import UserError
from penstock.chaos.kills import Chaos, unleash

ROOT = Path(__file__).resolve().parents[2]


def test_rollouts_ahead_are_refused(tmp_path: Path) -> None:
    """No two such trainings are equal; nothing is begun."""
    groups = "groups={learning: {ranks: 1, roles: [actor]}, generating: {ranks: 1, roles: [rollout]}}"
    overrides, folder = ["rollout.stream.staleness=1", groups], tmp_path / "chaos"
    with pytest.raises(UserError, match=r"no two trainings are equal(.|\n)*give rollout\.stream=null"):
        unleash(Chaos(ROOT / "configs" / "quickstart.yaml", overrides, folder, 1, 0.0, 0), lambda text: None)
    assert not folder.exists()

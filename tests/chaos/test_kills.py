"""What can never be equal is refused before anything is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.base.errors import UserError
from penstock.chaos.kills import Chaos, unleash

ROOT = Path(__file__).resolve().parents[2]


GROUPS = "groups={learning: {ranks: 1, roles: [actor]}, generating: {ranks: 1, roles: [rollout]}}"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.stream.staleness=1", GROUPS], r"no two trainings are equal(.|\n)*give rollout\.stream=null"),
        (
            ["rollout.carry.keep_kv_cache=true"],
            r"gone with their engine(.|\n)*give rollout\.carry\.keep_kv_cache=false",
        ),
    ],
)
def test_what_is_never_the_same_again_is_refused(tmp_path: Path, overrides: list[str], said: str) -> None:
    """Nothing is begun."""
    folder = tmp_path / "chaos"
    with pytest.raises(UserError, match=said):
        unleash(Chaos(ROOT / "configs" / "quickstart.yaml", overrides, folder, 1, 0.0, 0), lambda text: None)
    assert not folder.exists()

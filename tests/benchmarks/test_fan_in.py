"""What ranks and hosts cost the flow is measured on real ones, without models."""

from __future__ import annotations

import pytest

from penstock.base.errors import UserError
from penstock.benchmarks.fan_in import measure


@pytest.mark.slow
def test_a_command_to_ranks_of_several_hosts_is_measured() -> None:
    """Sixteen ranks are two hosts; every figure is of something that took place."""
    result = measure("command", counts=[2, 16], rounds=3)
    assert [(row["ranks"], row["hosts"]) for row in result.details] == [(2, 1), (16, 2)]
    assert result.figures["command_ms_16"] > 0 < result.figures["start_s_2"]
    assert set(result.figures) == {
        f"{name}_{ranks}" for name in ("command_ms", "command_cpu_ms", "watch_cores", "start_s") for ranks in (2, 16)
    }


def test_ranks_that_do_not_fill_their_hosts_are_refused() -> None:
    """Control: fewer than one host's are fine, above."""
    with pytest.raises(UserError, match="12 ranks do not fill hosts of 8"):
        measure("command", counts=[12], rounds=1)

"""Which figures two runs of one recipe need not agree in: those of the machine, and no other."""

from __future__ import annotations

import pytest

from penstock.state.measured import is_measured
from tests.comparing import is_compared

OF_THE_MACHINE = (
    *("time/rollout_s", "share/other", "memory/gpu_gib", "gpu/clock_mhz", "system/cpu_utilization_percentage"),
    *("throughput/samples_per_s", "throughput/steps_per_s"),
    *("ranks/parallel_efficiency", "reshard/rank_s", "actor/update_s", "critic/mfu", "rollout/tokens_per_s"),
    *("reference/tokens_per_s_per_gpu", "actor/communication_share", "rollout/request_s_p95", "rollout/wake_s"),
    *("rollout/ahead_s", "rollout/engine_idle_share", "rollout/engine_tokens_max"),
)
OF_THE_TRAINING = (
    *("reward/mean", "actor/loss", "actor/micro_batches", "actor/computed_share", "advantage/zero_share", "alarm/kl"),
    *("checkpoint/gib", "reshard/bytes", "rollout/tokens", "rollout/truncated_share", "rollout/logprob_gap"),
    *("rollout/response_length_mean", "rollout/prompts_drawn", "kl/coefficient", "heldout/accuracy", "loss"),
)


@pytest.mark.parametrize("figure", OF_THE_MACHINE)
def test_figures_of_the_machine_are_left_out(figure: str) -> None:
    """Of each kind one."""
    assert is_measured(figure)
    assert not is_compared(figure)


@pytest.mark.parametrize("figure", OF_THE_TRAINING)
def test_figures_of_the_training_are_compared(figure: str) -> None:
    """The control: also those whose names begin or end alike."""
    assert not is_measured(figure)


def test_what_was_begun_ahead_depends_on_a_server() -> None:
    """On the CPU nothing is begun ahead, so there it is compared."""
    assert is_measured("reward/ahead_share")
    assert is_compared("reward/ahead_share")

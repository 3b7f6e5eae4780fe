"""Which recorded figures say how a machine worked, and not what a training did: seconds, memory, rates, use of devices.

Two runs of one recipe agree in all others: what is killed, resumed or replayed is compared in those. How much of the
rewards was begun ahead depends on when a server answered.
"""

from __future__ import annotations

_BEGINNINGS = (
    *("time/", "throughput/", "share/", "memory/", "oom/", "gpu/", "system/", "ranks/", "reshard/rank_s"),
    *("rollout/request_s", "rollout/prompt_s", "rollout/wake_s", "rollout/ahead_s"),
    *("rollout/portion_", "rollout/engine_", "rollout/batch_wait_s"),
    *("alarm/rollout_waits", "tokens_per_s"),
)
_ENDS = ("/update_s", "/mfu", "/tokens_per_s", "/tokens_per_s_per_gpu", "/communication_share", "/ahead_share")


def is_measured(figure: str) -> bool:
    """Whether a figure is of the machine."""
    return figure.startswith(_BEGINNINGS) or figure.endswith(_ENDS)

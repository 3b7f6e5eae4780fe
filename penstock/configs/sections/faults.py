"""What a training does where its numbers say that it should not learn from them. By default: what it must.

A figure has a limit of its own per recipe, since only its author knows what is usual there; alarms with general
thresholds are raised without any (penstock/reports/alarms.py). Left out: the decision (penstock/reports/faults.py).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.configs.sections.algorithm import ONE_STEP, AlgorithmConfig
from penstock.configs.sections.run import CheckpointConfig
from penstock.configs.tree.section import Section

SKIPPED_IN_A_ROW = 3  # optimizer steps, or iterations: one odd batch may be passed over, a row of them ends


class KlFault(Section):
    """A KL to the reference that is too large: of the policy that gave the batch."""

    limit: float = Field(gt=0, description="nats per token, the mean of a batch")
    action: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="skip: no update from that batch, where the KL is known before; rollback: neither from that batch "
        "nor from the one before, which led there",
    )


class UpdateKlFault(Section):
    """A KL between the policies before and within the updates of an iteration that is too large."""

    limit: float = Field(gt=0, description="nats per token, the mean of the iteration's steps")
    action: Literal["stop", "rollback"] = Field("stop", description="rollback: the iteration's updates are undone")


class EntropyFault(Section):
    """An entropy that is too small."""

    limit: float = Field(gt=0, description="nats per token, the mean of a batch")
    action: Literal["stop", "rollback"] = Field(
        "stop", description="rollback: no update from that batch, nor from the one before, which led there"
    )


class RewardFault(Section):
    """A mean reward that lies far below the best of the iterations before."""

    fall: float = Field(gt=0, description="below the best mean of 5 iterations in a row among the last 30")
    action: Literal["stop", "skip"] = Field("stop", description="skip: no update from that batch")


class FaultsConfig(Section):
    """Numerical faults: not learning from a batch, going back to before it, or ending the training."""

    gradient: Literal["skip", "stop"] = Field(
        "skip",
        description="where it is NaN or infinite there is no optimizer step; skip: three in a row stop, stop: one does",
    )
    kl: KlFault | None = Field(None, description="KL to the reference that is too large; null: only an alarm")
    update_kl: UpdateKlFault | None = Field(None, description="KL of an iteration's updates; null: only an alarm")
    entropy: EntropyFault | None = Field(None, description="entropy that is too small; null: only an alarm")
    reward: RewardFault | None = Field(None, description="mean reward that falls; null: nothing")

    @property
    def stops_at(self) -> int:
        """How many optimizer steps in a row without a finite gradient end the training."""
        return SKIPPED_IN_A_ROW if self.gradient == "skip" else 1


def check_faults(faults: FaultsConfig, algorithm: AlgorithmConfig, checkpoint: CheckpointConfig) -> None:
    """Refuse what would change nothing, or is not possible.

    Raises:
        ValueError: names the setting.
    """
    if faults.kl is not None:
        if algorithm.kl is None:
            raise ValueError("'faults.kl' has no effect without 'algorithm.kl': remove it")
        if faults.kl.action == "skip" and not algorithm.kl_before_update:
            raise ValueError(
                "'faults.kl.action' skip needs a KL that is known before the update: choose another, or "
                "'algorithm.kl.place' reward"
            )
    if faults.update_kl is not None and algorithm.on_policy:
        raise ValueError(f"'faults.update_kl' has no effect {ONE_STEP}: remove it, or take more steps")
    back = [name for name in ("kl", "update_kl", "entropy") if _goes_back(getattr(faults, name))]
    if back and not checkpoint.every:
        raise ValueError(f"'faults.{back[0]}.action' rollback needs checkpoints: set 'checkpoint.every'")
    if back and algorithm.kl is not None and algorithm.kl.refresh_every is not None:
        raise ValueError(
            f"'faults.{back[0]}.action' rollback does not go with 'algorithm.kl.refresh_every', of which an earlier "
            "reference is not kept: choose stop"
        )


def _goes_back(fault: Section | None) -> bool:
    return getattr(fault, "action", None) == "rollback"

"""An update of the actor whose gradient comes in portions of the batch, as they are complete (`rollout.stream`).

What a loss is divided by, tokens or sequences of the whole batch, is known with the last portion. So shares are summed
without it, and the sum is weighed before the step. Which portions there are decides in which order numbers are added,
so the same portions give the same weights to the last bit, whenever they come.

Left out: losses that look at all tokens of a batch at a time (a choice of tokens, weights of mean 1), and more than one
step: the recipe is refused. Suffix: `_B` rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from penstock.algorithms.aggregation import Denominators, weight_of_sums
from penstock.algorithms.segments import segment_sum
from penstock.engines.batches.packing import Rows
from penstock.engines.commands.update import ActorLoss, Split
from penstock.engines.training.correction import with_mismatch
from penstock.engines.training.trainer import Trainer
from penstock.engines.training.updates import (
    actor_loss,
    means_and_shares,
    micro_batches,
    tells_experts,
    with_run_sums,
)


@dataclass
class Portions:
    """What is counted over the portions whose gradient is summed.

    Attributes:
        count: how many there were.
        tokens: that count.
        sequences: with a token that counts.
        length: tokens of all rows, with their prompts.
        differences: each micro-batch's largest difference of log-probs, where they are corrected.
    """

    count: int = 0
    tokens: int = 0
    sequences: int = 0
    length: int = 0
    micro_batches: int = 0
    differences: list[torch.Tensor] = field(default_factory=list)
    corrected: bool = False


def add_portion(
    portions: Portions, trainer: Trainer, rows: Rows, index_B: np.ndarray, split: Split, loss: ActorLoss, last: bool
) -> None:
    """Add the gradient of some rows to the trainer's sum; every rank calls it with the same rows.

    Args:
        last: the step comes next. Then there is a backward pass also where no token counts.
    """
    if rows.accepted_B is not None:
        index_B = index_B[rows.accepted_B[index_B]]
    portions.count += 1
    counted_B = segment_sum(rows.mask.values_T, rows.mask.offsets_B1)[index_B]
    if not counted_B.any():
        index_B = index_B[:0]
        if not last:
            return
    alone = Denominators(1.0, 1.0, float(split.max_response_tokens))
    of_batch = actor_loss(loss, split.aggregation, None, portions.differences, tells_experts(trainer))
    batches = micro_batches(trainer, rows, split.micro_batch_tokens, index_B)
    trainer.add_gradient(batches, with_run_sums(of_batch, alone), last)
    portions.tokens += int(counted_B.sum())
    portions.sequences += int((counted_B > 0).sum())
    portions.length += int(rows.lengths_B[index_B].sum())
    portions.micro_batches += len(batches)
    portions.corrected = loss.correction is not None


def take_step(
    portions: Portions, trainer: Trainer, aggregation: str, max_tokens: int, learning_rate: float
) -> dict[str, float]:
    """Take the step on what is summed; return metrics as `penstock.engines.training.updates.update_actor` does.

    Raises:
        RuntimeError: this process has summed nothing, whatever another had.
    """
    if not portions.count:
        raise RuntimeError("there is no gradient to take a step on: this process has not summed it")
    if not portions.tokens:
        trainer.forget_gradient()
        return {"steps": 0.0}
    counts = Denominators(float(portions.tokens), float(portions.sequences), float(max_tokens))
    result = trainer.step_on_sum(learning_rate, weight_of_sums(aggregation, counts))
    metrics = {
        **means_and_shares(result.sums, counts.tokens, portions.length),
        "grad_norm": result.grad_norm,
        "learning_rate": result.learning_rate,
        "micro_batches": float(portions.micro_batches),
        "steps": 1.0,
    }
    return metrics if not portions.corrected else with_mismatch(metrics, portions.differences, trainer.device)

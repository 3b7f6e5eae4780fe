"""Forward passes over finished experience, each rank over its share of rows.

Suffix: `_T` response tokens of this rank's rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import torch

from penstock.base.ragged import Ragged
from penstock.engines.batches.micro_batches import plan_micro_batches
from penstock.engines.batches.packing import PackedBatch, Rows, pack, read_rows
from penstock.engines.commands.forward import Logprobs, Score, Scores, TokenValues
from penstock.engines.ranks.models import CountedModel, RankModels
from penstock.engines.ranks.serving.handlers import carries_out, in_portions
from penstock.engines.ranks.serving.usage import work_on
from penstock.engines.weights.lora import without_adapters


@carries_out(Logprobs, during_generation=in_portions, beside=True)
@torch.no_grad()
def logprobs(models: RankModels, command: Logprobs) -> TokenValues:
    """Compute log-probs of this rank's rows; the reference beside an actor with adapters is that actor without them."""
    role, rows = command.role, read_rows(command.path, routes=command.replayed)
    base = role == "reference" and role not in models.frozen
    policy = models.model("actor" if base else role)
    with without_adapters(models.lm) if base else nullcontext():
        return per_token(models, rows, role, command.budget, lambda batch: policy(batch, command.temperature)[0])


def per_token(
    models: RankModels, rows: Rows, role: CountedModel, budget: int, forward: Callable[[PackedBatch], torch.Tensor]
) -> TokenValues:
    """Return what `forward` gives for each response token, for this rank's share of rows.

    Of ranks that compute micro-batches together the first one returns what all of them know.
    """
    ranks = models.ranks_of(role)
    plan = plan_micro_batches(rows, models.world_size // ranks.count, budget)[models.rank // ranks.count]
    parts = [forward(pack(rows, index, models.device, ranks)) for index in plan]
    plan = plan if ranks.answers else []
    kept = [part for part, index in zip(parts, plan, strict=False) if index]
    values_T = torch.cat(kept).float().cpu().numpy() if kept else np.empty(0, np.float32)
    order = np.asarray([row for index in plan for row in index], dtype=np.int64)
    models.use(work_on(models, rows, role, epochs=0))
    return TokenValues(order, values_T)


@carries_out(Score)
@torch.no_grad()
def score(models: RankModels, command: Score) -> Scores:
    """Score the texts in order; ranks may have different numbers of them, also none."""
    texts = command.texts
    if not texts:
        return Scores(np.empty(0, np.float32))
    tokenizer = models.tokenizer(str(models.config.reward.model))
    tokens = Ragged.of([tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts], np.int32)
    nothing = Ragged(np.empty(0, np.int32), np.zeros(len(texts) + 1, np.int64))
    rows = Rows(tokens, nothing, nothing, {})
    (plan,) = plan_micro_batches(rows, 1, command.budget)
    parts = [models.frozen["reward"](pack(rows, index, models.device)) for index in plan]
    scores_B = np.empty(len(texts), np.float32)
    # To the host once: a copy for each part would make the device wait.
    scores_B[[row for index in plan for row in index]] = torch.cat(parts).cpu().numpy()
    return Scores(scores_B)

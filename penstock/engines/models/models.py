"""The models a rank trains or asks: a causal LM that returns log-probs of chosen tokens, a critic, a reward model.

Each wraps a Hugging Face backbone and runs it on packed tokens. The language head sees only the positions that
predict response tokens (penstock/engines/kernels/lm_head.py).

Suffixes: `_N` all tokens of a micro-batch, `_T` response tokens, `_U` those that rows share once, `_TH` times hidden
size, `_TV` times vocabulary.
Left out: losses (penstock/algorithms/), optimizers (penstock/engines/training/trainer.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.algorithms.expert_balance import expert_balance
from penstock.base.errors import UserError
from penstock.data.images import ImageFolder
from penstock.engines.batches.packing import PackedBatch
from penstock.engines.families.logits import LogitRule, logit_rule
from penstock.engines.families.longest_row import LongestRow, longest_row
from penstock.engines.families.table import family_of
from penstock.engines.kernels.lm_head import Reference, selected_logprobs, selected_logprobs_and_kl
from penstock.engines.kernels.sequence_parallel import of_all_ranks
from penstock.engines.models.compile import prepare_compiler
from penstock.engines.models.replay import Replay
from penstock.engines.models.seeing import Sight, decoder_of, sight_of
from penstock.engines.weights.layout import blocks, family_in


class PackedPolicy(nn.Module):
    """A causal LM: packed tokens in, log-probs and entropies of the response tokens out."""

    def __init__(
        self,
        lm: PreTrainedModel,
        keep_logits: bool = False,
        replays: bool = False,
        images: ImageFolder | None = None,
    ) -> None:
        super().__init__()
        self.sight = sight_of(lm, images)
        self.lm, self.longest = lm, longest_row(lm.config.to_dict())
        self.replay = Replay(lm) if replays else None
        self.head = LogprobHead(language_head(lm), keep_logits, logit_rule(lm.config.to_dict()))
        family = family_of(lm.config.model_type)
        self.tells_experts = bool(family.experts) and not family.corrected

    def forward(
        self, batch: PackedBatch, temperature: float, reference: Reference | None = None, experts: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Return log-probs_T and entropies_T (float32) of the response tokens at the sampling temperature.

        With a reference, whose states are those of the distinct tokens (`PackedBatch.distinct`), the KL_T to its
        distributions comes third. With `experts` the last two are how evenly those of a mixture are used by all tokens:
        loss and load (penstock/algorithms/expert_balance.py), means over the layers. Before them comes, where the batch
        brings the rollout's experts, the share of these that the routers would not have chosen.
        """
        self._route(batch)
        output = _blocks_output(decoder_of(self.lm), batch, self.longest, experts, self.sight)
        predict_U, targets_U = batch.own
        hidden_UH = output.last_hidden_state[0].index_select(0, predict_U)
        found = self.head(hidden_UH, targets_U, temperature, reference)
        outputs: tuple[torch.Tensor, ...] = tuple(map(batch.each, _of_the_run(batch, found)))
        if not experts:
            return outputs
        mismatch = () if self.replay is None or batch.routes_NW is None else (self.replay.mismatch(),)
        return (*outputs, *mismatch, *_balance(output.router_logits, self.lm.config.num_experts_per_tok))

    def hidden(self, batch: PackedBatch) -> torch.Tensor:
        """Return the final hidden states_TH of the tokens that predict the response."""
        self._route(batch)
        return _hidden_states(decoder_of(self.lm), batch, self.longest, self.sight).index_select(0, batch.predict_T)

    def _route(self, batch: PackedBatch) -> None:
        """Let tokens take the experts that the batch brings, if it does."""
        if self.replay is not None:
            self.replay.give(batch.routes_NW)


def language_head(lm: nn.Module) -> Any:
    """Return the language head of a causal LM."""
    return lm.get_submodule(family_in(lm).language_head)


class LogprobHead(nn.Module):
    """The language head as a module of its own, so that ZeRO-3 gathers its weight and bias for both passes."""

    def __init__(self, head: nn.Linear, keep_logits: bool, rule: LogitRule) -> None:
        super().__init__()
        self.weight, self.bias, self.keep_logits, self.rule = head.weight, head.bias, keep_logits, rule
        self.sum_VH: torch.Tensor | None = None  # the optimizer's float32 sum of its gradients, if it has one

    def forward(
        self, hidden_TH: torch.Tensor, targets_T: torch.Tensor, temperature: float, reference: Reference | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return log-probs_T and entropies_T of the targets, and KL_T to a reference if there is one."""
        if reference is None:
            return selected_logprobs(
                hidden_TH, self.weight, targets_T, temperature, self.keep_logits, self.sum_VH, self.rule, self.bias
            )
        return selected_logprobs_and_kl(
            hidden_TH, self.weight, targets_T, temperature, reference, self.sum_VH, self.rule, self.bias
        )


class PackedCritic(nn.Module):
    """A value model: a backbone with a scalar head; one value per response token, of the state before it."""

    def __init__(self, lm: PreTrainedModel, images: ImageFolder | None = None) -> None:
        super().__init__()
        self.sight = sight_of(lm, images)
        self.backbone, self.longest = lm.base_model, longest_row(lm.config.to_dict())
        self.head = nn.Linear(lm.config.get_text_config().hidden_size, 1, dtype=lm.dtype)
        nn.init.zeros_(self.head.weight)  # values start at 0: the first advantages are the returns themselves
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Return values_T in float32."""
        decoder = decoder_of(self.backbone)
        hidden_UH = _hidden_states(decoder, batch, self.longest, self.sight).index_select(0, batch.own[0])
        (values_U,) = _of_the_run(batch, [self.head(hidden_UH).squeeze(-1).float()])
        return batch.each(values_U)


class PackedRewardModel(nn.Module):
    """A sequence classifier with one label: the score of a whole sequence, read at its last token."""

    def __init__(self, classifier: Any) -> None:
        super().__init__()
        self.classifier, self.longest = classifier, longest_row(classifier.config.to_dict())

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Return scores_B in float32."""
        hidden_BH = _hidden_states(self.classifier.base_model, batch, self.longest).index_select(0, batch.last_B)
        scores_B: torch.Tensor = self.classifier.score(hidden_BH)
        return scores_B.squeeze(-1).float()


def _of_the_run(batch: PackedBatch, found_U: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return what is known of the distinct response tokens, those of other ranks' shares as well."""
    share = batch.layout.share
    return found_U if share is None else of_all_ranks(share, found_U)


def _balance(logits: Sequence[torch.Tensor], chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    losses, loads = zip(*(expert_balance(logits_NE, chosen) for logits_NE in logits), strict=True)
    return torch.stack(losses).mean(), torch.stack(loads).mean()


def _hidden_states(
    backbone: nn.Module, batch: PackedBatch, longest: LongestRow | None, sight: Sight | None = None
) -> torch.Tensor:
    """Run the transformer blocks on packed tokens; [N, hidden size]; arguments and errors as of `_blocks_output`."""
    hidden_NH: torch.Tensor = _blocks_output(backbone, batch, longest, sight=sight).last_hidden_state[0]
    return hidden_NH


def _blocks_output(
    backbone: nn.Module,
    batch: PackedBatch,
    longest: LongestRow | None,
    experts: bool = False,
    sight: Sight | None = None,
) -> Any:
    """Run the transformer blocks on packed tokens; with `experts` the output has the routers' logits too.

    Args:
        sight: of a model that sees, where tokens below 0 stand for images.

    Raises:
        UserError: a row is longer than `longest`.
    """
    if longest is not None and batch.layout.max_keys > longest.tokens:
        raise UserError(
            f"a row has {batch.layout.max_keys} tokens, and beyond {longest.tokens} {longest.beyond}",
            "use shorter prompts and responses, or another model",
        )
    inputs = {"input_ids": batch.tokens_N.unsqueeze(0), "position_ids": batch.positions_N.unsqueeze(0)}
    return backbone(
        **(inputs if sight is None else sight.inputs(batch)),
        use_cache=False,
        packing=batch.layout,
        **({"output_router_logits": True} if experts else {}),
    )


def compile_blocks(model: nn.Module) -> None:
    """Compile the transformer blocks of a Hugging Face model in place, each by itself, for any number of tokens.

    Blocks of one class share their compiled code. What lies between the matrix products (norms, rotary embedding,
    gated activation, residuals) becomes a few kernels; the products themselves stay the library's.
    """
    prepare_compiler()
    for block in blocks(model).values():
        block.compile(dynamic=True)

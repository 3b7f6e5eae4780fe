"""Compare log-probs: rollout engine and actor give the same tokens the same log-probs, or the run stops.

A reshard proves that the weights are equal, not that vLLM computes with them as the actor does. So every rollout engine
samples a few tokens for a few prompts, and the actor computes their log-probs. Both are compared when the engines are
up, after the first update, and every `rollout.compare_every` iterations; the figure is recorded.

Left out: both sides' part on the ranks (penstock/engines/ranks/logprob_gap.py).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
from prefect import task
from prefect.cache_policies import NO_CACHE

from penstock.base.errors import LogprobGapError
from penstock.base.ragged import Ragged, offsets_of
from penstock.configs.schema import TrainConfig
from penstock.engines.commands.logprob_gap import LogprobsToCompare, SampleToCompare
from penstock.engines.sizing.memory import weight_width
from penstock.session.rollout.generation import images_of
from penstock.session.session import Session, Training, timed
from penstock.tasks.iteration.forward_passes import from_ranks

PROMPTS, TOKENS = 4, 8  # of each engine; of each response
COMPARING = 9  # third number of the seed: rollouts and evaluations have others
# What the dtype explains of the mean difference, by bytes of a weight. Seen: 2e-7 to 1e-6 in float32 (CPU, tiny models
# of 13 families), 0.009 to 0.023 in bfloat16 (H200 and CPU); with stale weights 0.23 to 1.1.
EXPLAINED = {4: 1e-4, 2: 0.1}
# What FP8 explains, whatever the width of the weights. Seen on an H200 (width 3,584, six layers, random weights): 0.18,
# and 0.26 where trainer or rollouts alone compute so. Which copies a reshard left behind is told by all their bits.
EXPLAINED_IN_FP8 = 0.5


def comparison_due(config: TrainConfig, iteration: int) -> bool:
    """Whether log-probs are compared after `iteration`: the first, where an update shows first, and every so many."""
    return iteration == 1 or iteration % config.rollout.compare_every == 0


@task(task_run_name="compare-logprobs-{iteration:06d}", cache_policy=NO_CACHE)
def compare_logprobs(training: Training, iteration: int, budget: int) -> dict[str, float]:
    """Return `rollout/logprob_gap`, the mean difference over tokens, `rollout/logprob_gap_max` and the seconds it took.

    Where the rollout's experts are replayed they are here, too, and `rollout/logprob_gap_own_routing` says how large
    the mean would be without.

    Args:
        budget: tokens of one of the actor's forward passes.

    Raises:
        LogprobGapError: the mean is more than `rollout.max_logprob_gap`, or no number.
    """
    session = training.session()
    metrics: dict[str, float] = {}
    session.say("comparing log-probs of vLLM and the actor")
    with timed(training, metrics, "compare_logprobs"):
        gap_T, own_T = logprob_gaps(training, iteration, budget)
    mean, largest, limit = float(gap_T.mean()), float(gap_T.max()), allowed(session)
    if not mean <= limit:
        raise LogprobGapError(
            f"vLLM and the actor, both at policy version {iteration}, give the same {len(gap_T)} tokens log-probs that "
            f"differ by {mean:.2g} on average and {largest:.2g} at most; {limit:g} is allowed",
            "rollouts would not be the policy's: report it with the model's family and the versions that 'penstock "
            "doctor' prints; or raise rollout.max_logprob_gap, if this model is known to differ by so much",
        )
    figures = {"rollout/logprob_gap": mean, "rollout/logprob_gap_max": largest}
    if own_T is not None:
        figures["rollout/logprob_gap_own_routing"] = float(own_T.mean())
    return metrics | figures


def allowed(session: Session) -> float:
    """Return the largest mean difference with which a run goes on."""
    config = session.config
    if config.rollout.max_logprob_gap is not None:
        return config.rollout.max_logprob_gap
    device = "cpu" if session.groups["rollout"].spec.devices[0].gpu is None else "cuda"
    return EXPLAINED_IN_FP8 if config.in_fp8 else EXPLAINED[weight_width(config, device)]


def logprob_gaps(training: Training, iteration: int, budget: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the difference between vLLM's and the actor's log-prob of every token that was sampled for this.

    Where experts are replayed the second is the one with the actor's own.
    """
    session, config = training.session(), training.config
    rows, tokens = _prompts(training, iteration), min(TOKENS, config.rollout.max_response_tokens)
    asked, images = Ragged.of(list(rows["prompt_tokens"]), np.int32), images_of(rows)
    seed = [config.seed, iteration, COMPARING]
    sample = SampleToCompare(next(session.generations), asked, tokens, seed, images=images)
    replies, _ = session.generate(sample, f"{iteration}/sample_to_compare")
    answers = [reply for reply in replies if reply is not None]  # of an engine of several ranks one replies
    lengths_B = np.concatenate([answer.responses.lengths_B for answer in answers])
    tokens_T = np.concatenate([answer.responses.values_T for answer in answers])
    routes = [answer.routes for answer in answers if answer.routes is not None]
    taken_P = np.concatenate([answer.positions_P for answer in answers])
    passing = LogprobsToCompare(
        prompts=asked.take(taken_P),
        responses=Ragged(tokens_T, offsets_of(lengths_B)),
        budget=budget,
        routes=Ragged.concatenated(routes) if routes else None,
        images=None if images is None else images.take(taken_P),
    )
    theirs_T = np.concatenate([answer.logprobs_T for answer in answers])

    def gap_T(passing: LogprobsToCompare, key: str) -> np.ndarray:
        ours = from_ranks(session.call("actor", passing, f"{iteration}/{key}"), lengths_B)
        return np.abs(theirs_T - ours.values_T)

    own_T = gap_T(replace(passing, routes=None), "logprobs_to_compare/own_routing") if routes else None
    return gap_T(passing, "logprobs_to_compare"), own_T


def _prompts(training: Training, iteration: int) -> pd.DataFrame:
    """Return the prompts of a comparison: others each time."""
    session = training.session()
    frame, count = session.prompts["train"].frame, PROMPTS * session.rollout_engines
    return frame.iloc[(iteration * count + np.arange(count)) % len(frame)]

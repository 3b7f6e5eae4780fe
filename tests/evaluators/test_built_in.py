"""The built-in evaluators against slow computations of their definitions."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from penstock.base.ragged import Ragged
from penstock.evaluators.diversity import Diversity
from penstock.evaluators.kl import KL
from penstock.evaluators.length import Length
from penstock.evaluators.rewards import Rewards, answer_of
from tests.evaluators.responses import heldout


def test_one_response_per_prompt_has_accuracy_and_reward_alone() -> None:
    """Accuracy counts full rewards, also larger ones; there is no figure of several responses."""
    figures = Rewards().evaluate(heldout([1.0, 0.5, 0.0, 2.0]))
    assert figures["accuracy"] == 0.5
    assert figures["reward"] == 0.875
    assert set(figures) == {f"{name}{end}" for name in ("accuracy", "reward") for end in ("", "/low", "/high")}


def test_several_responses_per_prompt() -> None:
    """By hand: two prompts of three; the majority of the first is wrong, of the second right."""
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0, 0.5]
    texts = ["#### 4", "so #### 5", "#### 5 ", "7", " 7", "8"]
    figures = Rewards().evaluate(heldout(rewards, 3, texts))
    assert figures["mean_at_3"] == pytest.approx(figures["reward"]) == pytest.approx(3.5 / 6)
    assert figures["best_at_3"] == 1.0
    assert figures["worst_at_3"] == 0.25
    assert figures["majority_at_3"] == 0.5
    assert figures["majority_at_3/low"] == 0.0
    assert figures["majority_at_3/high"] == 1.0


def test_pass_at_k_is_the_share_of_draws_with_a_right_response() -> None:
    """Against all draws of k of eight responses; a reward below the full one is not right. Control: best_at_8."""
    rewards = [1.0, 0.9, 0.0, 1.0, 0.0, 0.9, 0.0, 0.0, *[0.9] * 8, *[1.0] * 8]
    figures = Rewards().evaluate(heldout(rewards, 8))
    right = [[value >= 1 for value in rewards[start : start + 8]] for start in (0, 8, 16)]
    for k in (2, 4, 8):
        drawn = [[any(draw) for draw in itertools.combinations(row, k)] for row in right]
        assert figures[f"pass_at_{k}"] == pytest.approx(np.mean([np.mean(draws) for draws in drawn]))
    assert [name for name in figures if re.fullmatch(r"pass_at_\d+", name)] == ["pass_at_2", "pass_at_4", "pass_at_8"]
    assert figures["best_at_8"] == pytest.approx(2.9 / 3)


def test_of_equally_frequent_answers_the_first_counts_and_rewards_of_one_answer_are_averaged() -> None:
    """Ties are not broken by the reward, which would make the majority look better than it is."""
    assert Rewards().evaluate(heldout([0.0, 1.0], 2, ["a", "b"]))["majority_at_2"] == 0.0
    assert Rewards().evaluate(heldout([1.0, 0.0], 2, ["a", "b"]))["majority_at_2"] == 1.0
    assert Rewards().evaluate(heldout([1.0, 0.5, 0.0], 3, ["a", "a", "b"]))["majority_at_3"] == 0.75


def test_rewards_agree_with_a_loop_over_prompts() -> None:
    """Golden on random rewards and answers."""
    draw = random.Random(3)
    rewards = [draw.choice([0.0, 0.5, 1.0]) for _ in range(200)]
    texts = [f"thoughts {row}\n#### {draw.randrange(3)}" for row in range(200)]
    expected: dict[str, list[float]] = {"mean": [], "best": [], "worst": [], "majority": []}
    for start in range(0, 200, 4):
        earned, answers = rewards[start : start + 4], [text[-1] for text in texts[start : start + 4]]
        most = max(answers, key=lambda answer: (answers.count(answer), -answers.index(answer)))
        chosen = [value for value, answer in zip(earned, answers, strict=True) if answer == most]
        for name, value in (("mean", sum(earned) / 4), ("best", max(earned)), ("worst", min(earned))):
            expected[name].append(value)
        expected["majority"].append(sum(chosen) / len(chosen))
    figures = Rewards().evaluate(heldout(rewards, 4, texts))
    for name, values in expected.items():
        assert figures[f"{name}_at_4"] == pytest.approx(sum(values) / len(values))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It is 3.\n#### 12 \nindeed", "12"),
        ("#### 1\n#### 2", "2"),
        (r"so \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\boxed{1} no, \boxed{ 2 }", "2"),
        (r"cut off \boxed{12", "12"),
        ("  046. ", "046."),
        ("####", ""),
    ],
)
def test_the_answer_in_a_response(text: str, answer: str) -> None:
    """A marked answer, else the whole text; white space around it does not count."""
    assert answer_of(text) == answer


def slow_diversity(rows: list[list[int]]) -> dict[str, float]:
    """The definitions, one n-gram after the other."""
    figures = {}
    for n in (1, 2, 3):
        grams = [tuple(row[at : at + n]) for row in rows for at in range(len(row) - n + 1)]
        counts = Counter(grams)
        figures[f"distinct_{n}"] = len(counts) / len(grams)
        figures[f"ngram_entropy_{n}"] = -sum(k / len(grams) * math.log(k / len(grams)) for k in counts.values())
    shares = []
    for row in rows:
        seen: set[tuple[int, ...]] = set()
        repeated = 0
        for at in range(len(row) - 3):
            repeated += tuple(row[at : at + 4]) in seen
            seen.add(tuple(row[at : at + 4]))
        if len(row) >= 4:
            shares.append(repeated / (len(row) - 3))
    return figures | {"repetition": sum(shares) / len(shares)}


def test_diversity_agrees_with_a_loop_over_ngrams() -> None:
    """Golden on random responses, empty and short ones among them, and token ids as large as they get."""
    draw = random.Random(11)
    rows = [[draw.choice([0, 1, 2, 151_935]) for _ in range(draw.randrange(30))] for _ in range(60)]
    rows[7], rows[8] = [], [5, 6]
    assert Diversity().evaluate(heldout([0.0] * 60, tokens=rows)) == pytest.approx(slow_diversity(rows))


def test_diversity_tells_loops_from_prose_and_copies_from_variety() -> None:
    """Negative controls: what does not repeat has no repetition, what is all the same has no entropy."""
    loops = Diversity().evaluate(heldout([0.0] * 2, tokens=[[1, 2] * 20, [3, 4] * 20]))
    prose = Diversity().evaluate(heldout([0.0] * 2, tokens=[list(range(40)), list(range(40, 80))]))
    assert loops["repetition"] > 0.9
    assert prose["repetition"] == 0.0
    assert prose["distinct_1"] == prose["distinct_3"] == 1.0
    copies = Diversity().evaluate(heldout([0.0] * 5, tokens=[[1, 2, 3]] * 5))
    assert copies["distinct_3"] == 0.2
    assert copies["ngram_entropy_3"] == 0.0
    assert "repetition" not in copies, "no response has four tokens"
    assert Diversity().evaluate(heldout([0.0] * 2, tokens=[[], []])) == {}


def test_lengths() -> None:
    """Mean with an interval over prompts, 95th percentile, and the share that was cut."""
    tokens = [[1] * length for length in (1, 2, 3, 10)]
    figures = Length().evaluate(heldout([0.0] * 4, 2, tokens=tokens, truncated=[False, False, False, True]))
    assert figures["response_length_mean"] == 4.0
    assert (figures["response_length_mean/low"], figures["response_length_mean/high"]) == (1.5, 6.5)
    assert figures["response_length_p95"] == pytest.approx(np.quantile([1, 2, 3, 10], 0.95))
    assert figures["truncated_share"] == 0.25


def test_the_kl_is_a_mean_over_prompts_of_means_over_counted_tokens() -> None:
    """By hand: tokens of twice and half the reference's probability, an observation that does not count."""
    x, half = math.log(2), 0.5
    log_ratios = [[x, -x], [x], [0.0], [-x, 5.0]]
    rows = replace(
        heldout([0.0] * 4, 2),
        logprobs=Ragged.of(log_ratios, np.float32),
        reference_logprobs=Ragged.of([[0.0] * len(row) for row in log_ratios], np.float32),
        counted_T=np.array([1, 1, 1, 1, 1, 0], np.uint8),
    )
    figures = KL().evaluate(rows)
    twice, halved = half - 1 + x, 2 - 1 - x
    assert figures["kl"] == pytest.approx(((2 * twice + halved) / 3 + halved / 2) / 2, rel=1e-6)
    assert figures["kl_k1"] == pytest.approx((x / 3 - x / 2) / 2, rel=1e-6)
    assert {"kl/low", "kl/high", "kl_k1/low", "kl_k1/high"} <= figures.keys()
    with pytest.raises(ValueError, match="log-probs of both"):
        KL().evaluate(heldout([0.0]))

"""What the responses earned: accuracy and reward with intervals, and for several responses per prompt what the best,
the worst and the majority of them earn.

pass_at_k counts responses with the full reward; with rewards of 0 and 1 best_at_n is pass_at_n, and majority_at_n is
self-consistency (Wang et al. 2022, arXiv:2203.11171). `_at_` stands for the usual @, which MLflow does not accept in a
name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from scipy.special import comb

from penstock.evaluators.bootstrap import with_intervals
from penstock.evaluators.heldout import HeldOut

FULL_REWARD = 1.0  # of the built-in reward functions; a response that gets it is right
_MARK = "####"
_BOX = "\\boxed{"


class Rewards:
    """`accuracy`, `reward`; with n > 1 `mean_at_n`, `best_at_n`, `worst_at_n`, `majority_at_n` and `pass_at_k` for k of
    2, 4, 8, ... up to n; of a game instead `<agent>/accuracy`, `<agent>/reward`; all with intervals."""

    name = "rewards"

    def evaluate(self, heldout: HeldOut) -> dict[str, float]:
        """Return means over prompts."""
        return with_intervals(self.per_prompt(heldout))

    def per_prompt(self, heldout: HeldOut) -> dict[str, np.ndarray]:
        """Return of each prompt's n responses the mean, the highest, the lowest and the majority's reward, and what
        share of draws of k of them has a right one."""
        rewards_PN = heldout.per_prompt(np.asarray(heldout.rewards_B, np.float64))
        figures = {"accuracy": (rewards_PN >= FULL_REWARD).mean(axis=1), "reward": rewards_PN.mean(axis=1)}
        if heldout.agents:
            return figures | of_agents(rewards_PN, heldout.agents)
        if (n := heldout.samples) > 1:
            figures |= {
                f"mean_at_{n}": rewards_PN.mean(axis=1),
                f"best_at_{n}": rewards_PN.max(axis=1),
                f"worst_at_{n}": rewards_PN.min(axis=1),
                f"majority_at_{n}": majority_rewards(heldout.texts, rewards_PN),
            }
            right_P = (rewards_PN >= FULL_REWARD).sum(axis=1)
            figures |= {f"pass_at_{k}": pass_at(k, n, right_P) for k in powers_of_two(n)}
        return figures


def of_agents(rewards_PN: np.ndarray, agents: Sequence[str]) -> dict[str, np.ndarray]:
    """Return of each agent's responses to a prompt the mean reward and the share of full ones."""
    own = zip(agents, np.split(rewards_PN, len(agents), axis=1), strict=True)
    return {
        name: values_P
        for agent, own_PN in own
        for name, values_P in (
            (f"{agent}/accuracy", (own_PN >= FULL_REWARD).mean(axis=1)),
            (f"{agent}/reward", own_PN.mean(axis=1)),
        )
    }


def pass_at(k: int, n: int, right_P: np.ndarray) -> np.ndarray:
    """Return the probability that k of a prompt's n responses, drawn without replacement, have a right one.

    1 - C(n - right, k) / C(n, k), which is unbiased for what k new responses would have (Chen et al. 2021,
    arXiv:2107.03374).
    """
    return 1 - comb(n - right_P, k) / comb(n, k)


def powers_of_two(most: int) -> list[int]:
    """Return 2, 4, 8, ... up to `most`."""
    return [1 << exponent for exponent in range(1, most.bit_length())]


def majority_rewards(texts: list[str], rewards_PN: np.ndarray) -> np.ndarray:
    """Return for each prompt the mean reward of the responses that give its most frequent answer.

    Of answers that are equally frequent the one that came first counts. Responses are in no order, so this favours
    none of them.
    """
    samples = rewards_PN.shape[1]
    answers = [answer_of(text) for text in texts]
    majority_P = np.empty(len(rewards_PN))
    for prompt, rewards_N in enumerate(rewards_PN):
        given = answers[prompt * samples : (prompt + 1) * samples]
        ((chosen, _),) = Counter(given).most_common(1)
        majority_P[prompt] = rewards_N[[answer == chosen for answer in given]].mean()
    return majority_P


def answer_of(text: str) -> str:
    r"""Return the answer in a response: the line after the last `####`, or the last `\boxed{...}`, or the whole text.

    White space around it does not count. Without a mark two responses agree only if they are the same text.
    """
    _, mark, after = text.rpartition(_MARK)
    if mark:
        return after.strip().partition("\n")[0].strip()
    _, box, after = text.rpartition(_BOX)
    return _until_closed(after).strip() if box else text.strip()


def _until_closed(text: str) -> str:
    """Return the text before the brace that closes one opened before it; all of it if there is none."""
    depth = 1
    for position, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if not depth:
            return text[:position]
    return text

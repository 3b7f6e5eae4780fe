"""What a training would gain if its rollouts did not wait for their longest responses, by its own figures.

A small model of each way not to wait. All leave out what further prompts cost the engines, and what log-probs of the
rollout cost, which a correction needs. Left out: what it does to learning (docs/asynchrony.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Figures = Mapping[str, float]
WAITED, MOST = "rollout/prompt_s_max", "rollout/prompt_s_p80"
TAKEN = {"rollout/deferred", "rollout/portion_wait_s", "rollout/batch_wait_s"}  # figures of the ways that there are
WINDOW = 5


def tail_gain(figures: Figures) -> float:
    """Return how many times as fast an iteration would be with `rollout.tail.extra` 0.25, by how long its prompts took.

    Of five rounds four would end with four fifths of the prompts that they begin, and one would take as long as now.
    """
    seconds = seconds_of(figures)
    saved = 4 / 5 * (figures[WAITED] - figures[MOST])
    return seconds / (seconds - saved)


def carry_gain(figures: Figures) -> float:
    """Return how many times as fast an iteration would be with `rollout.carry`, extra 0.25 and staleness 2.

    A round ends when four fifths of the prompts under way are complete. One that takes longest is under way for three
    rounds, so none is shorter than a third of that.
    """
    seconds = seconds_of(figures)
    round_s = max(figures[MOST], figures[WAITED] / 3)
    return seconds / (seconds - figures[WAITED] + round_s)


def stream_gain(figures: Figures) -> float:
    """Return how many times as fast an iteration would be with `rollout.stream`, where the actor has GPUs of its own.

    Four fifths of the update hide behind the longest responses, as far as those take so much longer than four fifths of
    the prompts.
    """
    seconds = seconds_of(figures)
    hidden = min(4 / 5 * figures["time/update_actor_s"], figures[WAITED] - figures[MOST])
    return seconds / (seconds - hidden)


def ahead_gain(figures: Figures) -> float:
    """Return how many times as fast an iteration would be with `rollout.stream.staleness` 1, with GPUs for each.

    A rollout runs beside all the rest of the iteration before, so an iteration takes as long as the longer of the two.
    """
    seconds = seconds_of(figures)
    return seconds / max(figures[WAITED], seconds - figures[WAITED])


def seconds_of(figures: Figures) -> float:
    """Return how long an iteration took, without an evaluation."""
    return figures["time/iteration_s"] - figures.get("time/evaluate_s", 0.0)


def gains(history: Sequence[Figures], gain: Callable[[Figures], float]) -> list[float]:
    """Return what each of the last 5 iterations would have gained.

    Empty where one of the ways is taken already, where figures do not tell when prompts were answered, or where there
    are not five.
    """
    recent = history[-WINDOW:]
    if len(recent) < WINDOW or any(TAKEN & row.keys() or WAITED not in row for row in recent):
        return []
    return [gain(row) for row in recent]

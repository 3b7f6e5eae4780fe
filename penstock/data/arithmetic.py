"""Addition problems `12+34=` answered by `046.`: a task that a tiny model learns in minutes, made from a seed.

Summands and sum are padded with zeros, so every problem has the same length; the full stop closes the answer, so a
response that goes on is wrong. The examples for supervised training may come from a careless teacher: a share of them
has one wrong digit, or has forgotten every carry (`58+67=` is `015.`). Imitation learns the carelessness too; the
reward does not. Wrong digits are all different, so greedy responses avoid them; where most carries are forgotten greedy
responses forget them too. Held-out problems never occur
in training, as ordered pairs: `12+34` may be held out while `34+12` is trained on.

The teacher may also use a tool: before a share of its answers it asks the calculator of
penstock/environments/calculator.py, `[12+34]`, gets `=46 ` and answers `46.`; before the others it does the sum in its
head and answers at once.

Two teachers may play a game instead: a solver and a checker, as penstock/environments/games/checked_sums.py says.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import pandas as pd

from penstock.base.errors import UserError
from penstock.configs.sections.data import ArithmeticData
from penstock.data.order import epoch_order
from penstock.environments.calculator import calculated
from penstock.environments.games.checked_sums import NO, SOLVER, YES, CheckedSums


def make_problems(config: ArithmeticData, seed: int) -> dict[str, pd.DataFrame]:
    """Return the splits `sft`, `train` and `heldout`, each with columns `prompt`, `answer`, `response` and `carries`.

    `carries` counts the carries of the addition, which say how hard it is. No split repeats a problem. `sft` and
    `train` share problems only where the digits do not give enough of them.

    Raises:
        UserError: more problems than the digits give.
    """
    available = 100**config.digits
    trained = max(config.sft, config.train)
    if config.heldout + trained > available:
        raise UserError(
            f"data.arithmetic asks for {config.heldout} held-out and {trained} training problems; "
            f"{config.digits} digits give {available}",
            "ask for fewer, or raise data.arithmetic.digits (at most 4)",
        )
    pairs = _distinct(min(config.heldout + config.sft + config.train, available), available, seed)
    heldout, rest = pairs[: config.heldout], pairs[config.heldout :]
    # The train problems follow the sft problems, and begin again at the first where there are no more.
    train = np.take(rest, np.arange(config.sft, config.sft + config.train), mode="wrap")
    splits = {"sft": rest[: config.sft], "train": train, "heldout": heldout}
    frames = {split: _frame(chosen, config.digits) for split, chosen in splits.items()}
    if config.checked:
        frames["sft"] = _checked(frames["sft"], config.mistakes, seed)
    elif config.calls:
        frames["sft"]["response"] = _with_calls(frames["sft"], config.calls, seed)
    elif config.forgotten_carries:
        frames["sft"]["response"] = _without_carries(frames["sft"], config.forgotten_carries, seed)
    else:
        frames["sft"]["response"] = _with_mistakes(frames["sft"]["answer"], config.mistakes, seed)
    return frames


def _checked(problems: pd.DataFrame, share: float, seed: int) -> pd.DataFrame:
    """Return two rows for each problem, the solver's and the checker's, of games in which a `share` of turns is wrong.

    A wrong answer has a wrong last digit. The checker adds right, and is wrong in what it says of the answer.
    """
    answers = problems["answer"]
    tries = [_with_mistakes(answers, share, seed + number, last=True) for number in range(2)]
    careless = [_careless(len(answers), share, seed, epoch=2 + number) for number in range(2)]
    rows: list[list[str]] = []
    for row, problem in enumerate(problems.to_dict("records")):
        said = [of_try[row] for of_try in tries]
        rows += _played(CheckedSums(tries=2), problem, said, [row in wrong for wrong in careless], seed + row)
    whole = problems.loc[problems.index.repeat(2)].reset_index(drop=True)
    return whole.assign(prompt=[texts[0] for texts in rows], response=pd.Series([texts[1:] for texts in rows]))


def _played(
    game: CheckedSums, problem: dict[Hashable, Any], answers: list[str], careless: list[bool], seed: int
) -> list[list[str]]:
    """Return what the solver and what the checker saw and said in a game, in turn."""
    conversations: dict[str | None, list[str]] = {agent: [] for agent in game.agents}
    step = game.reset({str(name): value for name, value in problem.items()}, seed)
    while not step.done:
        number = len(game.verdicts)
        if step.agent == SOLVER:
            turn = answers[number]
        else:
            turn = f"{problem['answer']}{YES if game.arrived_right[number] != careless[number] else NO}"
        conversations[step.agent] += [str(step.observation), turn]
        step = game.step(turn)
    return [*conversations.values()]


def _careless(count: int, share: float, seed: int, epoch: int) -> set[int]:
    """Return a random `share` of the numbers below `count`."""
    return {*epoch_order(count, seed, epoch=epoch, shuffle=True)[: round(share * count)].tolist()}


def _without_carries(problems: pd.DataFrame, share: float, seed: int) -> list[str]:
    """Return the teacher's responses: in a random `share` of them each place holds the sum of its own digits alone."""
    responses = [f"{answer}." for answer in problems["answer"]]
    for row in epoch_order(len(responses), seed, epoch=1, shuffle=True)[: round(share * len(responses))]:
        left, right = problems["prompt"].iloc[row].removesuffix("=").split("+")
        places = (str((int(one) + int(other)) % 10) for one, other in zip(left, right, strict=True))
        responses[row] = f"0{''.join(places)}."
    return responses


def _with_calls(problems: pd.DataFrame, share: float, seed: int) -> list[list[str]]:
    """Return the teacher's turns: call, observation and answer in a random `share` of them, else the answer alone."""
    answers = [f"{int(answer)}." for answer in problems["answer"]]
    responses = [[answer] for answer in answers]
    for row in epoch_order(len(answers), seed, epoch=1, shuffle=True)[: round(share * len(answers))]:
        expression = problems["prompt"].iloc[row].removesuffix("=")
        responses[row] = [f"[{expression}]", calculated(expression), answers[row]]
    return responses


def _with_mistakes(answers: pd.Series[str], share: float, seed: int, last: bool = False) -> list[str]:
    """Return the teacher's responses: in a random `share` one digit, or the last, is off by 1 to 9, modulo 10."""
    order = epoch_order(len(answers), seed, epoch=1, shuffle=True)
    draws = np.random.PCG64(np.random.SeedSequence([seed, 2])).random_raw(2 * len(answers)).reshape(-1, 2)
    responses = [f"{answer}." for answer in answers]
    for row in order[: round(share * len(answers))]:
        answer = answers.iloc[row]
        place = len(answer) - 1 if last else int(draws[row, 0] % len(answer))
        digit = (int(answer[place]) + 1 + int(draws[row, 1] % 9)) % 10
        responses[row] = f"{answer[:place]}{digit}{answer[place + 1 :]}."
    return responses


def _distinct(count: int, available: int, seed: int) -> np.ndarray:
    """Return `count` distinct numbers below `available` in random order, the same under every NumPy version."""
    if available <= 10**6:
        return epoch_order(available, seed, epoch=0, shuffle=True)[:count]
    # Too many to shuffle: draw until there are enough, each in the place of its first draw.
    stream = np.random.PCG64(np.random.SeedSequence([seed, available]))
    draws = np.empty(0, dtype=np.uint64)
    while True:
        draws = np.concatenate([draws, stream.random_raw(2 * count) % np.uint64(available)])
        numbers, first = np.unique(draws, return_index=True)
        if len(numbers) >= count:
            return numbers[np.argsort(first)][:count].astype(np.int64)


def _frame(pairs: np.ndarray, digits: int) -> pd.DataFrame:
    left, right = np.divmod(pairs, 10**digits)
    places = [10**place for place in range(1, digits + 1)]
    answers = [f"{total:0{digits + 1}d}" for total in left + right]
    return pd.DataFrame(
        {
            "prompt": [f"{a:0{digits}d}+{b:0{digits}d}=" for a, b in zip(left, right, strict=True)],
            "answer": answers,
            "response": [f"{answer}." for answer in answers],
            # A carry leaves a place where the sum of the digits up to it has one digit more.
            "carries": sum((left % place + right % place >= place).astype(np.int64) for place in places),
        }
    )

"""What a sweep varies, as a person writes it, and the combinations that come of it.

    actor.optimizer.learning_rate=1e-6,3e-6     each of these values
    actor.optimizer.learning_rate=1e-6..1e-5    drawn between these two
    iterations=20                               the same for all

Values are those of a YAML list, so braces, brackets and quotes hold commas together. A range whose ends are positive
and at least tenfold apart is drawn log-uniformly, any other uniformly; between whole numbers whole ones are drawn.

Left out: whether a combination can work (penstock/session/sweeps/plan.py).
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import yaml

from penstock.base.errors import UserError
from penstock.configs.loading.load import parse_override
from penstock.configs.schema import TrainConfig
from penstock.configs.tree.recipes import parse

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
RANGE = re.compile(rf"({NUMBER})\.\.({NUMBER})")
LOGARITHMIC_FROM = 10.0  # times the lower end
DIGITS = 3  # of a number that is drawn: more would say more than a draw knows
ATTEMPTS = 100  # at another draw, for each that is wanted
SEED = "seed"
OF_EACH_RUN = ("name", "folder")


@dataclass(frozen=True)
class Axis:
    """A key with its values as text, or with the ends of a range."""

    key: str
    values: tuple[str, ...] = ()
    ends: tuple[str, str] | None = None

    @property
    def varies(self) -> bool:
        """Whether trainings differ in it."""
        return self.ends is not None or len(self.values) > 1


Overrides = tuple[str, ...]


def parse_axes(settings: Sequence[str]) -> list[Axis]:
    """Return what `key=value,value` and `key=low..high` say.

    Raises:
        UserError: one is neither of them, a key is unknown or given twice, or nothing varies.
    """
    axes = [_axis(text) for text in settings]
    keys = [axis.key for axis in axes]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise UserError(f"'{twice[0]}' is given twice", "give all of its values at once: key=value,value")
    if not any(axis.varies for axis in axes):
        raise UserError("a sweep of nothing", "give several values, e.g. actor.optimizer.learning_rate=1e-6,3e-6")
    return axes


def grid(axes: Sequence[Axis]) -> list[Overrides]:
    """Return every combination, the last key's values changing first.

    Raises:
        UserError: a range has no combinations.
    """
    if ranges := [axis.key for axis in axes if axis.ends is not None]:
        raise UserError(f"'{ranges[0]}' is a range, of which values are drawn", "say how many: --random N")
    return list(product(*(_overrides(axis) for axis in axes)))


def drawn(axes: Sequence[Axis], count: int, seed: int) -> list[Overrides]:
    """Return `count` combinations that chance takes, none of them twice; each with every seed of the axis `seed`.

    So what is drawn can be told from what chance does with it.

    Args:
        seed: of the draw; the same one draws the same.

    Raises:
        UserError: there are not so many.
    """
    seeds = [axis for axis in axes if axis.key == SEED and axis.ends is None]
    others = [axis for axis in axes if axis not in seeds]
    chance = random.Random(seed)
    if all(axis.ends is None for axis in others):
        every = grid(others)
        if count > len(every):
            raise UserError(f"--random {count} of {len(every)} combinations", "leave it out to train all of them")
        chosen = chance.sample(every, count)
    else:
        chosen = list(_different(others, count, chance))
    return [(*combination, *with_seed) for combination in chosen for with_seed in grid(seeds)]


def _different(axes: Sequence[Axis], count: int, chance: random.Random) -> dict[Overrides, None]:
    found: dict[Overrides, None] = {}
    for _ in range(ATTEMPTS * count):
        found[tuple(f"{axis.key}={_draw(axis, chance)}" for axis in axes)] = None
        if len(found) == count:
            return found
    raise UserError(f"--random {count}: the ranges hold only {len(found)} or so", "ask for fewer, or widen a range")


def _draw(axis: Axis, chance: random.Random) -> str:
    if axis.ends is None:
        return chance.choice(axis.values)
    low, high = map(float, axis.ends)
    if low > 0 and high >= LOGARITHMIC_FROM * low:
        value = math.exp(chance.uniform(math.log(low), math.log(high)))
    else:
        value = chance.uniform(low, high)
    if all(re.fullmatch(r"[-+]?\d+", end) for end in axis.ends):
        return str(round(value))
    return f"{min(max(float(f'{value:.{DIGITS}g}'), low), high):g}"


def _overrides(axis: Axis) -> list[str]:
    return [f"{axis.key}={value}" for value in axis.values]


def _axis(text: str) -> Axis:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not value:
        raise UserError(f"'{text}' is not key=value,value", "for example actor.optimizer.learning_rate=1e-6,3e-6")
    if found := RANGE.fullmatch(value):
        axis = Axis(key, ends=(found[1], found[2]))
        if float(found[1]) >= float(found[2]):
            raise UserError(f"'{text}': the range ends where it begins, or before", "give the lower end first")
    else:
        axis = Axis(key, values=_split(value, text))
    for sample in axis.values or axis.ends or ():
        parse_override(f"{key}={sample}", TrainConfig)
    if axis.varies and key in OF_EACH_RUN:
        raise UserError(f"'{key}' names a run, and a sweep names its runs itself", "give it one value, or none")
    return axis


def _split(value: str, text: str) -> tuple[str, ...]:
    """Return the values of a list as they are written."""
    whole = f"[{value}]"
    parse(whole, f"'{text}'")  # which says what is wrong
    node = yaml.compose(whole, Loader=yaml.SafeLoader)
    items = node.value if isinstance(node, yaml.SequenceNode) else []
    values = tuple(whole[item.start_mark.index : item.end_mark.index].strip() for item in items)
    if not values or "" in values:
        raise UserError(f"'{text}' has a value of nothing", "remove a comma")
    if twice := [item for item in values if values.count(item) > 1]:
        raise UserError(f"'{text}' has {twice[0]} twice", "remove one")
    return values

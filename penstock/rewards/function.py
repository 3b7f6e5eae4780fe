"""Finding a user's reward function and deciding, before anything starts, what each call will receive.

A reward function is any Python function named `module:function`; the working directory is importable. It receives
what its parameter names ask for:

- `response`, `prompt` (text), `prompt_id`, `row` (all columns of the data row, a dict), or a column by its name;
- settings from the recipe (`reward.settings`); one that has the name of a column or of an argument is refused.

With a parameter `responses` it is a batch function: `responses`, `prompts`, `prompt_ids` and columns (under their
own name) are lists and `rows` is a list of dicts; it returns one value per row. A call gets the share of a batch that
one worker scores, so rows of a prompt may come in different calls. A function may be `async`. The value of a row is a
number, or a dict of named parts: the reward is the part "reward" if there is one, otherwise the sum of the parts.

Left out: running it (penstock/rewards/worker.py), so nothing here calls the user's code except its import.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.usercode.arguments import wanted
from penstock.usercode.imports import import_named
from penstock.usercode.sandbox import check_boxed

if TYPE_CHECKING:
    from penstock.configs.sections.reward import RewardConfig
    from penstock.rewards.types import Sample

# Parameter name -> field of Sample.
ROW_ARGUMENTS = {"response": "response", "prompt": "prompt", "prompt_id": "prompt_id", "row": "columns"}
BATCH_ARGUMENTS = {f"{name}s": field for name, field in ROW_ARGUMENTS.items()}


@dataclass(frozen=True)
class RewardFunction:
    """A loaded reward function.

    Attributes:
        spec: its name, `module:function`.
        callable: the function with the recipe's settings already bound.
        is_async: whether a call returns a coroutine.
        is_batch: whether one call scores many rows.
        wants: the parameters that are filled from each sample.
    """

    spec: str
    callable: functools.partial[Any]
    is_async: bool
    is_batch: bool
    wants: tuple[str, ...]

    def arguments(self, sample: Sample) -> dict[str, Any]:
        """What the function receives for one row; a column that this row lacks is None, as null in JSON would be."""
        fields = BATCH_ARGUMENTS if self.is_batch else ROW_ARGUMENTS
        return {
            name: getattr(sample, fields[name]) if name in fields else sample.columns.get(name) for name in self.wants
        }


def check_function(config: RewardConfig, columns: Sequence[str]) -> None:
    """Check that `reward.function` loads, finds what its parameters ask for, and has a sandbox if it needs one.

    Raises:
        UserError: it does not, as `load_reward_function` says, or has none.
    """
    loaded = load_reward_function(str(config.function), config.settings, columns)
    check_boxed(f"reward.function '{config.function}'", loaded.callable.func, "reward.sandbox", config.sandbox)


def load_reward_function(
    spec: str, settings: dict[str, Any], columns: Sequence[str], setting: str = "reward.function"
) -> RewardFunction:
    """Import `module:function` and match its parameters with the columns of the data and the recipe's settings.

    Args:
        setting: key of the configuration that names it, for messages.

    Raises:
        UserError: the name is malformed, the module does not import, the function is not there, a parameter has no
            source or two, or a setting has no parameter.
    """
    function = import_named(setting, spec, "function", "my_rewards:score")

    parameters = inspect.signature(function).parameters
    is_batch = "responses" in parameters
    available = (*(BATCH_ARGUMENTS if is_batch else ROW_ARGUMENTS), *columns)
    sources = "an argument, a column of the data"
    return RewardFunction(
        spec=spec,
        callable=functools.partial(function, **settings),
        is_async=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__),
        is_batch=is_batch,
        wants=wanted(setting, spec, parameters, settings, available, sources),
    )

"""Checks of the sampler and the group filter that only the data or the user's code can tell, before anything starts."""

from __future__ import annotations

from pathlib import Path

from configs.schema import TrainConfig
from data.arithmetic import make_problems
from data.rows import read_rows
from data.samplers import load_sampler, require_numbers
from tasks.group_filter import load_filter


def check_sampling(config: TrainConfig) -> None:
    """Check that the sampler and the filter load, and that the sampler's column orders the prompts.

    Raises:
        UserError: the first mistake found.
    """
    data, dynamic = config.data, config.algorithm.dynamic_sampling
    load_sampler(data.sampler)
    if dynamic is not None:
        load_filter(dynamic)
    if (column := data.sampler.column) is None:
        return
    if data.arithmetic is not None:
        require_numbers(make_problems(data.arithmetic, config.seed)["train"], column, "data.arithmetic")
    else:
        require_numbers(read_rows(Path(str(data.train))), column, str(data.train))

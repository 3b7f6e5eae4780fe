"""The best of what a run has said, as data for the next training: rejection sampling, and pairs to prefer.

The responses are those of its experience, of all iterations that the folder still has. Of each prompt the highest
rewards are taken (Yuan et al. 2023, arXiv 2308.01825; Dong et al. 2023, RAFT, arXiv 2304.06767), each text once; none
whose reward failed, and none that was cut off, which would teach to have no end. Of equal rewards the earlier counts.

Left out: episodes, whose turns are no single response; the training (`penstock sft`, `penstock preference`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from penstock.base.errors import UserError
from penstock.base.files import replacing
from penstock.configs.sections.data import DataConfig
from penstock.data.prompts import PromptTable
from penstock.state.experience import IMAGES, column_names, read_columns
from penstock.state.run_folder import RunFolder

COLUMNS = ("sample_id", "prompt_id", "response", "reward", "reward_failure", "truncated")
TURNS = "turns"  # a column of episodes
ANY_MARGIN = 1e-9


@dataclass(frozen=True)
class Selection:
    """What was taken of a run.

    Attributes:
        rows: for a data file: the columns of the run's prompts, and the responses.
        prompts: that have any response.
        responses: that there are.
        rewards: the lowest and the highest of those that were taken.
    """

    rows: pd.DataFrame
    prompts: int
    responses: int
    rewards: tuple[float, float]


def sampled_responses(run: RunFolder) -> pd.DataFrame:
    """Return the scored responses of a run, a row each, in the order in which they were sampled.

    Raises:
        UserError: there are none, or they are episodes.
    """
    scored = [(path, names) for path in run.experiences() if {*COLUMNS} <= {*(names := column_names(path))}]
    if not scored:
        raise UserError(f"{run.path} has no scored responses", "name a run of 'train' whose experience is there")
    if any(IMAGES in names for _, names in scored):
        raise UserError(
            f"the rows of {run.path} have images, which a file elsewhere would not find by their paths",
            "select from a run whose rows are text alone",
        )
    if any(TURNS in names for _, names in scored):
        raise UserError(
            f"{run.path} has episodes of several turns, of which none is one response", "see penstock episodes"
        )
    return pd.concat([pd.DataFrame(read_columns(path, COLUMNS)) for path, _ in scored], ignore_index=True)


def best_responses(run: RunFolder, best: int, least: float | None, column: str) -> Selection:
    """Return up to `best` responses to each prompt.

    Args:
        least: lowest reward that is taken; None: any.
        column: gets the response.

    Raises:
        UserError: as `sampled_responses`, or no reward is that high.
    """
    every = sampled_responses(run)
    usable = _usable(every)
    taken = usable if least is None else usable[usable["reward"] >= least]
    if taken.empty:
        highest = f"the highest reward is {usable['reward'].max():g}" if len(usable) else "all were cut off, or failed"
        raise UserError(f"of {len(every)} responses none is taken: {highest}", "lower what is least, or sample more")
    taken = taken.groupby("prompt_id", sort=False).head(best)
    return _selection(run, every, taken.rename(columns={"response": column}), ["sample_id", column, "reward"])


def best_and_worst(run: RunFolder, margin: float) -> Selection:
    """Return for each prompt its best response (`chosen`) and its worst (`rejected`).

    Args:
        margin: by which their rewards have to differ, above 0; ANY_MARGIN: at all.

    Raises:
        UserError: as `sampled_responses`, or no two rewards differ so much.
    """
    every = sampled_responses(run)
    prompts = _usable(every).groupby("prompt_id", sort=False)
    pairs = prompts.head(1).merge(prompts.tail(1), on="prompt_id", suffixes=("", "_rejected"))
    pairs = pairs[pairs["reward"] - pairs["reward_rejected"] >= margin]
    if pairs.empty:
        least = "" if margin == ANY_MARGIN else f" by {margin:g}"
        raise UserError(f"no two rewards of a prompt differ{least}", "lower the margin, or sample more")
    names = {"response": "chosen", "response_rejected": "rejected"}
    columns = ["sample_id", "chosen", "reward", "rejected", "reward_rejected"]
    return _selection(run, every, pairs.rename(columns=names), columns)


def selected(
    run: RunFolder, best: int | None, least: float | None, pairs: bool, margin: float | None, column: str
) -> Selection:
    """Return the best responses to each prompt, or the best and the worst.

    Args:
        best: how many to each prompt; None: 1.
        least: lowest reward that is taken; None: any.
        pairs: whether the best and the worst are wanted.
        margin: by which their rewards differ at least; None: they differ.
        column: gets a response, without `pairs`.

    Raises:
        UserError: arguments exclude each other, or the run has nothing to take.
    """
    check_asked(best, least, pairs, margin)
    if pairs:
        return best_and_worst(run, margin or ANY_MARGIN)
    return best_responses(run, best or 1, least, column)


def check_asked(best: int | None, least: float | None, pairs: bool, margin: float | None) -> None:
    """Refuse arguments of `selected` that have no effect beside the others.

    Raises:
        UserError: names them.
    """
    if pairs and (best is not None or least is not None):
        raise UserError("'best' and 'least' have no effect with 'pairs'", "remove them; 'margin' says what a pair is")
    if not pairs and margin is not None:
        raise UserError("'margin' has no effect without 'pairs'", "remove it; 'least' is the lowest reward that counts")


def _usable(every: pd.DataFrame) -> pd.DataFrame:
    """Return the responses that may be taken, those of the highest rewards first, each text of a prompt once."""
    whole = every[~every["truncated"].astype(bool) & every["reward_failure"].isna()]
    return whole.sort_values("reward", ascending=False, kind="stable").drop_duplicates(["prompt_id", "response"])


def _selection(run: RunFolder, every: pd.DataFrame, taken: pd.DataFrame, columns: list[str]) -> Selection:
    """Join columns of what was taken with those of its prompts, in the order of the data; a prompt's namesake goes."""
    table, rewards = PromptTable.load(run.prompts("train")), taken["reward"]
    prompts = table.frame[[name for name in table.columns if name not in columns]]
    rows = prompts.merge(taken[["prompt_id", *columns]], on="prompt_id", how="inner").drop(columns="prompt_id")
    return Selection(rows, every["prompt_id"].nunique(), len(every), (float(rewards.min()), float(rewards.max())))


def response_column(data: DataConfig) -> str:
    """Return the column that gets a response: that which supervised training with these data would read."""
    return data.response or "response"


def write_selection(rows: pd.DataFrame, path: Path) -> None:
    """Write rows as JSONL, or as Parquet where the name ends so; whole or not at all.

    Raises:
        UserError: something is there.
    """
    if path.exists():
        raise UserError(f"{path} is there already", "name another file, or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside:
        if path.suffix == ".parquet":
            rows.to_parquet(aside, index=False)
        else:
            rows.to_json(aside, orient="records", lines=True, force_ascii=False, double_precision=15)

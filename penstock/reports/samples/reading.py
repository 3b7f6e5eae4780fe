"""Responses of one iteration of a run, read from its folder: only the columns and rows that are asked for.

An experience file may be a gigabyte, most of it figures of tokens; a person looks at ten responses. Where it has been
deleted, the table of samples that the training kept of it (`record.samples_every`) stands in, with what it has.

Left out: what is shown of them (terminal.py, page.py).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.data.images import names_in_run
from penstock.reports.samples.thumbnails import NAME
from penstock.state.experience import (
    AGENT,
    IMAGES,
    PATH_ENDS,
    PATH_PROMPT_ENDS,
    PATH_PROMPTS,
    PATHS,
    column_names,
    read_columns,
    read_rows,
)
from penstock.state.run_folder import RunFolder
from penstock.trackers.tracker import Table

NEEDED = {"sample_id", "prompt_id", "prompt", "response", "reward"}  # what a file has whose responses are scored
PART = "reward/"
LENGTH, ADVANTAGE = "length", "advantage"  # figures of a response that are made of its tokens
TURNS, FAILURE = "turns", "reward_failure"
NUMBERED = re.compile(r"(\d{6})\.(parquet|json)")
_PROMPT, _SAMPLE = re.compile(r"-(\d{6,})$"), re.compile(r"\d+/([^/]+)/\d+")


@dataclass(frozen=True)
class Response:
    """One response with all that a person asks about it; None: the file does not say.

    Attributes:
        row: in the file.
        prompt_id: the split and the row of the data file, e.g. train-000017.
        advantage: mean over the tokens that count.
        tokens: ids of the response, the end-of-sequence token included.
        advantages: of each token.
        mask: 1 for the policy's own tokens, 0 for what an environment said.
        turns: of the policy; None: without an environment.
        path_ends: how many of the tokens there are at the end of each of its paths; None: it is one.
        path_prompts: the tokens that each path but the first begins after.
        images: where those of the prompt lie in the run folder.
    """

    row: int
    sample_id: str
    prompt_id: str
    prompt: str
    response: str
    reward: float
    parts: dict[str, float]
    failure: str | None
    answer: str | None
    truncated: bool
    refused: bool
    accepted: bool | None
    agent: int | None
    policy_version: int | None
    turns: int | None
    tokens: np.ndarray | None
    advantages: np.ndarray | None
    mask: np.ndarray | None
    path_ends: np.ndarray | None = None
    path_prompts: tuple[np.ndarray, ...] = ()
    images: tuple[str, ...] = ()

    @property
    def paths(self) -> list[Response]:
        """Its paths, each with its own tokens alone."""
        if self.path_ends is None or not self.path_prompts:
            return [self]
        return [self._part(begin, end) for begin, end in pairwise([0, *self.path_ends.tolist()])]

    def _part(self, begin: int, end: int) -> Response:
        columns = (self.tokens, self.advantages, self.mask)
        tokens, advantages, mask = (None if values is None else values[begin:end] for values in columns)
        return replace(self, tokens=tokens, advantages=advantages, mask=mask, path_ends=None, path_prompts=())

    @property
    def length(self) -> int | None:
        return None if self.tokens is None else len(self.tokens)

    @property
    def masked(self) -> int:
        """Tokens from which nothing is learnt."""
        return 0 if self.mask is None else int((self.mask == 0).sum())

    @property
    def counted_advantages(self) -> np.ndarray | None:
        """Of the tokens that count."""
        if self.advantages is None or self.mask is None:
            return self.advantages
        return self.advantages[self.mask > 0]

    @property
    def advantage(self) -> float | None:
        counted = self.counted_advantages
        if counted is None:
            return None
        return float(counted.mean()) if counted.size else 0.0

    @property
    def remarks(self) -> list[str]:
        """What is out of the ordinary, in words."""
        found = [
            "cut" if self.truncated else "",
            "refused: nothing is learnt from its prompt" if self.refused else "",
            f"{1 + len(self.path_prompts)} paths" if self.path_prompts else "",
            f"{self.masked:,} tokens masked" if self.masked else "",
            "not accepted" if self.accepted is False else "",
            f"agent {self.agent}" if self.agent is not None else "",
            f"the judge's answer: {self.answer}" if self.answer else "",
            f"no reward: {self.failure}" if self.failure else "",
        ]
        return [text for text in found if text]


@dataclass(frozen=True)
class Samples:
    """The responses of one iteration, wherever they lie; nothing is read before it is asked for.

    Attributes:
        heldout: whether they answer held-out prompts.
        path: a Parquet file of the run, or a table of samples as JSON.
    """

    iteration: int
    heldout: bool
    path: Path

    @property
    def is_table(self) -> bool:
        """Whether it is the few rows that were kept of an experience that is gone."""
        return self.path.suffix == ".json"

    @functools.cached_property
    def names(self) -> list[str]:
        """The columns of the file."""
        if self.is_table:
            return list(self._table[0]) if self._table else []
        return column_names(self.path)

    @functools.cached_property
    def _table(self) -> list[dict[str, Any]]:
        rows = Table(self.path.name, self.path).rows()
        return [row | {"prompt_id": _prompt_of(str(row["sample_id"]))} for row in rows]

    @property
    def whole(self) -> bool:
        """Whether responses are there and have their rewards."""
        return set(self.names) >= NEEDED

    @property
    def parts(self) -> list[str]:
        """The parts of the reward, by name; the total that a function gives beside them is none."""
        return [name.removeprefix(PART) for name in self.names if name.startswith(PART) and name != f"{PART}reward"]

    @property
    def sortable(self) -> list[str]:
        """What responses can be sorted by."""
        made = {LENGTH: "response_tokens", ADVANTAGE: "advantages"}
        plain = [name for name in ("reward", "truncated", "policy_version", TURNS) if name in self.names]
        return [*plain, *(name for name, of in made.items() if of in self.names), *(PART + name for name in self.parts)]

    def __len__(self) -> int:
        return len(self.values("reward"))

    def values(self, name: str) -> np.ndarray:
        """Return a figure of every response, by a name of `sortable`.

        Raises:
            UserError: there is none of that name.
        """
        if name not in self.sortable:
            raise UserError(
                f"responses of iteration {self.iteration} have no figure '{name}'",
                f"one of: {', '.join(self.sortable)}",
            )
        if name == LENGTH:
            return self._column("response_tokens").lengths_B.astype(np.float64)
        if name == ADVANTAGE:
            return _means(self._column("advantages"), self._column("loss_mask"))
        return np.asarray(self._column(name), np.float64)

    def failures(self) -> list[str | None]:
        """Return why each response has no reward; None: it has one."""
        return list(self._column(FAILURE)) if FAILURE in self.names else [None] * len(self)

    def prompt_ids(self) -> list[str]:
        """Return the prompt of every response."""
        return list(self._column("prompt_id"))

    def at(self, rows: Sequence[int], tokens: bool = False) -> list[Response]:
        """Return the responses of some rows, with their tokens if those are asked for."""
        wanted = [name for name in _PLAIN if name in self.names] + [PART + name for name in self.parts]
        wanted += [name for name in _OF_TOKENS if tokens and name in self.names]
        read = self._rows(wanted, rows)
        return [self._response(row, {name: _entry(read[name], i) for name in wanted}) for i, row in enumerate(rows)]

    def _column(self, name: str) -> Any:
        if self.is_table:
            return [row[name] for row in self._table]
        return read_columns(self.path, [name])[name]

    def _rows(self, names: Sequence[str], rows: Sequence[int]) -> dict[str, Any]:
        if self.is_table:
            return {name: [self._table[row][name] for row in rows] for name in names}
        return read_rows(self.path, names, np.asarray(rows, np.int64))

    def _response(self, row: int, values: dict[str, Any]) -> Response:
        parts = {name: float(values[PART + name]) for name in self.parts}
        accepted = values.get("accepted")
        return Response(
            row=row,
            sample_id=values["sample_id"],
            prompt_id=values["prompt_id"],
            prompt=values["prompt"],
            response=values["response"],
            reward=float(values["reward"]),
            parts={name: value for name, value in parts.items() if not np.isnan(value)},
            failure=values.get(FAILURE),
            answer=values.get("reward_answer"),
            truncated=bool(values.get("truncated", False)),
            refused=bool(values.get("refused", False)),
            accepted=None if accepted is None else bool(accepted),
            agent=values.get(AGENT),
            policy_version=values.get("policy_version"),
            turns=values.get(TURNS),
            tokens=values.get("response_tokens"),
            advantages=values.get("advantages"),
            mask=values.get("loss_mask"),
            path_ends=values.get(PATH_ENDS),
            path_prompts=_prompts_of_paths(values),
            images=_images(values.get(IMAGES)),
        )


def _images(value: Any) -> tuple[str, ...]:
    """Return names of images: of an experience's numbers, or of the text in a table of samples."""
    if value is None:
        return ()
    return tuple(NAME.findall(value) if isinstance(value, str) else names_in_run(value))


def _prompts_of_paths(values: dict[str, Any]) -> tuple[np.ndarray, ...]:
    if PATH_PROMPTS not in values or not len(values[PATH_PROMPT_ENDS]):
        return ()
    return tuple(np.split(values[PATH_PROMPTS], values[PATH_PROMPT_ENDS][:-1]))


_PLAIN = (
    *("sample_id", "prompt_id", "prompt", "response", "reward", FAILURE, "reward_answer"),
    *("truncated", "refused", "accepted", AGENT, "policy_version", TURNS, IMAGES),
)
_OF_TOKENS = ("response_tokens", "advantages", "loss_mask", *PATHS)


def samples_of(run: RunFolder, iteration: int | None, heldout: bool = False) -> Samples:
    """Return the responses of an iteration: of its experience, or of the held-out evaluation after it.

    Args:
        iteration: None: the newest that has been scored.

    Raises:
        UserError: there are none; the message names what is there.
    """
    there = _numbers(_folder(run, heldout), "parquet")
    kept = [] if heldout else _numbers(run.samples(0).parent, "json")
    if iteration is None:
        newest = (found for number in sorted({*there, *kept}, reverse=True) if (found := _found(run, number, heldout)))
        if (samples := next(newest, None)) is not None:
            return samples
    elif (samples := _found(run, iteration, heldout)) is not None:
        return samples
    raise UserError(_missing(run, iteration, heldout, iteration in there), _present(there, kept, heldout))


def _found(run: RunFolder, iteration: int, heldout: bool) -> Samples | None:
    places = [run.evaluation(iteration)] if heldout else [run.experience(iteration), run.samples(iteration)]
    found = (Samples(iteration, heldout, path) for path in places if path.exists())
    return next((samples for samples in found if samples.whole), None)


def iterations_of(run: RunFolder, heldout: bool = False) -> list[int]:
    """Return the iterations whose responses are in the run folder with all that was computed for them."""
    numbers = _numbers(_folder(run, heldout), "parquet")
    return [number for number in numbers if (found := _found(run, number, heldout)) and not found.is_table]


def rows_of(samples: Samples, sort: str | None, reverse: bool, limit: int) -> list[int]:
    """Return rows to show: the highest first, with `reverse` the lowest; without `sort` spread evenly over the file."""
    if sort is None:
        total = len(samples)
        return [number * total // limit for number in range(limit)] if limit < total else list(range(total))
    values_B = samples.values(sort)
    known = np.flatnonzero(~np.isnan(values_B))  # a response may lack a part of the reward
    order = np.argsort(values_B[known] if reverse else -values_B[known], kind="stable")
    return [int(row) for row in known[order[:limit]]]


def rows_of_prompt(samples: Samples, number: int) -> list[int]:
    """Return the rows that answer the prompt from that row of the data file, 0 for the first.

    Raises:
        UserError: none does; the message names prompts that were answered.
    """
    names = samples.prompt_ids()
    if rows := [row for row, name in enumerate(names) if name.endswith(f"-{number:06d}")]:
        return rows
    there = sorted({int(found[1]) for name in names if (found := _PROMPT.search(name))})
    shown = ", ".join(map(str, there[:12])) + (", ..." if len(there) > 12 else "")
    raise UserError(
        f"iteration {samples.iteration} has no response to prompt {number}", f"there are {len(there)} prompts: {shown}"
    )


def _prompt_of(sample_id: str) -> str:
    """Return which prompt a sample of a table answers, e.g. train-000017 of 000012/train-000017/3."""
    found = _SAMPLE.fullmatch(sample_id)
    return found[1] if found else sample_id


def _folder(run: RunFolder, heldout: bool) -> Path:
    return (run.evaluation(0) if heldout else run.experience(0)).parent


def _numbers(folder: Path, suffix: str) -> list[int]:
    names = (NUMBERED.fullmatch(path.name) for path in folder.glob(f"*.{suffix}"))
    return sorted(int(name[1]) for name in names if name)


def _missing(run: RunFolder, iteration: int | None, heldout: bool, begun: bool) -> str:
    what = "held-out responses" if heldout else "responses"
    if iteration is None:
        return f"{run.path} holds no {what} with rewards"
    if begun:
        return f"the {what} of iteration {iteration} have no rewards yet"
    return f"{run.path} holds no {what} of iteration {iteration}"


def _present(there: list[int], kept: list[int], heldout: bool) -> str:
    if not there and not kept:
        return "a run of 'penstock train' has them, from its first iteration on"
    if heldout:
        return f"there are evaluations after {in_words(there)}"
    found = [f"the experience of {in_words(there)}"] if there else []
    found += [f"tables of samples of {in_words(kept)}"] if kept else []
    return f"there is {' and '.join(found)}"


def in_words(numbers: Sequence[int]) -> str:
    """Return iterations as people say them: iterations 1 to 6, 8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"iteration{'s' if len(numbers) > 1 else ''} {', '.join(texts)}"


def _means(advantages: Ragged, mask: Ragged) -> np.ndarray:
    """Mean advantage of every row over the tokens that count, 0 where none does."""
    rows_T = np.repeat(np.arange(len(mask)), mask.lengths_B)
    counted_T = mask.values_T > 0
    sums_B = np.bincount(rows_T, advantages.values_T * counted_T, minlength=len(mask))
    return sums_B / np.maximum(np.bincount(rows_T, counted_T, minlength=len(mask)), 1)


def _entry(column: Any, row: int) -> Any:
    if isinstance(column, Ragged):
        return column.row(row)
    value = column[row]
    return value.item() if isinstance(value, np.generic) else value

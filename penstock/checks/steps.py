"""What an offline training would take its steps on, for a dry run: model, rows with their tokens, steps, disk.

Rows are tokenized as the training tokenizes them, so that what is dropped and what is refused is what will be. Left
out: all rows of a large file, and what is checked before (penstock/checks/preferences.py, penstock/checks/training.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from penstock.base.errors import UserError
from penstock.checks.memory import checkpoint_bytes, model_bytes
from penstock.checks.model.shape import shape_of
from penstock.configs.preference import PairConfig, PreferenceConfig
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.trainer import SftConfig
from penstock.data.preference import tokenize_rows
from penstock.data.sft import tokenize_pairs
from penstock.data.source import rows_of, split_of
from penstock.data.tokenizer import load_tokenizer, make_byte_tokenizer
from penstock.engines.sizing.memory import GIB
from penstock.environments.loading import tools_told
from penstock.state.manifest import read_progress
from penstock.state.run_folder import RunFolder

Table = TypeVar("Table")
LOOKED_AT = 10_000  # rows of a file


@dataclass(frozen=True)
class Split:
    """What was looked at of a file: its rows, units that were dropped, and tokens of each unit that is kept."""

    name: str
    source: str
    rows: int
    dropped: int
    lengths_U: np.ndarray  # the longest row of a unit
    tokens: int

    @property
    def kept(self) -> int:
        """About how many units of the whole file are trained on."""
        return round(self.rows * len(self.lengths_U) / (len(self.lengths_U) + self.dropped))


def describe_model(config: TrainConfig | PairConfig) -> list[str]:
    """Return in words which model is trained."""
    engines, trainer = _engines(config), _trainer(config)
    shape = shape_of(engines)
    trained = shape.trained_parameters(trainer.lora)
    share = "" if trainer.lora is None else f", of which {trained:,} of adapters are trained"
    name = "a tiny one, which is made" if engines.model.path is None else engines.model.path
    return [f"model: {name}, {shape.parameters + (trained if share else 0):,} parameters{share}"]


def describe_steps(config: TrainConfig | PairConfig, going_on: RunFolder | None = None) -> list[str]:
    """Return in words how many rows there are, of how many tokens, what is dropped, and how often each is taken.

    Args:
        going_on: the run, where one is to go on.

    Raises:
        UserError: rows cannot be tokenized, or none is short enough.
    """
    trainer, unit = _trainer(config), _unit(config)
    if isinstance(config, TrainConfig) and config.data.image_column is not None:
        rows = len(split_of(config, "sft"))
        epochs = trainer.steps * trainer.batch / rows
        return [
            f"sft: {rows:,} {unit} with images, whose tokens are counted when the training starts",
            f"steps: {trainer.steps} of {trainer.batch} {unit}: {epochs:.3g} epochs",
        ]
    splits = list(_splits(config))
    train = splits[0]
    epochs = trainer.steps * trainer.batch / train.kept
    tokens = train.tokens * trainer.batch / len(train.lengths_U)
    taken = f"steps: {trainer.steps} of {trainer.batch} {unit}, about {tokens:,.0f} tokens each: {epochs:.3g} epochs"
    if going_on is not None:
        taken += f", of which {read_progress(going_on.finetuning).progress.iteration} steps are done"
    return [*(_described(split, trainer, unit, config) for split in splits), taken]


def describe_disk(config: TrainConfig | PairConfig) -> str:
    """Return in words what checkpoints and model take on disk."""
    engines, trainer = _engines(config), _trainer(config)
    model = f"the model {model_bytes(engines) / GIB:.2f} GiB"
    if not trainer.checkpoint_every:
        return f"disk: no checkpoints; {model}"
    size = f"{checkpoint_bytes(engines) / GIB:.2f} GiB"
    return (
        f"disk: a checkpoint {size}, every {trainer.checkpoint_every} steps and at the end, of which one stays; {model}"
    )


def _described(split: Split, trainer: SftConfig, unit: str, config: TrainConfig | PairConfig) -> str:
    key = "trainer.max_tokens" if isinstance(config, PairConfig) else "sft.max_tokens"
    seen = len(split.lengths_U) + split.dropped
    some = f"; of the first {seen:,}:" if split.rows > seen else ","
    dropped = f"{split.dropped} longer than {key} ({trainer.max_tokens}), which are dropped"
    return (
        f"{split.name}: {split.rows:,} {unit} of {split.source}{some} {split.tokens:,} tokens, rows of up to "
        f"{split.lengths_U.max():,}, {dropped if split.dropped else 'none too long'}"
    )


def _splits(config: TrainConfig | PairConfig) -> Iterator[Split]:
    with _tokenizer(_engines(config)) as tokenizer:
        if isinstance(config, PairConfig):
            for name in ("train", "heldout"):
                if (file := getattr(config.data, name)) is not None:
                    yield _preferences(config, name, file, tokenizer)
        else:
            yield _responses(config, tokenizer)


def _preferences(config: PairConfig, name: str, file: str, tokenizer: Any) -> Split:
    frame = rows_of(Path(file))
    table = _of_some(frame, lambda rows: tokenize_rows(rows, config, tokenizer, file))
    lengths_B = np.array([len(row) + len(more) for row, more in zip(table.prompts, table.responses, strict=True)])
    if config.rows_together == 2:
        return Split(name, file, len(frame), table.dropped, lengths_B.reshape(-1, 2).max(axis=1), int(lengths_B.sum()))
    own_U = lengths_B[: len(table)]  # behind them are those with another's response
    return Split(name, file, len(frame), table.dropped, own_U, int(own_U.sum()))


def _responses(config: TrainConfig, tokenizer: Any) -> Split:
    data, trainer, frame = config.data, _trainer(config), split_of(config, "sft")
    response, tools = data.response or "response", tools_told(config.environment)
    table = _of_some(
        frame, lambda rows: tokenize_pairs(rows, data.prompt, response, tokenizer, data, trainer.max_tokens, tools)
    )
    lengths_B = np.array(table.frame["prompt_tokens"].map(len) + table.frame["response_tokens"].map(len))
    source = data.sft or f"data.{data.made_up}"
    return Split("sft", source, len(frame), table.dropped, lengths_B, int(lengths_B.sum()))


def _of_some(frame: pd.DataFrame, tokenize: Callable[[pd.DataFrame], Table]) -> Table:
    """Return the table of the first rows; of all of them where these would be refused, as all then may not be."""
    try:
        return tokenize(frame.head(LOOKED_AT))
    except UserError:
        if len(frame) <= LOOKED_AT:
            raise
    return tokenize(frame)


@contextmanager
def _tokenizer(engines: TrainConfig) -> Iterator[Any]:
    if engines.model.path is not None:
        yield load_tokenizer(engines.model.path, engines.model.code)
        return
    with TemporaryDirectory() as folder:
        make_byte_tokenizer(Path(folder))
        yield load_tokenizer(folder)


def _engines(config: TrainConfig | PairConfig) -> TrainConfig:
    return config.engines() if isinstance(config, PairConfig) else config


def _trainer(config: TrainConfig | PairConfig) -> SftConfig:
    if isinstance(config, PairConfig):
        return config.trainer
    assert config.sft is not None
    return config.sft


def _unit(config: TrainConfig | PairConfig) -> str:
    if isinstance(config, PreferenceConfig) and config.loss.labelled:
        return "labelled rows"
    return "pairs" if isinstance(config, PairConfig) else "prompts with responses"

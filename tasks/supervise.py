"""Supervised training in three verbs: begin, some steps, end. The `sft` flow puts them together."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from configs.schedule import value_at
from configs.schema import TrainConfig
from data.order import take
from state.experience import read_columns
from tasks.session import Training

STEPS_PER_COMMAND = 25  # often enough for progress and live learning rates, rare enough to cost nothing


@task(task_run_name="begin", cache_policy=NO_CACHE)
def begin_supervised(training: Training, model_folder: str) -> None:
    """Load the model and the pairs on the actor's ranks."""
    config = training.config
    assert config.sft is not None
    training.session().call(
        "actor",
        "sft_begin",
        "0/sft_begin",
        config=training.session().engine_config()["sft"],
        folder=model_folder,
        dtype=config.model.dtype,
        rows=str(training.run.prompts("sft")),
    )


@task(task_run_name="steps-{first:06d}", cache_policy=NO_CACHE)
def supervised_steps(training: Training, first: int, count: int) -> list[float]:
    """Take `count` optimizer steps from step `first` on; return their losses."""
    config = training.config
    assert config.sft is not None
    rows = len(read_columns(training.run.prompts("sft"), ["response_tokens"])["response_tokens"])
    batch = config.sft.batch
    batches = take(first * batch, count * batch, rows, config.seed, config.data.shuffle).reshape(count, batch)
    replies = training.session().call(
        "actor",
        "sft_steps",
        f"{first}/sft_steps",
        batches=batches,
        budget=value_at(config.sft.micro_batch_tokens, first),
        learning_rate=float(value_at(config.sft.optimizer.learning_rate, first)),
    )
    losses: list[float] = replies[0]["losses"]
    training.session().say(f"supervised warm-up: step {first + count}/{config.sft.steps}, loss {losses[-1]:.3f}")
    return losses


@task(task_run_name="end", cache_policy=NO_CACHE)
def end_supervised(training: Training, model_folder: str, target: str) -> str:
    """Write the trained model with its tokenizer to `target`, complete or not at all, and free the engines."""
    final = Path(target)
    aside = final.with_name(f".{final.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    training.session().call("actor", "sft_end", "0/sft_end", folder=str(aside))
    copy_tokenizer(Path(model_folder), aside)
    aside.rename(final)
    return target


def blocks(config: TrainConfig) -> Iterator[tuple[int, int]]:
    """Yield (first step, number of steps) of every command."""
    steps = config.sft.steps if config.sft is not None else 0
    for first in range(0, steps, STEPS_PER_COMMAND):
        yield first, min(STEPS_PER_COMMAND, steps - first)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy everything of a model folder that belongs to its tokenizer."""
    for pattern in (
        "tokenizer*",
        "special_tokens_map.json",
        "vocab*",
        "merges.txt",
        "chat_template*",
        "added_tokens.json",
    ):
        for path in source.glob(pattern):
            shutil.copy2(path, target / path.name)

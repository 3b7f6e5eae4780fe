"""Training on preferences in verbs: check, load, begin, reference pass, steps, measure, end.

The flows `preference` and `reward_model` put them together; they differ in data and loss alone. Figures go to the run
folder step by step and to MLflow (tasks/preference_record.py). Left out: the steps themselves (engines/preference.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from configs.preference import PairConfig, PreferenceConfig, RewardModelConfig
from configs.schedule import value_at
from data.order import take
from data.preference import check_columns, tokenize_preferences, tokenize_scored
from data.rows import read_rows
from state.experience import Ragged, add_columns, offsets_of, read_columns, write_columns
from tasks.check import check_chat, check_model
from tasks.preference_record import add_to_step, record_step
from tasks.session import Training
from tasks.supervise import STEPS_PER_COMMAND, copy_tokenizer

REFERENCE = "logprobs_reference"
RUN_FOLDER_NAMES = {"train": "preferences", "heldout": "preferences-heldout"}


def check_preferences(config: PairConfig) -> None:
    """Check everything that can be seen without an engine.

    Raises:
        UserError: the first mistake found.
    """
    engines, data = config.engines(), pair_data(config)
    check_model(engines)
    if data.chat:
        check_chat(engines)
    for file in (data.train, data.heldout):
        if file is not None:
            check_columns(read_rows(Path(file)), data, file)


def pair_data(config: PairConfig) -> Any:
    """Return the section `data` of either tree."""
    assert isinstance(config, PreferenceConfig | RewardModelConfig)
    return config.data


def loss_arguments(config: PairConfig) -> dict[str, Any]:
    """Return the loss as the engines take it."""
    if isinstance(config, PreferenceConfig):
        return {"name": config.loss.name, "settings": config.loss.arguments}
    return {"name": "bradley_terry", "settings": {}}


def splits(config: PairConfig) -> list[str]:
    """Return the splits that there are."""
    return ["train"] if pair_data(config).heldout is None else ["train", "heldout"]


def preferences_file(training: Training, split: str) -> Path:
    """Return where the tokenised preferences of a split are."""
    return training.run.prompts(RUN_FOLDER_NAMES[split])


@task(task_run_name="preferences", cache_policy=NO_CACHE)
def load_preferences(training: Training, config: PairConfig, model_folder: str) -> dict[str, int]:
    """Tokenise the preferences into the run folder; return how many there are and how many were too long."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder, local_files_only=True)
    counts: dict[str, int] = {}
    for split in splits(config):
        source = str(getattr(pair_data(config), split))
        frame, limit = read_rows(Path(source)), config.trainer.max_tokens
        if isinstance(config, PreferenceConfig):
            table = tokenize_preferences(frame, config.data, config.loss, tokenizer, limit, source)
        else:
            table = tokenize_scored(frame, pair_data(config), tokenizer, limit, source)
        write_columns(preferences_file(training, split), table.columns())
        counts |= {split: len(table), f"{split}_dropped": table.dropped}
        if table.dropped:
            get_run_logger().warning("%s: %d dropped, longer than trainer.max_tokens", source, table.dropped)
    return counts


@task(task_run_name="begin", cache_policy=NO_CACHE)
def begin_preferences(training: Training, config: PairConfig, model_folder: str) -> None:
    """Load the model on the ranks."""
    training.session().call(
        "actor",
        "preference_begin",
        "0/preference_begin",
        config=training.session().engine_config()["sft"],
        folder=model_folder,
        dtype=config.model.dtype,
        scores=isinstance(config, RewardModelConfig),
    )


@task(task_run_name="reference-logprobs-{split}", cache_policy=NO_CACHE)
def reference_pass(training: Training, config: PairConfig, split: str) -> None:
    """Add the log-probs of all responses under the model as it is, before the first step."""
    path, budget = preferences_file(training, split), value_at(config.trainer.micro_batch_tokens, 0)
    asked = {"path": str(path), "role": "preference", "temperature": 1.0, "budget": budget}
    replies = training.session().call("actor", "logprobs", f"0/reference-{split}", **asked)
    lengths_B = read_columns(path, ["response_tokens"])["response_tokens"].lengths_B
    order = np.concatenate([reply["rows"] for reply in replies])
    flat = Ragged(np.concatenate([reply["values"] for reply in replies]), offsets_of(lengths_B[order]))
    add_columns(path, {REFERENCE: flat.take(np.argsort(order))})


@task(task_run_name="steps-{first:06d}", cache_policy=NO_CACHE)
def preference_steps(training: Training, config: PairConfig, units: int, first: int, count: int) -> None:
    """Take `count` optimizer steps from step `first` on, and record the figures of each."""
    trainer = config.trainer
    order = take(first * trainer.batch, count * trainer.batch, units, config.seed, pair_data(config).shuffle)
    replies = training.session().call(
        "actor",
        "preference_steps",
        f"{first}/preference_steps",
        path=str(preferences_file(training, "train")),
        batches=order.reshape(count, trainer.batch),
        budget=value_at(trainer.micro_batch_tokens, first),
        loss=loss_arguments(config),
        learning_rate=float(value_at(trainer.optimizer.learning_rate, first)),
    )
    for step, metrics in enumerate(replies[0]["steps"], start=first + 1):
        record_step(training, step, metrics)


@task(task_run_name="measure-{step:06d}", cache_policy=NO_CACHE)
def measure_heldout(training: Training, config: PairConfig, step: int) -> None:
    """Record the figures of the held-out preferences after `step` as `heldout/...`; step 0 is before the first."""
    replies = training.session().call(
        "actor",
        "preference_measure",
        f"{step}/preference_measure",
        path=str(preferences_file(training, "heldout")),
        budget=value_at(config.trainer.micro_batch_tokens, step),
        loss=loss_arguments(config),
    )
    metrics = {f"heldout/{name}": value for name, value in replies[0].items()}
    (add_to_step if step else record_step)(training, step, metrics)


@task(task_run_name="end", cache_policy=NO_CACHE)
def end_preferences(training: Training, model_folder: str) -> str:
    """Write the trained model with its tokenizer to `models/final`, complete or not at all; return that folder."""
    final = training.run.model("final")
    aside = final.with_name(".final.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    training.session().call("actor", "preference_end", "0/preference_end", folder=str(aside))
    copy_tokenizer(Path(model_folder), aside)
    aside.rename(final)
    return str(final)


def preference_blocks(config: PairConfig) -> Iterator[tuple[int, int]]:
    """Yield (first step, number of steps) of every command."""
    for first in range(0, config.trainer.steps, STEPS_PER_COMMAND):
        yield first, min(STEPS_PER_COMMAND, config.trainer.steps - first)

"""Training on preferences in verbs: load, begin, reference pass, steps, measure.

The flows `preference` and `reward_model` are made of them; they differ in data and loss alone. Figures go to the run
folder step by step and to the tracker (penstock/tasks/iteration/record.py). Left out: the checks
(penstock/checks/preferences.py), the steps themselves (penstock/engines/training/preference.py), checkpoints and the
end (penstock/tasks/finetuning/checkpoints.py).
"""

from __future__ import annotations

from pathlib import Path

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from penstock.checks.tokenized import note_tokenized
from penstock.configs.preference import PairConfig, PreferenceConfig, RewardModelConfig
from penstock.configs.tree.schedule import value_at
from penstock.data.order import take
from penstock.data.preference import tokenize_rows
from penstock.data.source import forget, rows_of
from penstock.data.tokenizer import load_tokenizer
from penstock.engines.commands.finetuning import PreferenceBegin, PreferenceLoss, PreferenceMeasure, PreferenceSteps
from penstock.engines.commands.forward import Logprobs
from penstock.session.figures import heldout_alarms, step_alarms
from penstock.session.record import append_record
from penstock.session.session import Training
from penstock.state.experience import column_names, read_columns, write_columns
from penstock.tasks.finetuning.checkpoints import model_to_train, taken
from penstock.tasks.iteration.forward_passes import in_row_order
from penstock.tasks.start import attention_of

REFERENCE = "logprobs_reference"
RUN_FOLDER_NAMES = {"train": "preferences", "heldout": "preferences-heldout"}


def loss_of(config: PairConfig) -> PreferenceLoss:
    """Return the loss as the engines take it."""
    if isinstance(config, PreferenceConfig):
        return PreferenceLoss(config.loss.name, config.loss.settings)
    return PreferenceLoss("bradley_terry", {})


def splits(config: PairConfig) -> list[str]:
    """Return the splits that there are."""
    return ["train"] if config.data.heldout is None else ["train", "heldout"]


def referenced_splits(config: PairConfig) -> list[str]:
    """Return the splits whose responses are compared with the model that training starts from."""
    return splits(config) if isinstance(config, PreferenceConfig) and config.loss.needs_reference else []


def preferences_file(training: Training, split: str) -> Path:
    """Return where the tokenised preferences of a split are."""
    return training.run.prompts(RUN_FOLDER_NAMES[split])


@task(task_run_name="preferences", cache_policy=NO_CACHE)
def load_preferences(training: Training, config: PairConfig, model_folder: str) -> dict[str, int]:
    """Tokenise the preferences into the run folder (once per run); return how many units each split has."""
    missing = [split for split in splits(config) if not preferences_file(training, split).exists()]
    if missing:
        training.session().say("tokenizing preferences")
        tokenizer = load_tokenizer(model_folder, config.model.code)
    for split in missing:
        note_tokenized(training.run, "preferences", config)
        source = str(getattr(config.data, split))
        table = tokenize_rows(rows_of(Path(source)), config, tokenizer, source)
        write_columns(preferences_file(training, split), table.columns())
        if table.dropped:
            get_run_logger().warning("%s: %d dropped, longer than trainer.max_tokens", source, table.dropped)
    forget()
    return {split: _units(preferences_file(training, split)) for split in splits(config)}


def _units(path: Path) -> int:
    """Return how many units a file has, of two rows each: a pair, or a labelled row with its mismatched one."""
    return len(read_columns(path, ["response_tokens"])["response_tokens"]) // 2


@task(task_run_name="begin", cache_policy=NO_CACHE)
def begin_preferences(training: Training, config: PairConfig, model_folder: str) -> None:
    """Load the model on the ranks."""
    session = training.session()
    session.await_engines()
    session.say("loading the model")
    model = model_to_train(training, config.model.dtype, config.seed, model_folder)
    begin = PreferenceBegin(model, scores=isinstance(config, RewardModelConfig))
    replies = session.call("actor", begin, "0/preference_begin")
    session.engine_figures["attention"] = attention_of(replies[0])


@task(task_run_name="reference-logprobs-{split}", cache_policy=NO_CACHE)
def reference_pass(training: Training, config: PairConfig, split: str) -> None:
    """Add the log-probs of all responses under the starting model, which the ranks hold (once per run)."""
    path, budget = preferences_file(training, split), value_at(config.trainer.budget, 0)
    if REFERENCE in (present := column_names(path)):
        return
    training.session().say("log-probs of the reference", split)
    asked = Logprobs(str(path), "preference", 1.0, budget)
    replies = training.session().call("actor", asked, f"0/reference-{split}")
    write_columns(path, {**read_columns(path, present), REFERENCE: in_row_order(replies, path)})


@task(task_run_name="steps-{first:06d}", cache_policy=NO_CACHE)
def preference_steps(training: Training, config: PairConfig, units: int, first: int, count: int) -> None:
    """Take `count` optimizer steps from step `first` on, and record the figures of each."""
    trainer = config.trainer
    order = take(first * trainer.batch, count * trainer.batch, units, config.seed, config.data.shuffle)
    steps = PreferenceSteps(
        path=str(preferences_file(training, "train")),
        batches=order.reshape(count, trainer.batch),
        budget=value_at(trainer.budget, first),
        loss=loss_of(config),
        learning_rate=float(value_at(trainer.optimizer.learning_rate, first)),
    )
    for step, metrics in enumerate(taken(training, steps, "preference_steps", first, count), start=first + 1):
        append_record(training, step, metrics | step_alarms(training, metrics))


@task(task_run_name="measure-{step:06d}", cache_policy=NO_CACHE)
def measure_heldout(training: Training, config: PairConfig, step: int) -> None:
    """Record the figures of the held-out preferences after `step` as `heldout/...`; step 0 is before the first."""
    training.session().say("measuring held-out preferences")
    measure = PreferenceMeasure(
        path=str(preferences_file(training, "heldout")),
        budget=value_at(config.trainer.budget, step),
        loss=loss_of(config),
    )
    reply = training.session().call("actor", measure, f"{step}/preference_measure")[0]
    metrics = {f"heldout/{name}": value for name, value in reply.metrics.items()}
    append_record(training, step, metrics | (heldout_alarms(training, metrics) if step else {}))

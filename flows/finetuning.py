"""What the flows before reinforcement learning share: how a run is opened, and training on preferences as a whole.

    check -> engines -> preferences -> load the model -> (reference log-probs) -> steps, with checkpoints -> the model

A killed run goes on from its newest checkpoint. Left out: what each step does (tasks/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from configs.preference import PairConfig, RewardModelConfig
from configs.schema import TrainConfig
from engines.commands.finetuning import PreferenceEnd
from penstock.checks.memory import check_finetuning_memory
from penstock.checks.preferences import check_preferences
from penstock.session.going_on import Resume, new_run, resumed_run
from penstock.session.prefect import admission
from penstock.session.session import Training, open_session
from penstock.state.manifest import ended
from penstock.state.run_folder import RunFolder
from tasks.finetuning.checkpoints import blocks, checkpoint_due, end_finetuning, finetuned, restored, save_step
from tasks.finetuning.preferences import (
    begin_preferences,
    kind_of,
    load_preferences,
    measure_heldout,
    preference_steps,
    reference_pass,
    referenced_splits,
    splits,
)
from tasks.finetuning.record import record_engines, recording_preferences
from tasks.start import starting_model

Tree = TypeVar("Tree", TrainConfig, PairConfig)


@contextmanager
def opened(
    config: Tree, kind: str, check: Callable[[Tree], None], name: str, run_folder: str | None, resume: str | None
) -> Iterator[tuple[Tree, RunFolder]]:
    """Check the configuration, `resume`'s own if it is given, and open the run, before anything waits or starts.

    Args:
        kind: the command that makes such runs.
        name: of a folder that is made because none is given.
    """
    if resume is not None:
        with resumed_run(Resume(Path(resume)), kind, type(config), check) as (config, run):
            yield config, run
        return
    with new_run(config, check, name, run_folder) as run:
        yield config, run


def train_on_preferences(config: PairConfig, run_folder: str | None, resume: str | None) -> str:
    """Train on preferences, a policy or a reward model; return the folder with the result."""
    with opened(config, kind_of(config), check_preferences, config.name, run_folder, resume) as (config, run):
        engines, final = config.engines(), run.model("final")
        if ended(run):
            return str(final)
        with admission(engines):
            memory = check_finetuning_memory(engines, "trainer", scores=isinstance(config, RewardModelConfig))
            with open_session(engines, run, memory) as training, recording_preferences(training, config):
                return finetuned(run, "final") if final.exists() else trained(training, config)


def trained(training: Training, config: PairConfig) -> str:
    """Take the steps that are left, from the model as it starts; return the folder with the result."""
    model = starting_model(training)
    counts = load_preferences(training, config, model)
    begin_preferences(training, config, model)
    record_engines(training)
    for split in referenced_splits(config):
        reference_pass(training, config, split)
    done, heldout = restored(training, training.run), "heldout" in splits(config)
    if heldout and not done:
        measure_heldout(training, config, 0)
    for first, count in blocks(config.trainer, done):
        preference_steps(training, config, counts["train"], first, count)
        if checkpoint_due(config.trainer, first + count):
            save_step(training, first + count)
    if heldout:
        measure_heldout(training, config, config.trainer.steps)
    return end_finetuning(training, PreferenceEnd, model, "final")

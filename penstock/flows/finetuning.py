"""Training on preferences as a whole, of a policy or of a reward model.

    check -> engines -> preferences -> load the model -> (reference log-probs) -> steps, with checkpoints -> the model

A killed run goes on from its newest checkpoint, and so does one that has lost ranks. Left out: what each step does
(penstock/tasks/).
"""

from __future__ import annotations

from typing import TypeVar

from penstock.configs.preference import PairConfig
from penstock.engines.commands.finetuning import PreferenceEnd
from penstock.flows.parts.recovery import despite_losses
from penstock.session.opening import Kind, left_as_it_is, opened, resume_of, started
from penstock.session.progress import show_progress, show_steps
from penstock.session.session import Training
from penstock.tasks.finetuning.checkpoints import (
    blocks,
    checkpoint_due,
    end_finetuning,
    finetuned,
    is_written,
    restored,
    save_step,
)
from penstock.tasks.finetuning.preferences import (
    begin_preferences,
    load_preferences,
    measure_heldout,
    preference_steps,
    reference_pass,
    referenced_splits,
    splits,
)
from penstock.tasks.finetuning.record import record_engines, recording_preferences
from penstock.tasks.start import starting_model

Pairs = TypeVar("Pairs", bound=PairConfig)


def train_on_preferences(
    kind: Kind[Pairs], config: Pairs, run_folder: str | None, resume: str | None, changes: list[str] | None = None
) -> str:
    """Train on preferences, a policy or a reward model; return the folder with the result."""
    going_on = resume_of(config, run_folder, resume, changes=changes)
    if done := left_as_it_is(kind, going_on):
        return str(done.model("final"))
    with (
        opened(kind, config, run_folder, going_on) as (config, run),
        started(kind, config, run) as training,
        show_progress(training),
        recording_preferences(training, kind.name, config),
    ):
        return despite_losses(training, lambda training: trained(training, config))


def trained(training: Training, config: PairConfig) -> str:
    """Take the steps that are left, from the model as it starts; return the folder with the result."""
    steps = config.trainer.steps
    if is_written(training.run, "final", steps):
        return finetuned(training.run, "final", steps)
    model = starting_model(training)
    counts = load_preferences(training, config, model)
    begin_preferences(training, config, model)
    record_engines(training)
    for split in referenced_splits(config):
        reference_pass(training, config, split)
    done, heldout = restored(training, training.run, "final"), "heldout" in splits(config)
    if heldout and not done:
        measure_heldout(training, config, 0)
    show_steps(training, steps, done)
    for first, count in blocks(config.trainer, done):
        preference_steps(training, config, counts["train"], first, count)
        if checkpoint_due(config.trainer, first + count):
            save_step(training, first + count)
    if heldout:
        measure_heldout(training, config, steps)
    return end_finetuning(training, PreferenceEnd, model, "final", steps)

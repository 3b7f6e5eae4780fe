"""Checks before an evaluation starts: model, held-out data, reward, evaluators; nothing that training alone needs.

Nothing is written, no engine is started, torch is not imported. Left out: memory, which depends on what else runs
(penstock/checks/memory.py).
"""

from __future__ import annotations

from pathlib import Path

from penstock.base.errors import UserError
from penstock.checks.data import check_heldout
from penstock.checks.model.chat import check_chat
from penstock.checks.model.folder import check_model_folder
from penstock.checks.model.starting_model import check_model
from penstock.checks.prompts import check_prompt_lengths
from penstock.checks.training import check_environment, check_reward, check_rollout_model
from penstock.configs.evaluation import EvaluationConfig
from penstock.data.source import reading_once, split_of
from penstock.engines.families.images import sees
from penstock.engines.families.shape import read_settings, read_shape
from penstock.evaluators.loading import load_evaluators

WITHOUT_KL = "leave 'kl' out: evaluate.evaluators=[rewards, diversity, length]"


@reading_once()
def check_evaluation(config: EvaluationConfig) -> None:
    """Check all that does not depend on what else runs on this machine.

    Raises:
        UserError: the first mistake found.
    """
    check_model(config)
    check_rollout_model(config)
    columns = check_heldout(config)
    if config.data.chat:
        check_chat(config)
    check_environment(config)
    check_reward(config, columns)
    if not config.evaluate.evaluators:
        raise UserError("evaluate.evaluators is empty: nothing would be measured", "name some, e.g. [rewards, length]")
    load_evaluators(config.evaluate.evaluators)
    check_reference(config)
    check_prompt_lengths(config, {"heldout": split_of(config, "heldout")})


def check_reference(config: EvaluationConfig) -> None:
    """Check that the evaluator `kl` has a model to compare with, which reads the same tokens.

    Raises:
        UserError: it has none, or one of another vocabulary.
    """
    if "reference" not in config.roles:
        return
    if config.reference is None:
        raise UserError("the evaluator 'kl' has no reference: the recipe names no 'model.path'", WITHOUT_KL)
    folder = Path(config.reference)
    check_model_folder(folder, "the reference", code=config.model.code)
    ours, theirs = read_shape(Path(str(config.model.path))).vocabulary, read_shape(folder).vocabulary
    if config.data.image_column is not None and not sees(read_settings(folder)):
        raise UserError(f"the evaluator 'kl' compares with {folder}, which sees no images of the rows", WITHOUT_KL)
    if ours != theirs:
        raise UserError(
            f"the evaluator 'kl' compares {config.model.path}, of {ours} tokens, with {folder}, of {theirs}", WITHOUT_KL
        )

"""Serve: a rollout engine with the weights of a model that nobody trains, held-out prompts and the source of rewards.

The engines wait for their GPUs as those of a training do. Left out: recovery; what a lost rank was asked is asked again
by giving the command again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from penstock.checks.evaluation import check_evaluation
from penstock.checks.memory import check_memory
from penstock.configs.evaluation import EvaluationConfig
from penstock.configs.loading.resuming import Resumable
from penstock.configs.sections.run import Role
from penstock.data.prompts import tokenize_prompts
from penstock.data.source import split_of
from penstock.data.tokenizer import load_tokenizer
from penstock.engines.commands.build import BuildFrozen
from penstock.environments.loading import tools_told
from penstock.session.opening import Kind, started
from penstock.session.progress import show_progress
from penstock.session.session import Session, Training
from penstock.state.run_folder import RunFolder
from penstock.tasks.evaluation.inputs import Plan, Subject
from penstock.tasks.start import images_of, open_rewards, read_split

NOTHING = Resumable((), (), "", ())  # an evaluation does not go on
EVALUATION = Kind("evaluate", EvaluationConfig, check_evaluation, check_memory, NOTHING)


@contextmanager
def served(plan: Plan, subject: Subject, weights: Path, run: RunFolder) -> Iterator[Training]:
    """Start the engines of an evaluation of one model; they end with the context.

    Args:
        weights: folder of the model.
        run: where its prompts, responses and logs go.

    Raises:
        UserError: more GPUs or memory are needed than there are.
    """
    with (
        started(EVALUATION, plan.engines(subject, weights), run) as training,
        show_progress(training, f"evaluating {subject.label}"),
    ):
        load_heldout(training, str(weights))
        serve(training, str(weights))
        yield training


@task(task_run_name="held-out-prompts", cache_policy=NO_CACHE)
def load_heldout(training: Training, model_folder: str) -> dict[str, int]:
    """Tokenize the held-out prompts for a model and open the source of rewards; return counts."""
    config, path = training.config, training.run.prompts("heldout")
    training.session().say("tokenizing prompts")
    tokenizer, tools = load_tokenizer(model_folder, config.model.code), tools_told(config.environment)
    rows, images = split_of(config, "heldout"), images_of(training, model_folder)
    tokenize_prompts(rows, config.data, tokenizer, "heldout", tools, images).save(path)
    counts = read_split(training, "heldout")
    open_rewards(training, "heldout")
    return counts


@task(task_run_name="serve", cache_policy=NO_CACHE)
def serve(training: Training, model_folder: str) -> int:
    """Load the model into the rollout engines, and for `kl` beside its reference; return how many parameters it has."""
    session = training.session()
    session.model_folder = model_folder
    session.await_engines()
    session.say("loading the model into vLLM")
    commands = {group: _command(session, group.spec.roles) for group in session.distinct_groups}
    replies = session.call_all(commands, "0/build")
    return max(reply.parameters for ranks in replies.values() for reply in ranks)


def _command(session: Session, roles: tuple[Role, ...]) -> BuildFrozen:
    build = session.build(roles)
    return BuildFrozen(build.config, build.folder, roles, build.engines, build.images)

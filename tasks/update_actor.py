"""Update the actor: all optimizer steps of one iteration on its experience."""

from __future__ import annotations

from dataclasses import asdict

from prefect import task
from prefect.cache_policies import NO_CACHE

from algorithms.registry import ALGORITHMS
from tasks.session import Stage, Training, timed
from tasks.settings import Settings


@task(task_run_name="update-actor-{settings.iteration:06d}", cache_policy=NO_CACHE)
def update_actor(training: Training, settings: Settings, stage: Stage) -> dict[str, float]:
    """Train the actor; return its metrics."""
    algorithm = training.config.algorithm
    kl = algorithm.kl
    scheduled = asdict(settings)
    loss_settings = {
        name: scheduled.get(name, getattr(algorithm, name)) for name in ALGORITHMS[algorithm.name].loss_settings
    }
    loss = {
        "policy_loss": ALGORITHMS[algorithm.name].policy_loss,
        "settings": loss_settings,
        "temperature": settings.temperature,
        "entropy_coefficient": settings.entropy_coefficient,
        "kl_estimator": kl.estimator if kl is not None and kl.place == "loss" else None,
        "kl_coefficient": settings.kl_coefficient,
    }
    metrics: dict[str, float] = {}
    with timed(metrics, "update_actor"):
        replies = training.session().call(
            "actor",
            "update_actor",
            f"{settings.iteration}/update_actor",
            path=stage.experience.path,
            version=stage.experience.policy_version,
            split=split(training, settings.iteration, settings.micro_batch_tokens),
            loss=loss,
            learning_rate=settings.learning_rate,
        )
    return metrics | named("actor", replies[0])


def split(training: Training, iteration: int, micro_batch_tokens: int) -> dict[str, object]:
    """Return the fields of `engines.updates.Split` for this iteration."""
    config = training.config
    return {
        "mini_batches": config.algorithm.mini_batches,
        "epochs": config.algorithm.epochs,
        "samples": config.rollout.samples,
        "micro_batch_tokens": micro_batch_tokens,
        "max_response_tokens": config.rollout.max_response_tokens,
        "aggregation": config.algorithm.aggregation,
        "seed": config.seed + 1_000_003 * iteration,
    }


def named(role: str, reply: dict[str, float]) -> dict[str, float]:
    """Prefix a rank's figures with the role; its GPU memory goes by its own name."""
    memory = {"memory/gpu_gib": reply["gpu_gib"]} if "gpu_gib" in reply else {}
    return memory | {f"{role}/{name}": value for name, value in reply.items() if name != "gpu_gib"}

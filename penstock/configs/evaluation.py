"""What engines of an evaluation are started with: the tree of a training, with the roles that only look at responses.

The recipe stays a training's. Nobody writes this tree: `evaluation_config` derives it, for one model after the other.
Left out: which model is evaluated, and on what (penstock/tasks/evaluation/inputs.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from pydantic import Field

from penstock.base.model_code import code_of
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.run import GroupConfig, Role


class EvaluationConfig(TrainConfig):
    """The tree of a training whose models are loaded and never trained."""

    reference: str | None = Field(None, description="folder of the model that the evaluator 'kl' compares with")

    @property
    def trains(self) -> bool:
        """Whether engines train the policy."""
        return False

    @property
    def roles(self) -> tuple[Role, ...]:
        """The rollout; for `kl` both models that give log-probs; a reward model."""
        return roles_of(self)


def roles_of(config: TrainConfig) -> tuple[Role, ...]:
    """Return the roles that an evaluation by a recipe needs, in build order."""
    passes: tuple[Role, ...] = ("actor", "reference") if "kl" in (config.evaluate.evaluators or ()) else ()
    scores: tuple[Role, ...] = ("reward",) if config.reward.model is not None else ()
    return (*passes, *scores, "rollout")


def evaluation_config(config: TrainConfig, model: Path, reference: Path | None) -> EvaluationConfig:
    """Return the tree with which engines evaluate the model in a folder as a recipe says.

    Engine groups keep their devices; roles that train, and groups that hold nothing else or come and go, are left out.
    """
    groups = _groups(config.groups, roles_of(config))
    elsewhere = any(group.hosts for group in groups.values())
    tree = config.model_dump(mode="json", exclude={"base", "sft", "groups"})
    code = config.model.code if code_of(model) else None  # another model needs none; if it has its own, it is refused
    trust = {"trust_remote_code": code is not None, "code": code}
    tree["model"] |= {"path": str(model), "tiny": None, **trust}
    tree["data"] |= {"sft": None, "response": None}
    tree["actor"] |= {"lora": None, "offload_optimizer": False, "routing": "own", "expert_parallel": 1}
    tree["actor"] |= {"offload": "nothing", "offload_folder": None, "offload_activations": False, "fp8": False}
    tree["rollout"] |= {"stream": None, "weights": "auto"}  # the folder's model as it is
    return EvaluationConfig.model_validate(
        tree
        | {
            "reference": None if reference is None else str(reference),
            "groups": {name: group.model_dump(mode="json") for name, group in groups.items()},
            "hosts": tree["hosts"] if elsewhere else None,
        }
    )


def _groups(groups: Mapping[str, GroupConfig], roles: Collection[Role]) -> dict[str, GroupConfig]:
    kept = {name: [role for role in group.roles if role in roles] for name, group in groups.items()}
    return {
        name: groups[name].model_copy(update={"roles": held})
        for name, held in kept.items()
        if held and not groups[name].elastic
    }

"""Is a version better than the best one: by what both earned on the same held-out prompts, paired, beyond chance.

Each training has evaluated its last policy; the responses and their rewards lie in its run folder. A version is better
where the 95 % interval of the mean difference of rewards, resampled over prompts
(penstock/evaluators/bootstrap.py), lies above zero. Prompts that both models find easy or hard cancel out, so the
interval is narrower than that of either mean.

Rewards are compared, not accuracies: with rewards of 0 and 1 they are the same, and others have no notion of right.

Left out: generating responses anew. What was measured on other prompts or in another way is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.base.errors import UserError
from penstock.checks.tokenized import CONTENT, made_with, noted
from penstock.configs.schema import TrainConfig
from penstock.evaluators.bootstrap import with_intervals
from penstock.session.session import read_config
from penstock.state.experience import read_columns
from penstock.state.run_folder import RunFolder
from penstock.trackers.registry import BEST, ITERATION, VERDICT, Registry, Version, best_of

SETTINGS = (
    "evaluate.prompts",
    "evaluate.temperature",
    "evaluate.samples",
    "rollout.max_response_tokens",
    "reward",
    "environment",
)
_HOW = ("timeout_s", "workers", "max_failure_share")  # of a reward, which decide nothing about its value
_TRAINED_ON = f"{CONTENT}data.train"  # the one thing that may differ


@dataclass(frozen=True)
class Judgement:
    """What a version earned beside the best one.

    Attributes:
        best: None: there was none, or it is this version.
        rewards: mean held-out reward of the best one and of this one.
        difference: of the means, this one's minus the best one's, with the ends of its 95 % interval.
        prompts: on how many.
    """

    version: Version
    best: Version | None = None
    rewards: tuple[float, float] = (0.0, 0.0)
    difference: tuple[float, float, float] = (0.0, 0.0, 0.0)
    prompts: int = 0

    @property
    def better(self) -> bool:
        """Whether the version is to be `best`."""
        return self.best is None or self.difference[1] > 0

    def __str__(self) -> str:
        if self.best is None:
            return f"{self.version} is best: there is no other to compare it with"
        mean, low, high = self.difference
        was, now = self.rewards
        judged = "is better than" if self.better else "is not better than"
        return (
            f"{self.version} {judged} {self.best} (best): held-out reward {now:.4f} against {was:.4f} on "
            f"{self.prompts} prompts, difference {mean:+.4f} [{low:+.4f}, {high:+.4f}]"
        )


def judge(version: Version, best: Version | None) -> Judgement:
    """Compare what two versions earned on held-out prompts.

    Raises:
        UserError: a run folder is gone, a version was not evaluated, or the two were not on the same prompts.
    """
    if best is None or best.number == version.number:
        return Judgement(version)
    check_same(measured_in(version), measured_in(best), str(version), str(best))
    (ids, new_P), (best_ids, best_P) = _rewards(version), _rewards(best)
    if ids != best_ids:
        raise _otherwise(str(version), str(best), "the prompts that were answered")
    found = with_intervals({"": new_P - best_P})
    return Judgement(
        version,
        best,
        (float(best_P.mean()), float(new_P.mean())),
        (found[""], found["/low"], found["/high"]),
        len(ids),
    )


def judge_and_promote(registry: Registry, version: Version, best: Version | None) -> Judgement:
    """Judge a version, let it be `best` if it is better, and note the verdict on it either way.

    Raises:
        UserError: see `judge`.
    """
    judgement = judge(version, best)
    if judgement.better:
        registry.point(BEST, version)
    registry.tag(version, {VERDICT: str(judgement)})
    return judgement


def check_comparable(config: TrainConfig, registry: Registry, name: str) -> None:
    """Check, before anything is trained, that what a training will measure can be compared with what is best.

    Raises:
        UserError: it cannot.
    """
    if (best := best_of(registry, name)) is not None:
        check_same(_measured(config, made_with(config, "prompts")), measured_in(best), "this recipe", str(best))


def measured_in(version: Version) -> dict[str, Any]:
    """Return what decides how a version's run has measured, by dotted key.

    Raises:
        UserError: its run folder is gone.
    """
    run = run_of(version)
    return _measured(read_config(run), noted(run, "prompts"))


def run_of(version: Version) -> RunFolder:
    """Return the run folder of a version.

    Raises:
        UserError: it is gone.
    """
    if version.run is None or not (version.run / "config.yaml").is_file():
        raise UserError(
            f"{version} cannot be compared: its run folder {version.run or ''} is not there",
            "put it back, or give another version the alias 'best' on the tracker's pages",
        )
    return RunFolder(version.run)


def _measured(config: TrainConfig, prompts: dict[str, Any]) -> dict[str, Any]:
    tree = config.model_dump(mode="json")
    tree["reward"] = {name: value for name, value in tree["reward"].items() if name not in _HOW}
    values = {key: _at(tree, key) for key in SETTINGS}
    return values | {key: value for key, value in prompts.items() if key != _TRAINED_ON}


def _at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree


def check_same(one: dict[str, Any], other: dict[str, Any], name: str, other_name: str) -> None:
    """Refuse to compare what was not measured in the same way.

    Raises:
        UserError: names the first key that differs.
    """
    if odd := [key for key in one.keys() | other.keys() if one.get(key) != other.get(key)]:
        raise _otherwise(name, other_name, min(odd))


def _otherwise(name: str, other: str, what: str) -> UserError:
    return UserError(
        f"{name} cannot be compared with {other}: they are not measured alike, {what} differs",
        "use the held-out prompts and settings of the one that is best, or give another version the alias 'best'",
    )


def _rewards(version: Version) -> tuple[list[str], np.ndarray]:
    """Return the prompts that a version's last evaluation asked (P ids), and the mean reward of each (P).

    Raises:
        UserError: there is no such evaluation.
    """
    run, iteration = run_of(version), int(version.tags[ITERATION])
    if not (path := run.evaluation(iteration)).is_file():
        raise UserError(
            f"{version} cannot be compared: it has no held-out responses of iteration {iteration}",
            "evaluate.every says when there are some; the last iteration always has",
        )
    columns = read_columns(path, ["prompt_id", "reward"])
    ids = [str(name) for name in columns["prompt_id"]]
    prompts = list(dict.fromkeys(ids))
    rewards_PN = np.asarray(columns["reward"], np.float64).reshape(len(prompts), -1)
    return prompts, rewards_PN.mean(axis=1)

"""A stream is refused where something needs the whole batch before anything is learnt from it."""

from __future__ import annotations

from typing import Any

import pytest

from configs.loading.load import config_from_mapping
from penstock.base.errors import UserError

APART = {"training": {"roles": ["actor"]}, "generating": {"roles": ["rollout"]}}
WITH_CRITIC = {"training": {"roles": ["actor", "critic"]}, "generating": {"roles": ["rollout"]}}
WITH_REFERENCE = {"training": {"roles": ["actor", "reference"]}, "generating": {"roles": ["rollout"]}}


def of(groups: dict[str, Any] | None = None, algorithm: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Return the sections of a recipe with a stream."""
    rollout = {"prompts": 16, "stream": {"portions": 4}} | more.pop("rollout", {})
    return {"rollout": rollout, "groups": groups or {}, "algorithm": {"name": "grpo"} | (algorithm or {}), **more}


@pytest.mark.parametrize(
    "sections",
    [
        of(APART),
        of(APART, {"name": "rloo", "correction": {"weights": "token"}}),
        of(WITH_REFERENCE, {"kl": {"place": "loss", "coefficient": 0.1}}),
        of(WITH_CRITIC, {"name": "ppo", "settings": {"whiten": False}}),
        of(APART, environment={"type": "penstock.environments.calculator:Calculator"}),
    ],
)
def test_a_stream_goes_with_what_needs_groups_alone(sections: dict[str, Any]) -> None:
    """The control of all that is refused."""
    stream = config_from_mapping(sections, "test").rollout.stream
    assert stream is not None and stream.portions == 4


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (of(), "needs a group for 'rollout' beside that of 'actor'"),
        (of({"main": {"roles": ["actor", "rollout"]}}), "needs a group for 'rollout' beside that of 'actor'"),
        (of(APART, {"mini_batches": 2}), "'algorithm.mini_batches' and 'algorithm.epochs' must be 1"),
        (of(APART, {"epochs": 2}), "'algorithm.mini_batches' and 'algorithm.epochs' must be 1"),
        (of(WITH_CRITIC, {"name": "ppo"}), "advantage 'gae', policy loss 'ppo_clip' or .* looks at the whole batch"),
        (of(APART, {"name": "gpg"}), "advantage 'gpg'"),
        (of(APART, {"policy_loss": "kl_cov"}), "policy loss 'kl_cov'"),
        (of(APART, {"correction": {"weights": "token", "normalize": True}}), r"'algorithm\.correction\.normalize'"),
        (of(APART, {"dynamic_sampling": {}}), r"does not go with algorithm\.dynamic_sampling"),
        (of(APART, {"name": "remax"}), "does not go with algorithm 'remax'"),
        (
            of(WITH_REFERENCE, {"kl": {"place": "loss", "coefficient": 0.1, "estimator": "full"}}),
            r"does not go with algorithm\.kl\.estimator: full",
        ),
        (of(APART, rollout={"tail": {}}), "'tail' and 'stream' exclude each other"),
        (of(APART, rollout={"carry": {}}), "'carry' and 'stream' exclude each other"),
        (of(APART, rollout={"prompts": 3}), r"'stream.portions' \(4\) must not exceed 'prompts' \(3\)"),
        (of(APART, rollout={"stream": {"portions": 1}}), r"rollout\.stream\.portions"),
    ],
)
def test_what_needs_the_whole_batch_is_refused(sections: dict[str, Any], said: str) -> None:
    """Before anything starts, and it says what to change."""
    with pytest.raises(UserError, match=said):
        config_from_mapping(sections, "test")

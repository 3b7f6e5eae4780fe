"""A stream is refused where something needs the whole batch before anything is learnt from it, or where it idles."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.configs.loading.load import config_from_mapping

APART = {"training": {"roles": ["actor"]}, "generating": {"roles": ["rollout"]}}
WITH_CRITIC = {"training": {"roles": ["actor", "critic"]}, "generating": {"roles": ["rollout"]}}
BESIDE_REFERENCE = {"training": {"roles": ["actor"]}, "generating": {"roles": ["rollout", "reference"]}}
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
        of(),
        of({"main": {"roles": ["actor", "rollout"]}}),
        of(BESIDE_REFERENCE, {"kl": {"place": "loss", "coefficient": 0.1}}),
        of(rollout={"tail": {}}),
        of(rollout={"carry": {}}),
        of(APART, rollout={"tail": {}, "tensor_parallel": 2}),
    ],
)
def test_a_stream_goes_with_what_needs_groups_alone(sections: dict[str, Any]) -> None:
    """The control of all that is refused."""
    stream = config_from_mapping(sections, "test").rollout.stream
    assert stream is not None and stream.portions == 4


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            of(rollout={"tensor_parallel": 2}),
            "give 'rollout' a group of its own, or set 'rollout.tensor_parallel' to 1",
        ),
        (of(rollout={"sleep": True}), "'rollout.sleep' has no effect with 'rollout.stream'"),
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
        (of(APART, rollout={"tail": {}, "stream": {"staleness": 1}}), "'tail' and 'stream' exclude each other"),
        (of(APART, rollout={"tail": {}, "carry": {}}), "'tail' and 'carry' exclude each other"),
        (of(APART, rollout={"carry": {}, "stream": {"staleness": 1}}), "'carry' and 'stream' exclude each other"),
        (of(APART, rollout={"tail": {}, "carry": {}, "stream": {}}), "'tail' and 'carry' exclude each other"),
        (of(APART, rollout={"prompts": 3}), r"'stream.portions' \(4\) must not exceed 'prompts' \(3\)"),
        (of(APART, rollout={"stream": {"portions": 1}}), r"rollout\.stream\.portions"),
        (of(APART, rollout={"stream": {"portions": 4, "staleness": 1}}), "'portions' has no effect with 'staleness'"),
        (of(APART, rollout={"stream": {"extra": 0.25}}), "'extra' has no effect with 'staleness' below 2"),
        (of(APART, rollout={"stream": {"staleness": 1, "extra": 0.25}}), "'extra' has no effect"),
        (of(APART, rollout={"stream": {"keep_kv_cache": True}}), "'keep_kv_cache' has no effect at 'staleness' 0"),
        (of(rollout={"stream": {"staleness": 1}}), "needs a group for 'rollout' alone"),
        (
            of(rollout={"stream": None, "carry": {"keep_kv_cache": True}, "sleep": True}),
            "'sleep' would empty the cache that 'carry.keep_kv_cache' keeps",
        ),
    ],
)
def test_what_needs_the_whole_batch_is_refused(sections: dict[str, Any], said: str) -> None:
    """Before anything starts, and it says what to change."""
    with pytest.raises(UserError, match=said):
        config_from_mapping(sections, "test")


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("groups", "algorithm"),
    [
        (APART, {"mini_batches": 2, "epochs": 2, "dynamic_sampling": {}}),
        (WITH_CRITIC, {"name": "ppo"}),
        (APART, {"name": "gpg"}),
        (APART, {"name": "remax"}),
        (WITH_REFERENCE, {"kl": {"place": "loss", "coefficient": 0.1, "estimator": "full"}}),
    ],
)
def test_whole_batches_go_with_what_looks_at_them(
    groups: dict[str, Any], algorithm: dict[str, Any], staleness: int
) -> None:
    """Where the next rollout begins before the update. Control: at staleness 0 nothing of it goes."""
    sections = of(groups, algorithm) | {"rollout": {"prompts": 16, "stream": {"staleness": staleness}}}
    if not staleness:
        with pytest.raises(UserError, match=r"rollout\.stream"):
            config_from_mapping(sections, "test")
        return
    config = config_from_mapping(sections, "test")
    stream = config.rollout.stream
    assert stream is not None and stream.portions is None
    assert stream.extra == (0.25 if staleness > 1 else None)
    assert config.rollout.prompts_begun == (20 if staleness > 1 else 16)
    assert config.rollout.rounds_under_way == staleness - 1
    assert config.algorithm.correction is not None and config.algorithm.correction.weights == "token"
    assert config_from_mapping(config.model_dump(mode="json", exclude={"base"}), "test") == config

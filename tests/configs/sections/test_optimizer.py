"""An optimizer in the configuration has its own keys, filled in, and where it cannot work it is refused.

Invariant: what is recorded says all that is in force, and can be read again.
"""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from penstock.configs.loading.load import config_from_mapping
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.optimizer import OPTIMIZERS, OptimizerConfig
from penstock.configs.sections.trainer import TrainerConfig

OWN = ("betas", "eps", "momentum")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_has_its_own_keys_with_their_defaults(name: str) -> None:
    """And none of the others'; what is written down, nulls included, is read as the same."""
    config = OptimizerConfig(name=name)
    assert {key: getattr(config, key) for key in OWN if getattr(config, key) is not None} == OPTIMIZERS[name].own
    assert OptimizerConfig.model_validate(config.model_dump(mode="json")) == config


def test_without_a_name_it_is_adamw_as_ever() -> None:
    """A recipe from before there were others means the same."""
    config = OptimizerConfig.model_validate({"betas": [0.9, 0.95], "eps": 1e-8})
    assert config == OptimizerConfig()
    assert (config.name, config.betas, config.eps, config.momentum) == ("adamw", (0.9, 0.95), 1e-8, None)


@pytest.mark.parametrize(
    ("values", "wrong", "says"),
    [
        ({"momentum": 0.9}, "momentum", "'momentum' has no effect with optimizer 'adamw': remove it"),
        ({"name": "sgd", "betas": [0.9, 0.99]}, "betas", "'betas' has no effect with optimizer 'sgd'"),
        ({"name": "sgd", "eps": 1e-6}, "eps", "'eps' has no effect with optimizer 'sgd'"),
        ({"name": "adafactor", "momentum": 0.9}, "momentum", "'momentum' has no effect with optimizer 'adafactor'"),
        ({"name": "sgd", "momentum": 1.0}, "momentum", "less than 1"),
        ({"name": "sgd", "momentum": -0.1}, "momentum", "greater than or equal to 0"),
        ({"betas": [0.9, 1.0]}, "betas", "less than 1"),
        ({"name": "adam8"}, "name", "'adamw', 'sgd', 'muon', 'adamw8bit' or 'adafactor'"),
    ],
)
def test_refusals(values: dict[str, Any], wrong: str, says: str) -> None:
    """Control: without the key that is named the section is accepted."""
    with pytest.raises(ValidationError, match=says):
        OptimizerConfig.model_validate(values)
    rest = {key: value for key, value in values.items() if key != wrong}
    assert OptimizerConfig.model_validate(rest).name == rest.get("name", "adamw")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_who_needs_whole_parameters_trains_whole_weights_without_zero(name: str) -> None:
    """The refusal says why. Control: those that step number by number go with every stage and with adapters."""
    optimizer, whole = {"name": name}, name in ("muon", "adamw8bit", "adafactor")
    for section in ({"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}, {"zero_stage": 0, "lora": {}}):
        tree = {"optimizer": optimizer, **section}
        if not whole:
            assert TrainerConfig.model_validate(tree).optimizer.name == name
            continue
        with pytest.raises(
            ValidationError, match=f"'optimizer.name' {name} (needs 'zero_stage' 0|is for whole weights)"
        ):
            TrainerConfig.model_validate(tree)
    assert TrainerConfig.model_validate({"optimizer": optimizer, "zero_stage": 0}).optimizer.name == name


def test_a_critic_that_is_not_spelt_out_has_the_actors_optimizer_where_that_works() -> None:
    """Control: an optimizer that any stage trains leaves the critic its own default."""
    for name, stage in (("muon", 0), ("sgd", 1)):
        actor = {"optimizer": {"name": name}, "zero_stage": 0}
        config = config_from_mapping({"algorithm": {"name": "ppo"}, "actor": actor}, "x")
        assert isinstance(config, TrainConfig)
        assert config.critic is not None
        assert (config.critic.optimizer.name, config.critic.zero_stage) == (name, stage)

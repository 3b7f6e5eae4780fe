"""Check of the packages that have optimizers."""

from __future__ import annotations

from importlib.util import find_spec

from penstock.base.errors import UserError
from penstock.configs.schema import TrainConfig


def check_optimizers(config: TrainConfig) -> None:
    """Check that the package is installed that has an optimizer.

    Raises:
        UserError: it is not.
    """
    trained = [trainer for trainer in (config.actor, config.critic, config.sft) if trainer is not None]
    for trainer in trained if config.trains else ():
        name, package = trainer.optimizer.name, trainer.optimizer.package
        if package is not None and find_spec(package) is None:
            raise UserError(
                f"optimizer.name={name} needs the package {package}, which is not installed",
                f"pip install '{package}>=0.50', or the extra 'optimizers' of penstock, wherever ranks are",
            )

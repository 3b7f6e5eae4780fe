"""Whether what is asked to compute in FP8 can: on both sides of a training, on these devices, with this model."""

from __future__ import annotations

from penstock.checks.model.shape import shape_of
from penstock.configs.schema import TrainConfig
from penstock.engines.families.fp8 import refuse_device, refuse_model, refuse_one_sided
from penstock.engines.groups.machine import gpu_name, is_hopper, visible_gpus


def check_fp8(config: TrainConfig) -> None:
    """Check that what is asked to compute in FP8 can; of GPUs of other machines ranks say it when they start.

    Raises:
        UserError: it is asked of trainer or rollouts alone, or it is not for these devices or this model.
    """
    if not config.in_fp8:
        return
    refuse_one_sided(config)
    if not any(group.hosts for group in config.groups.values()):
        gpus = visible_gpus()
        if others := [gpu_name(gpu) for gpu in gpus if not is_hopper(gpu)] if gpus else ["CPU"]:
            refuse_device(config, others[0])
    refuse_model(config, shape_of(config))

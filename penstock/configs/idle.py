"""Settings that a training is too short for: said once at its start and in a dry run, not refused.

A recipe is shared by short and long trainings (`iterations=2` to try it), so what only a longer one would reach is no
mistake. What no length would give an effect is refused where the setting is (penstock/configs/schema.py,
penstock/configs/sections/algorithm.py).

Left out: defaults. Whoever did not give a value need not hear of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from penstock.configs.preference import PairConfig
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.trainer import SftConfig

# Keys that say how often: of iterations, the last of which is evaluated and saved anyway.
OFTEN = (("evaluate", "every"), ("checkpoint", "every"), ("record", "samples_every"))


def idle_settings(config: TrainConfig) -> list[str]:
    """Return a sentence for each given value that this training never reaches."""
    length, kl, sft = config.iterations, config.algorithm.kl, config.sft
    late = {f"{section}.{name}": _beyond(getattr(config, section), name, length) for section, name in OFTEN}
    if kl is not None:  # a copy after the last iteration would be used by nobody
        late["algorithm.kl.refresh_every"] = _beyond(kl, "refresh_every", length - 1)
    late |= {key: _steps_beyond(steps, length) for key, steps in _schedules(config) if not key.startswith("sft.")}
    late |= {
        f"algorithm.settings.{name}": _steps_beyond(value, length)
        for name, value in config.algorithm.settings.items()
        if name in config.algorithm.scheduled and isinstance(value, dict)
    }
    found = [_sentence(key, values, f"the training has {length} iterations") for key, values in late.items() if values]
    return found + (_idle_steps(sft, "sft", "warm-up") if sft is not None else [])


def idle_steps(config: TrainConfig | PairConfig) -> list[str]:
    """Return the same of a training that takes steps alone."""
    if isinstance(config, PairConfig):
        return _idle_steps(config.trainer, "trainer", "training")
    return _idle_steps(config.sft, "sft", "training") if config.sft is not None else []


def _idle_steps(section: SftConfig, name: str, what: str) -> list[str]:
    late = {f"{name}.checkpoint_every": _beyond(section, "checkpoint_every", section.steps)}
    late |= {key: _steps_beyond(steps, section.steps - 1) for key, steps in _schedules(section, f"{name}.")}
    return [_sentence(key, values, f"the {what} has {section.steps} steps") for key, values in late.items() if values]


def _beyond(section: BaseModel, name: str, last: int) -> str:
    """Return a given number as text if it lies beyond the last iteration or step."""
    value = getattr(section, name)
    return str(value) if name in section.model_fields_set and value is not None and value > last else ""


def _steps_beyond(schedule: dict[int, float], last: int) -> str:
    """Return those steps of a schedule that lie beyond it."""
    return ", ".join(f"{step}: {value}" for step, value in schedule.items() if step > last)


def _sentence(key: str, values: str, length: str) -> str:
    return f"'{key}' ({values}) has no effect: {length}"


def _schedules(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, dict[int, float]]]:
    """Yield every given schedule below a section, with its key."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if name not in section.model_fields_set:
            continue
        if isinstance(value, BaseModel):
            yield from _schedules(value, f"{prefix}{name}.")
        elif isinstance(value, dict) and value and all(isinstance(key, int) for key in value):
            yield f"{prefix}{name}", value

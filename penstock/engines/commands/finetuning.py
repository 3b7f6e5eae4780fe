"""Commands of offline training: on responses to imitate, on preferences, on scores.

`batches` are rows of the file, int64, steps x rows (of preferences: steps x units); `budget` is the tokens of a
micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from penstock.engines.commands.build import Kernels
from penstock.engines.commands.message import Command


@dataclass(frozen=True)
class ModelToTrain:
    """A model to train offline; `trainer` is a `SftConfig` as plain data, `seed` that of new adapters."""

    folder: str
    dtype: str
    trainer: dict[str, Any]
    seed: int
    keep_logits: bool = False  # of a micro-batch, for the backward pass
    code: dict[str, str] | None = None  # that the folder is trusted to bring
    attention: str = "auto"
    train_encoder: bool = False  # of images, too

    @property
    def of_model(self) -> dict[str, Any]:
        """What of the configuration's section `model` is in it, as plain data."""
        return {
            "path": self.folder,
            "dtype": self.dtype,
            "trust_remote_code": self.code is not None,
            "code": self.code,
            "attention": self.attention,
            "train_encoder": self.train_encoder,
        }


@dataclass(frozen=True)
class SftBegin(Command[None]):
    """Load the model, and the file `rows`, for supervised training; `images`: folder of those that rows name."""

    changes_state: ClassVar[bool] = True
    model: ModelToTrain
    rows: str
    images: str | None = None


@dataclass(frozen=True)
class Step:
    """The figures of an optimizer step: loss, tokens and tokens per second, whether it was skipped, and its own."""

    figures: dict[str, float]


@dataclass(frozen=True)
class Stepped:
    """The figures of each optimizer step of a command."""

    steps: list[dict[str, float]]


@dataclass(frozen=True)
class SftSteps(Command[Stepped]):
    """Take one optimizer step per row of `batches`; the first rank tells of each."""

    changes_state: ClassVar[bool] = True
    news: ClassVar[type] = Step
    batches: np.ndarray
    budget: int
    learning_rate: float


@dataclass(frozen=True)
class SftEnd(Command[None]):
    """Write the model as a Hugging Face folder and free it."""

    changes_state: ClassVar[bool] = True
    folder: str


@dataclass(frozen=True)
class PreferenceLoss:
    """A preference loss by its name, or "bradley_terry", with its settings."""

    name: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class PreferenceBegin(Command[Kernels]):
    """Load the policy to train on preferences, or with `scores` a reward model made of it."""

    changes_state: ClassVar[bool] = True
    model: ModelToTrain
    scores: bool


@dataclass(frozen=True)
class PreferenceSteps(Command[Stepped]):
    """Take one optimizer step per row of `batches` on the preferences at `path`; the first rank tells of each."""

    changes_state: ClassVar[bool] = True
    news: ClassVar[type] = Step
    path: str
    batches: np.ndarray
    budget: int
    loss: PreferenceLoss
    learning_rate: float


@dataclass(frozen=True)
class PreferenceMeasured:
    """The figures of an optimizer step, over all units of a file."""

    metrics: dict[str, float]


@dataclass(frozen=True)
class PreferenceMeasure(Command[PreferenceMeasured]):
    """Measure the preferences at `path`, without a step."""

    path: str
    budget: int
    loss: PreferenceLoss


@dataclass(frozen=True)
class PreferenceEnd(Command[None]):
    """Write the model as a Hugging Face folder and free it."""

    changes_state: ClassVar[bool] = True
    folder: str

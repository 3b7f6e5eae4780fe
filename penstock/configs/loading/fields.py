"""The fields of Prefect's form, as types of the parameters of flows that train: title, meaning and limits of each.

A field stands for one key of the configuration and stays empty where the recipe shall decide. Its limits are the
key's, so that a server refuses a wrong value before there is a run.

Left out: which key a field stands for (parameters.py, and flows/train.py for that flow's), what is made of them
(form.py), the page (blank.py).
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import Field, SkipValidation

from penstock.configs.schema import TrainConfig
from penstock.configs.tree.section import PositiveInt, Recipe

Tree = TypeVar("Tree", bound=Recipe)

KEY_AND_VALUE = ".+=.+"  # a page shows it to who gave something else
NAME = TrainConfig.model_json_schema()["properties"]["name"]["pattern"]


def shown(title: str, description: str) -> Any:
    """Return what a form says of a parameter. Prefect overwrites pydantic's own title with the parameter's name."""
    return Field(json_schema_extra={"title": title, "description": description})


Text = Annotated[str, Field(min_length=1)]
KeysAndValues = list[Annotated[str, Field(pattern=KEY_AND_VALUE)]]

RecipeFile = Annotated[
    Text | None, shown("Recipe", "What to train, and how. A field below that stays empty leaves what the recipe says.")
]
Name = Annotated[Annotated[str, Field(pattern=NAME)] | None, shown("Name", "The run's folder begins with it. `name`")]
Model = Annotated[
    Text | None, shown("Model", "A Hugging Face folder on the machine that trains, or a model of the Hub. `model.path`")
]
Data = Annotated[
    Text | None, shown("Training data", "A JSONL or Parquet file on the machine that trains. `data.train`")
]
FirstModel = Annotated[
    Text | None,
    shown("First model", "A Hugging Face folder to start from while the registered model has no version. `model.path`"),
]
NewestData = Annotated[
    Text,
    shown(
        "Training data",
        "A pattern such as data/sums-*.jsonl, of which the file that was written last is taken, or dataset:NAME, the "
        "newest dataset of that name in MLflow.",
    ),
]
RegisteredModel = Annotated[
    Text, shown("Registered model", "Whose newest version is trained on. `record.registered_model`")
]
Iterations = Annotated[PositiveInt | None, shown("Iterations", "Rounds of reinforcement learning. `iterations`")]
Steps = Annotated[PositiveInt | None, shown("Steps", "Of the optimizer. `sft.steps` or `trainer.steps`")]
Batch = Annotated[PositiveInt | None, shown("Batch", "Rows of one optimizer step. `sft.batch` or `trainer.batch`")]
LearningRate = Annotated[
    Annotated[float, Field(ge=0)] | None,
    shown("Learning rate", "Its peak, such as 1e-6. `optimizer.learning_rate` of what is trained"),
]
Prompts = Annotated[PositiveInt | None, shown("Prompts", "In each iteration. `rollout.prompts`")]
Samples = Annotated[PositiveInt | None, shown("Samples", "Responses to each of these prompts. `rollout.samples`")]
Seed = Annotated[Annotated[int, Field(ge=0)] | None, shown("Seed", "Everything random follows from it. `seed`")]
Overrides = Annotated[
    KeysAndValues | None,
    shown(
        "Other settings", "Any other key as on the command line: `section.key=value`, such as `rollout.temperature=0.9`"
    ),
]
RunFolder = Annotated[
    Text | None,
    shown("Run folder", "Where a new run is put. Empty: a new folder in `runs`, or in what the recipe says. `folder`"),
]
ResumedRun = Annotated[
    Text | None,
    shown(
        "Run to continue",
        "The folder of an earlier run. It has its own configuration, so leave what is above as it was.",
    ),
]
Checkpoint = Annotated[
    Text | None,
    shown(
        "Checkpoint to continue from",
        "Such as `000010`; what came after it is taken back. Empty: the run's newest checkpoint",
    ),
]
Changes = Annotated[
    KeysAndValues | None,
    shown("Changes of the run to continue", "Such as `iterations=200`; docs/recipes.md lists what may change"),
]
ChainFile = Annotated[Text | None, shown("Chain", "A recipe with `stages`. Empty: with a chain to continue.")]
StageOverrides = Annotated[
    KeysAndValues | None,
    shown("Settings of stages", "As on the command line: `STAGE.section.key=value`, such as `learn.iterations=50`"),
]
ResumedChain = Annotated[
    Text | None,
    shown("Chain to continue", "The folder of an earlier chain. It goes on as it was asked for."),
]
# A part of a tree is valid together with its recipe alone, so Prefect is to leave it as it is.
Advanced = Annotated[
    Tree | None,
    SkipValidation(),
    shown(
        "Advanced: every key",
        "The whole configuration. What stays empty is the recipe's; a key with a field above is given in one place.",
    ),
]

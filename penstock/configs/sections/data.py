"""Section of the data: files, columns, prompts, the agents of a game, and problems made by the project itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from penstock.configs.sections.prompt_selection import SamplerConfig
from penstock.configs.tree.section import PositiveInt, Section, Share

AgentName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]  # part of a checkpoint's path


class AgentsConfig(Section):
    """Agents that share the policy and learn their values apart."""

    column: str = Field(min_length=1, description="data column that names the agent of a row")
    names: list[AgentName] = Field(min_length=1, description="the column's values, one agent each; numbers as text")

    @model_validator(mode="after")
    def _once(self) -> Self:
        once("names", self.names)
        return self


def once(key: str, names: Sequence[str]) -> None:
    """Check that no name is there twice.

    Raises:
        ValueError: one is.
    """
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"'{key}' has '{twice[0]}' twice: remove one")


def check_agents(agents: AgentsConfig | None, of_game: Sequence[str], needed: bool, algorithm: str) -> None:
    """Check that rows have agents exactly where the algorithm tells them apart, and a game has not.

    Args:
        of_game: those of `environment.agents`.

    Raises:
        ValueError: they are missing, or have no effect.
    """
    if agents is not None and of_game:
        raise ValueError("'data.agents' and 'environment.agents' exclude each other: a row is a game of all of them")
    if needed and agents is None and not of_game:
        raise ValueError(
            f"algorithm '{algorithm}' needs 'data.agents', the data column that names a row's agent, or a game with "
            "'environment.agents'"
        )
    if agents is not None and not needed:
        raise ValueError(f"'data.agents' has no effect with algorithm '{algorithm}', which has one critic or none")


class ArithmeticData(Section):
    """Addition problems `12+34=` with the answer `046.`, made from the seed: no file is needed."""

    digits: int = Field(2, ge=1, le=4, description="digits of each summand")
    sft: PositiveInt = Field(4000, description="problems for the supervised warm-up")
    mistakes: Share = Field(0.0, description="share of the warm-up's answers with one wrong digit: a careless teacher")
    forgotten_carries: Share = Field(
        0.0, description="share of the warm-up's answers that are added digit by digit, without any carry"
    )
    calls: Share = Field(
        0.0, description="share of the warm-up's answers before which the teacher asks penstock.environments.calculator"
    )
    checked: bool = Field(
        False,
        description="the warm-up's teachers play penstock.environments.games.checked_sums, each problem two rows: the "
        "solver's and the checker's; 'mistakes' is then the share of wrong turns",
    )
    train: PositiveInt = Field(4000, description="problems for reinforcement learning")
    heldout: PositiveInt = Field(1000, description="problems kept apart for evaluation")

    @model_validator(mode="after")
    def _teacher(self) -> Self:
        given = [name for name in ("calls", "mistakes", "forgotten_carries") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"'{given[0]}' and '{given[1]}' are different teachers: remove one")
        if self.checked and (others := [name for name in given if name != "mistakes"]):
            raise ValueError(f"'checked' and '{others[0]}' are different teachers: remove one")
        return self


class SquaresData(Section):
    """Pictures of 1 to 4 squares, of which a model that sees says how many, made from the seed: no file is needed."""

    sft: PositiveInt = Field(2000, description="pictures for the supervised warm-up")
    mistakes: Share = Field(0.0, description="share of the warm-up's answers with another count: a careless teacher")
    train: PositiveInt = Field(2000, description="pictures for reinforcement learning")
    heldout: PositiveInt = Field(500, description="pictures kept apart for evaluation")


def check_chat_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of a chat template that are not the user's to choose.

    Raises:
        ValueError: one is.
    """
    for name in ("conversation", "tokenize", "add_generation_prompt"):
        if name in arguments:
            raise ValueError(f"'chat_arguments' has '{name}', which is set for every prompt: remove it")


class DataConfig(Section):
    """Where prompts come from and how a row becomes one."""

    train: str | None = Field(None, description="JSONL or Parquet file of training prompts")
    heldout: str | None = Field(None, description="JSONL or Parquet file of held-out prompts, for evaluation only")
    sft: str | None = Field(
        None, description="JSONL or Parquet file of prompts and responses for the supervised warm-up"
    )
    arithmetic: ArithmeticData | None = Field(None, description="make addition problems instead of reading files")
    squares: SquaresData | None = Field(None, description="make pictures to count squares in instead of reading files")
    images: str | None = Field(
        None,
        description="column with the images of a prompt: a list of paths, relative to the data file, or of files in "
        "base64; for a model that sees",
    )
    prompt: str = Field("prompt", description="column with the prompt: text, or a list of {role, content} messages")
    response: str | None = Field(None, description="column with the response to imitate (supervised warm-up only)")
    agents: AgentsConfig | None = Field(None, description="which agent a row is for (ippo)")
    chat: bool = Field(False, description="wrap a text prompt as one user message in the tokenizer's chat template")
    template: str | None = Field(None, description="text around a text prompt, with {prompt} where the column goes")
    chat_arguments: dict[str, Any] = Field(
        default_factory=dict,
        description="keyword arguments of the chat template, e.g. {enable_thinking: false} for Qwen3; in training and "
        "evaluation alike",
    )
    max_prompt_tokens: PositiveInt = Field(512, description="of a prompt, with what its template adds")
    too_long: Literal["drop", "left", "middle", "right"] = Field(
        "drop",
        description="what becomes of a longer prompt; left, middle, right: where tokens are cut out of it; both are "
        "counted",
    )
    sampler: SamplerConfig = Field(default_factory=SamplerConfig, description="which prompts an iteration takes")

    @model_validator(mode="after")
    def _sources(self) -> Self:
        if self.arithmetic is not None and (self.train or self.heldout or self.sft):
            raise ValueError(
                "'arithmetic' makes its own problems: remove 'train', 'heldout' and 'sft', or it (data.arithmetic=null)"
            )
        if self.arithmetic is not None and (self.prompt != "prompt" or self.response not in (None, "response")):
            raise ValueError("'arithmetic' has columns of its own names: remove 'prompt' and 'response'")
        if self.squares is not None:
            self._pictures()
        if self.image_column is not None and self.too_long != "drop":
            raise ValueError("'too_long' would cut images apart: remove it, longer prompts with images are dropped")
        if self.template is not None and "{prompt}" not in self.template:
            raise ValueError("'template' must contain {prompt}, the place where the prompt column goes")
        check_chat_arguments(self.chat_arguments)
        return self

    def _pictures(self) -> None:
        given = [
            name for name in ("train", "heldout", "sft", "arithmetic", "images", "template") if getattr(self, name)
        ]
        given += [name for name, usual in (("prompt", "prompt"), ("response", None)) if getattr(self, name) != usual]
        if given:
            raise ValueError(f"'squares' makes its own rows: remove '{given[0]}'")

    @property
    def image_column(self) -> str | None:
        """The column with the images of a prompt; None: there are none."""
        return "images" if self.squares is not None else self.images

    @property
    def made_up(self) -> str | None:
        """The section of the rows that are made from the seed, if they are: no file is read then."""
        return next((name for name in ("arithmetic", "squares") if getattr(self, name) is not None), None)

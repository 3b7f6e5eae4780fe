"""What a signature and a docstring say of a setting, and what is said where they say too little."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt

from penstock.algorithms import registry
from penstock.algorithms.declarations.settings import REQUIRED, Setting, arguments, note, settings, summary
from penstock.algorithms.registry import settings_of
from penstock.base.errors import UserError

if TYPE_CHECKING:
    from penstock.algorithms.advantages.types import AdvantageInputs as Inputs
    from penstock.algorithms.declarations.algorithm import Algorithm as Unseen


def sharpened(
    inputs: Inputs,
    *,
    sharpness: Annotated[float, Ge(0)] = 2.0,
    kind: Literal["soft", "hard"],
    weights: Mapping[str, float] | None = None,
    anything=3,  # type: ignore[no-untyped-def]
) -> Any:
    """A = R,
    and no more.

    Another paragraph.

    Args:
        inputs: a batch.
        sharpness: how sharp it is; a line may
            go on.
        kind: soft or hard.

    Note:
        It is invented.

    Raises:
        ValueError: never.
    """


def test_a_setting_is_its_parameter() -> None:
    """The inputs are none, and their type may be for type checkers alone."""
    assert list(settings(sharpened).values()) == [
        Setting("sharpness", Annotated[float, Ge(0)], 2.0, "how sharp it is; a line may go on."),
        Setting("kind", Literal["soft", "hard"], REQUIRED, "soft or hard."),
        Setting("weights", Mapping[str, float] | None, None, ""),
        Setting("anything", Any, 3, ""),
    ]
    assert (summary(sharpened), note(sharpened)) == ("A = R, and no more.", "It is invented.")
    given = {"kind": "soft", "sharpness": 1.0, "weights": None, "anything": 0, "clip_low": 0.1}
    assert arguments(sharpened, given) == {name: given[name] for name in settings(sharpened)}


def test_a_function_without_a_docstring_has_no_text() -> None:
    def silent(inputs: Any, *, scale: float = 1.0) -> None: ...

    assert (summary(silent), note(silent), settings(silent)["scale"].description) == ("", "", "")


def test_a_type_that_is_not_there_when_the_program_runs_is_named() -> None:
    def unseen(inputs: Any, *, other: Unseen | None = None) -> None: ...

    with pytest.raises(UserError, match="test_settings.*unseen does not evaluate.*'Unseen'") as caught:
        settings(unseen)
    assert "TYPE_CHECKING" in caught.value.remedy


def replaced(monkeypatch: pytest.MonkeyPatch, estimator: Callable[..., Any]) -> None:
    monkeypatch.setitem(registry.ADVANTAGES, "grpo", estimator)


def test_one_name_of_two_types_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimator and loss, and a loss and its choice. Control: a name that is in one of them alone."""

    def estimator(inputs: Any, *, clip_low: Annotated[float, Gt(0)] = 0.2) -> None: ...

    replaced(monkeypatch, estimator)
    with pytest.raises(UserError, match="'clip_low' is a setting of advantage 'grpo' .*Gt.* and of policy loss 'ppo_c"):
        settings_of("grpo", "ppo_clip")
    assert list(settings_of("grpo", "sapo")) == ["clip_low", "gate_positive", "gate_negative"]

    def choose(advantages_C: Any, old_logprobs_C: Any, *, gate_positive: int = 1) -> None: ...

    monkeypatch.setitem(registry.CHOICES, "sapo", choose)
    with pytest.raises(UserError, match="of policy loss 'sapo' .* and of the choice of policy loss 'sapo'") as caught:
        settings_of("gae", "sapo")
    assert "'loss_gate_positive'" in caught.value.remedy


def test_one_name_of_one_type_is_one_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal defaults their default; with different ones none. Both functions are given the one value."""

    def alike(inputs: Any, *, clip_low: Annotated[float, Ge(0)] = 0.2) -> None: ...

    def other(inputs: Any, *, clip_low: Annotated[float, Ge(0)] = 0.7) -> None: ...

    for estimator, default in ((alike, 0.2), (other, REQUIRED)):
        replaced(monkeypatch, estimator)
        assert settings_of("grpo", "ppo_clip")["clip_low"].default == default

"""The page of a deployment: what it would send untouched, which values the server takes, what is shown first."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import ValidationError, validate

from penstock.configs.loading.blank import CLOSED, OPEN, blank, plain
from penstock.configs.schema import TrainConfig
from penstock.flows.compare import compare
from penstock.flows.evaluate import evaluate
from penstock.flows.export import export
from penstock.flows.preference import preference
from penstock.flows.reward_model import reward_model
from penstock.flows.sft import sft
from penstock.flows.sweep import sweep
from penstock.flows.train import train

RECIPES = ["configs/quickstart.yaml", "configs/grpo_gsm8k.yaml"]
KEYS = {  # of fields with limits
    "name": "name",
    "iterations": "iterations",
    "learning_rate": "actor.optimizer.learning_rate",
    "prompts": "rollout.prompts",
    "samples": "rollout.samples",
    "seed": "seed",
}
ALLOWED: list[dict[str, Any]] = [
    {},
    {"iterations": 3, "learning_rate": 1e-6, "overrides": ["rollout.temperature=0.9"], "seed": 0},
    {"iterations": None, "name": None, "overrides": None, "config": None},
    {"config": {"environment": {"max_turns": 2}, "sft": None, "data": {"chat": True, "chat_arguments": {"x": 1}}}},
    {"config": {"algorithm": {"settings": {"gamma": 0.9}, "kl": None}, "groups": {"main": {"gpus": [0]}}}},
    {"config": {"rollout": {"temperature": {"0": 1.0}, "stream": {"portions": None}}}},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"iterations": 0}, "0 is less than the minimum of 1"),
    ({"learning_rate": -1.0}, "-1.0 is less than the minimum of 0"),
    ({"name": "a/b"}, "does not match"),
    ({"recipe": "configs/dpo.yaml"}, "'configs/dpo.yaml' is not one of"),
    ({"overrides": ["nonsense"]}, "'nonsense' does not match '.+=.+'"),
    ({"config": {"iterations": 0}}, "0 is less than the minimum of 1"),
    ({"config": {"iteratoins": 2}}, "'iteratoins' was unexpected"),
    ({"config": {"algorithm": {"name": "grop"}}}, "'grop' is not one of"),
    ({"config": {"base": "configs/dpo.yaml"}}, "'base' was unexpected"),
]


def form_of(flow: Any) -> dict[str, Any]:
    """Return a flow's form, one that nobody has changed: Prefect needs longer to make a schema than to use it."""
    return deepcopy(_form_of(flow))


@functools.cache
def _form_of(flow: Any) -> dict[str, Any]:
    return blank(parameter_schema(flow).model_dump(), {"recipe": RECIPES})


def fields(item: Any, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield everything that a page may show, the options of a choice included."""
    for key, value in {**item.get("properties", {}), **item.get("definitions", {})}.items():
        yield from fields(value, f"{name}.{key}")
    for place, option in enumerate(item.get("anyOf", [])):
        yield from fields(option, f"{name}[{place}]")
    yield name, item


def sends(item: dict[str, Any]) -> bool:
    """Whether Prefect's page sends a value of an untouched field."""
    typed = "$ref" in item or "anyOf" in item or "enum" in item or "type" in item
    unnamed = item.get("type") == "object" and "properties" not in item
    return "default" in item or item.get("type") == "boolean" or not typed or unnamed


@pytest.mark.parametrize("flow", [train, sft, preference, reward_model])
def test_an_untouched_form_sends_nothing(flow: Any) -> None:
    """Of no field at any depth. Control: of the schema as Prefect makes it many do."""
    assert [name for name, item in fields(form_of(flow)) if sends(item)] == []
    assert len([name for name, item in fields(parameter_schema(flow).model_dump()) if sends(item)]) > 50


@pytest.mark.parametrize("flow", [train, sft, preference, reward_model])
def test_plain_fields_come_first_and_the_tree_last_and_closed(flow: Any) -> None:
    """Each with a title and a description; a field is one input, without a choice of types."""
    shown = sorted(form_of(flow)["properties"].items(), key=lambda entry: entry[1]["position"])
    names = [name for name, _ in shown]
    assert names[:4] == ["recipe", "name", "model", "data"]
    assert names[-1] == "config"
    assert all(item["title"] != name and item["description"] for name, item in shown)
    assert all("type" in item for name, item in shown if name != "config")
    assert [option.get("title") for option in shown[-1][1]["anyOf"]] == [CLOSED, None]
    tree = shown[-1][1]["anyOf"][1]["$ref"].rpartition("/")[2]
    assert form_of(flow)["definitions"][tree]["title"] == OPEN


def test_limits_of_a_field_are_those_of_its_key() -> None:
    """So that what the page takes the configuration takes. Control: there are limits."""
    form = form_of(train)
    for name, key in KEYS.items():
        item: dict[str, Any] = TrainConfig.model_json_schema()
        definitions = item["$defs"]
        for part in key.split("."):
            item = item["properties"][part]
            item = definitions[item["$ref"].rpartition("/")[2]] if "$ref" in item else item
        item = next((option for option in item.get("anyOf", []) if option["type"] == "number"), item)
        field = form["properties"][name]
        for limit in ("minimum", "exclusiveMinimum", "maximum", "pattern", "type"):
            if name != "learning_rate" or limit == "type":  # its key's limits are a function's
                assert field.get(limit) == item.get(limit), (name, limit)
    assert form["properties"]["iterations"]["minimum"] == 1


@pytest.mark.parametrize("given", ALLOWED)
def test_the_server_takes_what_a_form_may_say(given: dict[str, Any]) -> None:
    """Also nulls, parts of sections, and sections that are free."""
    validate({"recipe": RECIPES[0], **given}, form_of(train), raise_on_error=True)


@pytest.mark.parametrize(("given", "words"), REFUSED)
def test_the_server_refuses_wrong_values_in_words(given: dict[str, Any], words: str) -> None:
    """Before there is a run. Control: the values above."""
    with pytest.raises(Exception, match=words):
        validate({"recipe": RECIPES[0], **given}, form_of(train), raise_on_error=True)


@pytest.mark.parametrize("flow", [compare, evaluate, export, sweep])
def test_what_does_not_train_by_a_form_has_one_field_for_each_parameter(flow: Any) -> None:
    """No choice between a type and "None", a title in words, and defaults as in the flow's signature.

    Control: in Prefect's own schema of these flows there are such choices, and titles with underscores.
    """
    made = parameter_schema(flow).model_dump()
    assert any("anyOf" in item for item in made["properties"].values())
    form = plain(made)
    assert form["required"] == made["required"]
    for name, item in form["properties"].items():
        assert "anyOf" not in item and "_" not in item["title"] and item["title"][0].isupper()
        assert item["description"][0] in (made["properties"][name]["description"][0].upper(), "`")
        assert item.get("default") == made["properties"][name].get("default")


def test_the_server_takes_a_plain_form_with_and_without_its_fields() -> None:
    """Empty fields and null are what the flow's defaults are; a missing run and a wrong type are refused."""
    schema = plain(parameter_schema(export).model_dump())
    taken: list[dict[str, Any]] = [{"run": "runs/sums"}, {"run": "runs/sums", "checkpoint": None, "to": "model"}]
    refused: list[dict[str, Any]] = [{}, {"run": "runs/sums", "to": 3}]
    for given in taken:
        validate(given, schema, raise_on_error=True, ignore_required=False)
    for given in refused:
        with pytest.raises(ValidationError):
            validate(given, schema, raise_on_error=True, ignore_required=False)

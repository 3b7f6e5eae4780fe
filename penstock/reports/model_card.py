"""The model card of an exported model: README.md with front matter, from plain facts.

Left out: what a person must say about a model (intended use, limits, licence of the base model).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.reports.evaluation import TEMPERATURE
from penstock.reports.headline import headlines


@dataclass(frozen=True)
class ModelFacts:
    """What the card says. `figures` has the keys of `summary.json` that penstock/reports/headline.py knows."""

    name: str
    base_model: str
    algorithm: str
    seed: int
    figures: Mapping[str, Any]
    check: str
    versions: Mapping[str, str]
    commit: str | None
    links: Mapping[str, str]
    own_code: bool = False  # only code of its own loads it


def figures_until(records: Sequence[Mapping[str, Any]], iteration: int) -> dict[str, Any]:
    """Return the figures of a model made by `iteration` iterations, from the lines of `metrics.jsonl`."""
    until = [record for record in records if record["iteration"] <= iteration]
    accuracies = {
        item["iteration"]: item["metrics"]["heldout/accuracy"]
        for item in until
        if "heldout/accuracy" in item["metrics"]
    }
    rewards = [item["metrics"]["reward/mean"] for item in until if "reward/mean" in item["metrics"]]
    temperatures = [item["metrics"][TEMPERATURE] for item in until if TEMPERATURE in item["metrics"]]
    later = [value for number, value in accuracies.items() if number > 0]
    return {
        "iterations": iteration,
        "accuracy_before": accuracies.get(0),
        "accuracy_after": later[-1] if later else None,
        "heldout_temperature": temperatures[-1] if temperatures else None,
        "reward_first": rewards[0] if rewards else None,
        "reward_last": rewards[-1] if rewards else None,
    }


def model_card(facts: ModelFacts) -> str:
    """Return the card as Markdown with YAML front matter."""
    import yaml

    front = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["penstock", "reinforcement-learning", facts.algorithm],
    }
    rows = [("Base model", facts.base_model), ("Algorithm", facts.algorithm), ("Seed", str(facts.seed))]
    rows += [(line.label, f"{line.value} {line.note}".strip()) for line in headlines(facts.figures)]
    rows += [("Weights", facts.check)]
    versions = [f"{name} {version}" for name, version in facts.versions.items()]
    exported = ", ".join([*versions, *([f"Penstock at commit {facts.commit}"] if facts.commit else [])])
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {facts.name}",
        "A language model trained with reinforcement learning by Penstock.",
        _table(rows),
        f"Exported with: {exported}.",
        "## Use",
        *_use(facts.own_code),
        "## Origin",
        "\n".join(f"- {label}: `{address}`" for label, address in facts.links.items()),
    ]
    return "\n\n".join(parts) + "\n"


def _use(own_code: bool) -> list[str]:
    trust = ", trust_remote_code=True" if own_code else ""
    loading = (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'lm = AutoModelForCausalLM.from_pretrained("FOLDER", dtype="auto"{trust})\n'
        f'tokenizer = AutoTokenizer.from_pretrained("FOLDER"{trust})\n```'
    )
    if own_code:
        return [loading, "Its classes are in the Python files beside the weights: read them before."]
    return [loading, "`penstock serve FOLDER` answers requests in the form of OpenAI's API."]


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cells = [(label, value.replace("|", "\\|")) for label, value in rows]
    return "\n".join(["| | |", "| --- | --- |", *(f"| {label} | {value} |" for label, value in cells)])

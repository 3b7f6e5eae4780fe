"""What a model's folder says about whether it can be trained, and by what it is served: before anything starts.

From its configuration and the headers of its weights; no torch. That vLLM and the trainer compute the same is measured
(`penstock bench families FOLDER`), and compared again by every training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.base.errors import UserError
from penstock.base.model_code import Code
from penstock.checks.model.attention import refuse_head_size
from penstock.checks.model.folder import check_model_folder
from penstock.doctor.diagnosis import Diagnosis
from penstock.engines.families.logits import logit_rule
from penstock.engines.families.longest_row import longest_row
from penstock.engines.families.served import check_served, has_own_class
from penstock.engines.families.shape import ModelShape, read_settings, read_shape, weight_shapes
from penstock.engines.families.table import family_of


def examine_model(path: str | Path, code: Code | None = None) -> list[Diagnosis]:
    """Return what is to be said of the model in a folder, as an actor; `code` is that it is trusted to bring."""
    folder = Path(path)
    try:
        check_model_folder(folder, "model", code=code)
    except UserError as error:
        return [Diagnosis("model", "problem", error.problem, error.remedy)]
    settings = read_settings(folder)
    shape = read_shape(folder)
    return [_size(settings, shape), *_training(settings), *_rollout(folder, settings, shape)]


def _size(settings: Mapping[str, Any], shape: ModelShape) -> Diagnosis:
    kind = ", ".join(settings.get("architectures") or ()) or "a model of no architecture"
    text = f"{kind} ({settings.get('model_type', 'no model_type')}): {shape.parameters:,} parameters"
    return Diagnosis("model", "ok", f"{text}, {shape.layers} layers")


def _training(settings: Mapping[str, Any]) -> Iterator[Diagnosis]:
    rule, family = logit_rule(settings), family_of(settings.get("model_type", ""))
    done = ["packed rows, as the Transformers library computes each alone"]
    done += [f"logits capped at {rule.cap:g}"] if rule.cap is not None else []
    done += [f"logits times {rule.factor:g}"] if rule.factor != 1 else []
    done += ["images"] if family.encoder else []
    done += ["states from token to token, row by row"] if family.mixers else []
    if any(settings.get(name) for name in family.expert_settings):
        done += [f"LoRA on experts: {'yes' if family.experts else 'no'}"]
    done += ["attention's scores capped"] if any(settings.get(name) for name in family.score_caps) else []
    yield Diagnosis("training", "ok", "; ".join(done))
    if (longest := longest_row(settings)) is not None:
        yield Diagnosis(
            "training",
            "warning",
            f"prompt and response may have {longest.tokens} tokens together: beyond, {longest.beyond}",
            "keep data.max_prompt_tokens and rollout.max_response_tokens below",
        )


def _rollout(folder: Path, settings: Mapping[str, Any], shape: ModelShape) -> Iterator[Diagnosis]:
    try:
        check_served(settings, weight_shapes(folder), "the model")
        refuse_head_size(shape)
    except UserError as error:
        yield Diagnosis("rollout", "problem", error.problem, error.remedy)
        return
    by = (
        "by a class of vLLM's own"
        if has_own_class(settings)
        else "as vLLM builds it from the Transformers library's class"
    )
    yield Diagnosis("rollout", "ok", f"served {by}; a reshard compares every weight")

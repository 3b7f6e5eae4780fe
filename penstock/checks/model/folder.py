"""Checks of a model folder: its files, its family and its weights are what packed training runs rightly."""

from __future__ import annotations

from pathlib import Path

from penstock.base.errors import UserError
from penstock.base.files import no_folder
from penstock.base.model_code import Code
from penstock.checks.model.own_code import check_own_class, check_own_code
from penstock.checks.model.states import check_scan
from penstock.engines.families.architecture import check_architecture, classifies
from penstock.engines.families.shape import read_settings, read_shape, weight_shapes
from penstock.engines.families.table import family_of
from penstock.engines.groups.machine import visible_gpus


def check_model_folder(folder: Path, key: str, scores: bool = False, code: Code | None = None) -> None:
    """Check that `folder` looks like a Hugging Face model folder, of a model that packed training runs rightly.

    `scores`: it is, or becomes, a reward model, which has no language head. `code`: of models, that is trusted.

    Raises:
        UserError: it does not exist, a file is missing or damaged, or see `penstock.engines.families.architecture`.
    """
    if not folder.is_dir():
        raise UserError(f"{key}: {no_folder(folder)}", f"set {key} to a Hugging Face model folder on this machine")
    if not (folder / "config.json").is_file():
        raise UserError(f"{key}: {folder} has no config.json", "name the folder that holds config.json itself")
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{key}: {folder} has no *.safetensors weights", "save the model with save_pretrained()")
    if not any(folder.glob("tokenizer*")):
        raise UserError(
            f"{key}: {folder} has no tokenizer", "save the tokenizer beside the model with save_pretrained()"
        )
    try:
        read_shape(folder)
    except KeyError as error:
        raise UserError(
            f"{key}: {folder / 'config.json'} has no {error}", "name the folder of a decoder-only language model"
        ) from None
    except ValueError as error:
        raise UserError(
            f"{key}: {folder} is damaged: {error}", "copy it anew; in a Git clone, 'git lfs pull'"
        ) from None
    check_own_code(folder, key, code)
    check_own_class(folder, key, scores)
    settings = read_settings(folder)
    check_architecture(settings, weight_shapes(folder), f"{key}: {folder}", head=not scores)
    if visible_gpus():
        check_scan(f"{key}: {folder}", family_of(settings.get("model_type", "")))


def check_one_label(folder: Path, key: str) -> None:
    """Check that a model folder, if it is a classifier, has one label: a score.

    Raises:
        UserError: it has several.
    """
    settings = read_settings(folder)
    labels = len(settings.get("id2label", "01"))  # a configuration without labels has two
    if labels != 1 and classifies(settings):
        raise UserError(
            f"{key}: {folder} is a classifier with {labels} labels; a reward model has one, the score",
            "start from a language model, or from a reward model",
        )

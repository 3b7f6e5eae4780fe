"""Checks of the code that a model folder brings: it is loaded only where `model.trust_remote_code` says so.

Left out: what such a model has to be beside (folder.py), and reading the code, which is the user's part.
"""

from __future__ import annotations

import json
from pathlib import Path

from penstock.base.errors import UserError
from penstock.base.model_code import Code, check_covered, code_of, own_classes, trusted
from penstock.configs.sections.model import ModelConfig
from penstock.engines.families.known import knows_model, knows_tokenizer
from penstock.engines.families.served import has_own_class, unserved
from penstock.engines.families.shape import read_settings
from penstock.usercode.trusted_models import check_listed

KEY = "model.trust_remote_code"


def check_own_code(folder: Path, key: str, code: Code | None, remedy: str | None = None) -> None:
    """Check that a folder loads: by the library's classes, or by code of its own that is trusted.

    Args:
        key: what the message calls the folder.
        code: that is trusted.
        remedy: in place of the usual one, where nothing is ever trusted.

    Raises:
        UserError: only code of its own loads it, and that is not trusted.
    """
    if trusted(folder, code):
        return
    classes = own_classes(folder)
    model = bool(classes) and not knows_model(read_settings(folder))
    if not model and knows_tokenizer(folder, classes):
        return
    what = f"a model of the type '{read_settings(folder).get('model_type')}'" if model else "its tokenizer"
    raise UserError(
        f"{key}: {folder} holds {what}, which the Transformers library has no class for; its own code "
        f"({', '.join(code_of(folder)) or 'which is not in the folder'}) is not loaded",
        remedy or f"read that code; if you trust it, {KEY}=true loads it, with your rights and in no sandbox",
    )


def check_own_class(folder: Path, key: str, scores: bool) -> None:
    """Check that code which is trusted has the class that is wanted, where the library has none.

    Args:
        key: what the message calls the folder.
        scores: whether a reward model is wanted, and no language model.

    Raises:
        UserError: it has none.
    """
    classes, wanted = own_classes(folder), f"AutoModelFor{'SequenceClassification' if scores else 'CausalLM'}"
    if classes and wanted not in classes and not knows_model(read_settings(folder)):
        raise UserError(
            f"{key}: {folder} names no '{wanted}' in its auto_map, and the Transformers library has no class for it",
            "name one of its own code there, or use another model",
        )


def check_trust(model: ModelConfig) -> None:
    """Check that the code that is to be trusted is there, and is what the run began with.

    Raises:
        UserError: it is not, the model brings none, or it is not for a form to trust it.
    """
    if not model.trust_remote_code or not (folder := Path(str(model.path))).is_dir():
        return  # a folder that is missing has a message of its own
    if not own_classes(folder):
        raise UserError(f"{KEY} has no effect: {folder} brings no code of its own", "remove it")
    check_listed(model.code, folder)
    check_covered(folder, code_of(folder))
    trusted(folder, model.code)


def check_noted(model: ModelConfig, named: str, folder: Path) -> None:
    """Check that a recipe which trusts code says which, where its model is of a name that may be another's tomorrow.

    Args:
        named: what stands for the model.
        folder: that it stands for now.

    Raises:
        UserError: it trusts whatever is found; has the digests of that.
    """
    if not model.trust_remote_code or model.code is not None or not (code := code_of(folder)):
        return
    raise UserError(
        f"{KEY} does not say which code is trusted: {named} is no folder that the recipe names",
        f"read the code in {folder}; if you trust it, add model.code='{json.dumps(code)}'",
    )


def check_served_code(folder: Path, code: Code | None) -> None:
    """Check that vLLM can build a model of trusted code: by the class that has no language head.

    Raises:
        UserError: the folder names none.
    """
    classes = own_classes(folder)
    if not trusted(folder, code) or "AutoModelForCausalLM" not in classes or has_own_class(read_settings(folder)):
        return
    if "AutoModel" not in classes:
        raise unserved(f"model.path: {folder}", "names no 'AutoModel' in its auto_map, of which vLLM would build it")

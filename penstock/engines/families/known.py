"""Which models and tokenizers the installed Transformers library has classes for: others need code of their own.

Read from its files, since to import them takes seconds and brings torch.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from penstock.engines.families.images import sees

TABLE = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"  # of the library, from `model_type` to the class of a language model


def knows_model(settings: Mapping[str, Any]) -> bool:
    """Whether the library has a language model of a configuration's type, or does not tell which it has."""
    return sees(settings) or not language_models() or settings.get("model_type") in language_models()


def knows_tokenizer(folder: Path, classes: Mapping[str, str]) -> bool:
    """Whether the library reads a folder's tokenizer, for which there may be one of the folder's own `classes`."""
    return "AutoTokenizer" not in classes or (folder / "tokenizer.json").is_file()


@cache
def language_models() -> frozenset[str]:
    """Return the types of the library's language models; none if it does not list them as it did."""
    installed = importlib.util.find_spec("transformers")
    assert installed is not None and installed.origin is not None
    path = Path(installed.origin).parent / "models" / "auto" / "modeling_auto.py"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.is_file() else ():
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and ast.unparse(node.targets[0]) == TABLE:
            return frozenset(name for name, _ in ast.literal_eval(node.value.args[0]))
    return frozenset()

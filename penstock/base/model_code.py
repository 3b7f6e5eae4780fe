"""Python code that a model folder brings for its configuration, model or tokenizer, and whether it is trusted.

Code is trusted by what is in it: a run notes the SHA-256 of each file, and whoever loads a folder looks whether it
holds these files, wherever it lies (the starting model, a model that was written, another machine's copy).

Left out: which models need theirs (penstock/engines/families/known.py), and loading, which is the Transformers
library's.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.base.errors import UserError

Code = Mapping[str, str]  # SHA-256 of the files of code by their names

OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.gguf")
OF_THE_WEIGHTS = ("*.safetensors", "*.index.json", "README.md", *OTHER_WEIGHTS)

_AUTO_MAPS = ("config.json", "tokenizer_config.json")


def own_classes(folder: str | Path) -> dict[str, str]:
    """Return the classes that a folder has code for: by the library's class that is to load them, as `module.Class`."""
    found: dict[str, str] = {}
    for name in _AUTO_MAPS:
        path = Path(folder) / name
        named: Any = json.loads(path.read_text(encoding="utf-8")).get("auto_map") if path.is_file() else None
        if isinstance(named, list):  # of a tokenizer, as it was written once
            named = {"AutoTokenizer": named}
        for loads, classes in (named or {}).items():
            of_both = classes if isinstance(classes, list) else [classes]  # tokenizers, slow and fast: the latter loads
            found[loads] = next(loaded for loaded in reversed(of_both) if loaded is not None)
    return found


def code_of(folder: str | Path) -> dict[str, str]:
    """Return the SHA-256 of a model folder's files of code by their names; none where nothing names them."""
    if not own_classes(folder):
        return {}
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(folder).glob("*.py"))}


def trusted(folder: str | Path, code: Code | None) -> bool:
    """Whether the code of a folder may be loaded.

    Args:
        code: that the run trusts.

    Raises:
        UserError: the run trusts code, and this is another.
    """
    found = code_of(folder) if code else {}
    if not code or not found:
        return False
    if different := sorted(name for name in {*found, *code} if found.get(name) != code.get(name)):
        raise UserError(
            f"the code in {folder} is not what this run trusts: {', '.join(different)}",
            "put the files back that the run began with (their SHA-256 is 'model.code' in its config.yaml), "
            "or read the others and begin anew",
        )
    return True


def copy_code(source: Path, target: Path) -> None:
    """Copy the code that a model folder brings, and what it may read: all files that `target` lacks but weights.

    Without it a model that is written to `target` would not load as that of the folder does.
    """
    if not own_classes(source):
        return
    for path in source.iterdir():
        of_the_weights = any(path.match(kind) for kind in OF_THE_WEIGHTS)
        if path.is_file() and not of_the_weights and not (target / path.name).exists():
            shutil.copy2(path, target / path.name)

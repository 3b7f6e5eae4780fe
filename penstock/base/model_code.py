"""Python code that a model folder brings for its configuration, model or tokenizer, and whether it is trusted.

Code is trusted by what is in it: a run notes the SHA-256 of each file, and whoever loads a folder looks whether it
holds these files, wherever it lies (the starting model, a model that was written, another machine's copy).

Left out: which models need theirs (penstock/engines/families/known.py), and loading, which is the Transformers
library's.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.base.errors import UserError

Code = Mapping[str, str]  # SHA-256 of the files of code by their names

OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.gguf")
OF_THE_WEIGHTS = ("*.safetensors", "*.index.json", "README.md", *OTHER_WEIGHTS)

CLASS = re.compile(r"(?P<module>[\w-]+)\.\w+")  # in an auto_map: of a file of the folder itself
_OF_MODEL_AND_TOKENIZER = ("config.json", "tokenizer_config.json")
_OF_PROCESSORS = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def own_classes(folder: str | Path) -> dict[str, str]:
    """Return the classes that a folder has code for: by the library's class that is to load them, as `module.Class`.

    Raises:
        UserError: its settings are damaged, or name no classes where they should.
    """
    named = [item for name in _OF_MODEL_AND_TOKENIZER for item in _named(Path(folder) / name)]
    return {loads: classes[-1] for loads, classes in named}  # of a tokenizer's two, slow and fast: the latter loads


def code_of(folder: str | Path) -> dict[str, str]:
    """Return the SHA-256 of a model folder's files of code by their names; none where nothing names them."""
    if not own_classes(folder):
        return {}
    files = (path for path in sorted(Path(folder).glob("*.py")) if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def trusted(folder: str | Path, code: Code | None) -> bool:
    """Whether the code of a folder may be loaded.

    Args:
        code: that the run trusts.

    Raises:
        UserError: the run trusts code, and this is another, or not all of it.
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
    check_covered(Path(folder), code)
    return True


def check_covered(folder: Path, code: Code) -> None:
    """Check that whatever runs once a folder's code may be loaded is among its files of code.

    A class may be named in another folder or in a repository of the Hub; the Transformers library runs
    `custom_generate/generate.py` unasked; and vLLM takes the model that a `speculators_config` names instead.

    Raises:
        UserError: something is not.
    """
    settings = (folder / name for name in (*_OF_MODEL_AND_TOKENIZER, *_OF_PROCESSORS))
    classes = {named for path in settings for _, of_one in _named(path) for named in of_one}
    beside = [name for name in ("custom_generate",) if (folder / name).exists()]
    elsewhere = ["speculators_config"] if "speculators_config" in (_read(folder / "config.json") or {}) else []
    if uncovered := [*sorted(named for named in classes if not _is_of(named, code)), *beside, *elsewhere]:
        raise UserError(
            f"{folder} brings or names code that is not in a *.py file beside its weights: {', '.join(uncovered)}",
            "put the files of all classes there, each named as FILE.Class in 'auto_map', and delete what else is named",
        )


def _is_of(named: str, code: Code) -> bool:
    found = CLASS.fullmatch(named)
    return found is not None and "--" not in named and f"{found['module']}.py" in code  # REPOSITORY--module.Class


def _named(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield what a file of settings names in every auto_map: a class of the library's with those that it loads."""
    for named in _auto_maps(_read(path)):
        by_loader = {"AutoTokenizer": named} if isinstance(named, list) else named  # as a tokenizer's was written once
        for loads, classes in by_loader.items() if isinstance(by_loader, dict) else [("auto_map", None)]:
            given = [item for item in (classes if isinstance(classes, list) else [classes]) if item is not None]
            if not given or not all(isinstance(item, str) for item in given):
                raise UserError(
                    f"{path}: 'auto_map' names no class for {loads}", "it maps names as AutoModel to FILE.Class"
                )
            yield loads, given


def _auto_maps(settings: Any) -> Iterator[Any]:
    """Yield each auto_map of settings, first of those inside others, as a processor's has them."""
    if isinstance(settings, dict):
        for inner in settings.values():
            yield from _auto_maps(inner)
        if settings.get("auto_map"):
            yield settings["auto_map"]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}", "copy it anew; in a Git clone, 'git lfs pull'") from error


def copy_code(source: Path, target: Path, code: Code | None) -> None:
    """Copy the code that a model folder is trusted to bring, and what it may read: what `target` lacks but weights.

    Without it a model that is written to `target` would not load as that of the folder does. Hidden files and what
    links lead to elsewhere stay behind: they may be secrets, and `target` is there to be handed on.

    Args:
        code: that the run trusts.

    Raises:
        UserError: the folder brings another.
    """
    if code is None or not trusted(source, code):
        return
    for path in source.iterdir():
        of_the_weights = any(path.match(kind) for kind in OF_THE_WEIGHTS)
        if path.is_file() and not of_the_weights and not (target / path.name).exists() and _is_to_copy(path, code):
            shutil.copy2(path, target / path.name)


def _is_to_copy(path: Path, code: Code) -> bool:
    if path.name in code:  # what is in it is known, wherever it lies
        return True
    folder = path.parent.resolve()
    places = [
        folder,
        *([folder.parents[1] / "blobs"] if folder.parent.name == "snapshots" else []),
    ]  # of the Hub's cache
    return not path.name.startswith(".") and path.resolve().parent in places

"""Which causal LMs the rollout engine serves with the weights that are trained: others are refused before it starts.

vLLM has classes of its own for some architectures, and builds the rest from the Transformers library's, whose linear
layers it replaces by its own under the names that the table has: a reshard finds both alike. Which are its own says a
table in one of its files; that is read, since to import vLLM takes seconds. Only a model that generates is looked at:
critics and reward models need no vLLM.

Left out: what packed training provides (architecture.py); whether every parameter of the engine that was built has a
counterpart (weights/loader.py).
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from penstock.base.errors import UserError
from penstock.engines.families.architecture import REMEDY
from penstock.engines.families.table import family_of

DECODERS = {  # by the whole models that they are in: vLLM 0.26 has them, and its table does not name them
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
TABLES = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")  # vLLM's, from architecture to file and class that serve it


def check_served(settings: Mapping[str, Any], weights: Iterable[str], where: str | Path) -> None:
    """Check that vLLM serves a model by parameters that a reshard can write and compare.

    Args:
        settings: the model's configuration.
        weights: names of its parameters.
        where: what the message calls it.

    Raises:
        UserError: it is a mixture of experts, and its family's row does not say how vLLM calls them; or it has a
            setting that vLLM does not heed.
    """
    family = family_of(settings.get("model_type", ""))
    counted = [name for name in family.expert_settings if (settings.get(name) or 0) > 1]
    named = [name for name in weights if not set(family.expert_weights).isdisjoint(name.split("."))]
    if (counted or named) and not family.experts:
        evidence = f"'{counted[0]}' is {settings[counted[0]]}" if counted else f"it has '{named[0]}'"
        raise unserved(where, f"is a mixture of experts ({evidence}), whose weights no reshard can compare with vLLM's")
    for name, known in family.unheeded:
        if (value := _plain(settings.get(name))) is not None and value != known:
            raise unserved(where, f"sets '{name}', and vLLM computes as if it were {known}")


def _plain(value: Any) -> Any:
    """Return a setting as a file has it or the library, which writes infinity as an object, and ranges as tuples."""
    if isinstance(value, Mapping) and "__float__" in value:
        return float(value["__float__"])
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def unserved(where: str | Path, what: str) -> UserError:
    """Return the error of a model that is or has `what`."""
    return UserError(f"{where} {what}: rollouts with it would not be known to be the policy's", REMEDY)


def has_own_class(settings: Mapping[str, Any]) -> bool:
    """Whether vLLM serves a model by a class of its own; others it builds from the Transformers library's."""
    return not native_architectures().isdisjoint(settings.get("architectures") or ())


@cache
def native_architectures() -> frozenset[str]:
    """Return the architectures that the installed vLLM has classes for; none if there is no vLLM or no such table.

    Decoders of Qwen3.5 it has with those of the whole model, where its table has these alone.
    """
    found = set[str]()
    for node in _nodes("model_executor/models/registry.py"):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and _name(node.targets[0]) in TABLES:
            found.update(str(key.value) for key in node.value.keys if isinstance(key, ast.Constant))
    found.update(decoder for whole, decoder in DECODERS.items() if whole in found)
    return frozenset(found)


@cache
def cpu_head_sizes() -> frozenset[int]:
    """Return the sizes of attention heads that vLLM computes on a CPU; none if there is no vLLM or no such list."""
    for node in _nodes("v1/attention/backends/cpu_attn.py"):
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes":
            returned = node.body[-1]
            assert isinstance(returned, ast.Return) and returned.value is not None
            return frozenset(ast.literal_eval(returned.value))
    return frozenset()


def _nodes(file: str) -> Iterator[ast.AST]:
    """Yield what a file of the installed vLLM defines; nothing if there is none."""
    installed = importlib.util.find_spec("vllm")
    if installed is not None and installed.origin is not None:
        path = Path(installed.origin).parent / file
        if path.is_file():
            yield from ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def _name(target: ast.expr) -> str:
    return target.id if isinstance(target, ast.Name) else ""

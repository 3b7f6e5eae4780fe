"""All that would run once a model's code may be loaded is in files whose SHA-256 the run notes, else none is."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from penstock.base.errors import UserError
from penstock.base.model_code import check_covered, code_of, own_classes
from penstock.base.ragged import Ragged
from penstock.checks.model.folder import check_model_folder
from penstock.data.tokenizer import load_tokenizer
from penstock.engines.models.model_folder import load_folder
from penstock.state.digests import signed
from penstock.state.experience import write_columns
from penstock.state.manifest import Manifest, Progress, write_manifest
from penstock.state.run_folder import RunFolder
from penstock.tasks.export_run import export_run
from tests.own_code.model import AUTO_MAP, change_settings, write_own_model


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """A file that is written by code which nothing covers."""
    return tmp_path / "ran"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The final model of a run, which brings its own code."""
    own = tmp_path / "run" / "models" / "final"
    write_own_model(own)
    return own


def from_elsewhere(own: Path, ran: Path, named: str) -> None:
    """Let the model's configuration be of a class of another folder, which writes a file when it is imported."""
    text = (own / "configuration_ours.py").read_text(encoding="utf-8")
    file = own / f"{named.rpartition('.')[0]}.py"
    if "--" not in named:  # which no machine of a test may ask the Hub for
        file.parent.mkdir()
        file.write_text(f"{text}\nopen({str(ran)!r}, 'w')\n", encoding="utf-8")
    change_settings(own, auto_map=AUTO_MAP | {"AutoConfig": named})


def generates(own: Path, ran: Path) -> None:
    """Let the model bring a way to generate of its own, which the Transformers library runs unasked."""
    (own / "custom_generate").mkdir()
    text = f"open({str(ran)!r}, 'w')\n\n\ndef generate(model, **others):\n    pass\n"
    (own / "custom_generate" / "generate.py").write_text(text)


def for_the_tokenizer(own: Path, ran: Path) -> None:
    """Let the slow one of two tokenizers be of a folder below."""
    settings = json.loads((own / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["sub/mod.Slow", settings["auto_map"]["AutoTokenizer"][0]]}
    (own / "tokenizer_config.json").write_text(json.dumps(settings))


def for_the_processor(own: Path, ran: Path) -> None:
    """Let what vLLM prepares pictures with, inside other settings, be of a repository of the Hub."""
    named = {"image_processor": {"auto_map": {"AutoImageProcessor": "org/name--pictures.Ours"}}}
    (own / "processor_config.json").write_text(json.dumps(named))


def serves_another(own: Path, ran: Path) -> None:
    """Let vLLM take the model of another folder in place of this one."""
    change_settings(own, speculators_config={"verifier": {"name_or_path": "/srv/other"}})


def exported(own: Path, code: dict[str, str]) -> None:
    """Export the run that the model is of."""
    run = RunFolder(own.parents[1])
    model = {"path": str(own), "trust_remote_code": True, "code": code}
    run.config.write_text(signed(json.dumps({"name": "run", "model": model})))
    run.prompts("train").parent.mkdir()
    write_columns(run.prompts("train"), {"prompt_tokens": Ragged.of([np.arange(3, 9)], np.int32)})
    write_manifest(run, Manifest(Progress(iteration=1), model=str(own)))
    export_run(run, None, None)


@pytest.mark.parametrize(
    "load",
    [
        lambda own, code: load_folder(own, code),
        lambda own, code: load_tokenizer(str(own), code),
        lambda own, code: check_model_folder(own, "critic.path", code=code),
        exported,
    ],
    ids=["model", "tokenizer", "critic", "export"],
)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda own, ran: from_elsewhere(own, ran, f"{ran.parent}/other/mod.OursConfig"), "other/mod.OursConfig"),
        (lambda own, ran: from_elsewhere(own, ran, "org/name--configuration_ours.OursConfig"), "org/name--config"),
        (lambda own, ran: from_elsewhere(own, ran, "sub/mod.OursConfig"), "sub/mod.OursConfig"),
        (generates, "custom_generate"),
        (for_the_tokenizer, "sub/mod.Slow"),
        (for_the_processor, "org/name--pictures.Ours"),
        (serves_another, "speculators_config"),
    ],
    ids=["absolute", "repository", "below", "generate", "slow tokenizer", "processor", "verifier"],
)
def test_code_that_no_sum_covers_is_not_run(
    own: Path,
    ran: Path,
    change: Callable[[Path, Path], None],
    said: str,
    load: Callable[[Path, dict[str, str]], None],
) -> None:
    """By no loader, though the sums of the files beside the weights are right. Controls: the two tests below."""
    change(own, ran)
    with pytest.raises(UserError, match=f"is not in a .*file beside its weights: .*{said}"):
        load(own, code_of(own))
    assert not ran.exists()
    assert not (own.parent / "export").exists()


def test_what_is_covered_loads(own: Path) -> None:
    """The control, by each loader; a class may lie in a file with a dash in its name."""
    check_model_folder(own, "critic.path", code=code_of(own))
    assert type(load_folder(own, code_of(own))).__name__ == "OursForCausalLM"
    assert type(load_tokenizer(str(own), code_of(own))).__name__ == "OursTokenizer"
    exported(own, code_of(own))
    assert code_of(own.parent / "export") == code_of(own)
    (own / "configuration-ours.py").write_text("")
    change_settings(own, auto_map=AUTO_MAP | {"AutoConfig": "configuration-ours.OursConfig"})
    check_covered(own, code_of(own))


@pytest.mark.parametrize(
    "change", [generates, lambda own, ran: from_elsewhere(own, ran, f"{ran.parent}/other/mod.OursConfig")]
)
def test_the_library_by_itself_would_run_it(own: Path, ran: Path, change: Callable[[Path, Path], None]) -> None:
    """The control: with the key alone, before it has loaded the model or failed to."""
    change(own, ran)
    with suppress(Exception):
        AutoModelForCausalLM.from_pretrained(own, trust_remote_code=True, local_files_only=True)
    assert ran.exists()


@pytest.mark.parametrize(
    "named",
    ["configuration_ours.OursConfig", {"AutoConfig": None}, {"AutoTokenizer": [None, None]}, {"AutoModel": [1]}],
)
def test_an_auto_map_without_classes_is_a_users_mistake(own: Path, named: object) -> None:
    """Also of a model that nobody trusts. Control: a tokenizer's as it was written once, and none at all."""
    change_settings(own, auto_map=named)
    for look in (own_classes, code_of, lambda own: check_model_folder(own, "model.path")):
        with pytest.raises(UserError, match="config.json: 'auto_map' names no class for"):
            look(own)
    change_settings(own, auto_map=["tokenization_ours.Slow", None])
    assert own_classes(own) == {"AutoTokenizer": "tokenization_ours.OursTokenizer"}
    change_settings(own, auto_map={})
    assert set(own_classes(own)) == {"AutoTokenizer"}

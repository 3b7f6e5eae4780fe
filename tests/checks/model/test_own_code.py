"""A model's own code has to be trusted, to be what was trusted, and to have an effect: else a start is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.base.model_code import code_of, copy_code
from penstock.checks.found_models import with_models_found
from penstock.checks.model.folder import check_model_folder
from penstock.checks.model.own_code import check_own_code
from penstock.checks.model.starting_model import check_model
from penstock.checks.training import check_rollout_model
from penstock.cli.serving.serve import serve
from penstock.configs.evaluation import evaluation_config
from penstock.configs.loading.load import config_from_mapping
from penstock.configs.schema import TrainConfig
from penstock.doctor.model import examine_model
from penstock.engines.families.known import language_models
from tests.engines.shared_ranks import Shape
from tests.own_code.model import AUTO_MAP, change_settings, give_own_tokenizer, write_own_model


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder whose configuration, model and tokenizer need its own code."""
    write_own_model(tmp_path / "own")
    return tmp_path / "own"


def config_of(folder: Path, trust: bool = True, **model: Any) -> TrainConfig:
    """A recipe's configuration as it is when a run begins."""
    section = {"path": str(folder), "trust_remote_code": trust, **model}
    return with_models_found(config_from_mapping({"model": section}, "test"))


def test_a_run_notes_the_code_and_trusts_no_other(own: Path) -> None:
    """File by file: one that is changed, that is new, that is gone. Control: the same files pass, also once more."""
    config = config_of(own)
    assert config.model.code == code_of(own)
    assert set(code_of(own)) == {"configuration_ours.py", "modeling_ours.py", "tokenization_ours.py"}
    assert with_models_found(config) == config
    check_model(config)
    text = (own / "modeling_ours.py").read_text()
    (own / "modeling_ours.py").write_text(text + "\n")
    (own / "added.py").write_text("")
    with pytest.raises(UserError, match="not what this run trusts: added.py, modeling_ours.py"):
        check_model(config)
    (own / "added.py").unlink()
    (own / "modeling_ours.py").write_text(text)
    (own / "tokenization_ours.py").unlink()
    with pytest.raises(UserError, match="not in a .*file beside its weights: tokenization_ours.OursTokenizer"):
        check_model(config)


def test_code_that_is_needed_and_not_trusted_is_named(own: Path) -> None:
    """With the key that trusts it; of a critic or a reward model too. Control: a model that the library knows."""
    said = r"type 'ours', .* its own code \(configuration_ours.py, modeling_ours.py, tokenization_ours.py\) is not"
    with pytest.raises(UserError, match=said) as refused:
        check_model(config_of(own, trust=False))
    assert "model.trust_remote_code=true" in refused.value.remedy
    with pytest.raises(UserError, match=f"critic.path: .*{said}"):
        check_model_folder(own, "critic.path")
    check_model_folder(own, "critic.path", code=code_of(own))
    assert [line.level for line in examine_model(own)] == ["problem"]
    assert {line.level for line in examine_model(own, code_of(own))} == {"ok"}
    change_settings(own, model_type="llama", architectures=["LlamaForCausalLM"])
    with pytest.raises(UserError, match="holds its tokenizer, which the Transformers library has no class for"):
        check_model(config_of(own, trust=False))
    shutil.rmtree(own)
    Shape("llama", tied=False).write(own)
    check_model(config_of(own, trust=False))


def test_a_tokenizer_alone_may_need_code(own: Path) -> None:
    """Beside a model of the library's."""
    shutil.rmtree(own)
    Shape("llama", tied=False).write(own)
    give_own_tokenizer(own)
    assert set(code_of(own)) == {"tokenization_ours.py"}
    check_model(config_of(own))
    check_rollout_model(config_of(own))
    with pytest.raises(UserError, match="holds its tokenizer"):
        check_model(config_of(own, trust=False))


def test_the_key_without_effect_is_refused(own: Path, tmp_path: Path) -> None:
    """Of a model that brings no code, also if a script lies beside its weights; and of no folder at all."""
    Shape("llama", tied=False).write(tmp_path / "plain")
    (tmp_path / "plain" / "convert.py").write_text("")
    with pytest.raises(UserError, match="model.trust_remote_code has no effect: .*plain brings no code"):
        check_model(config_of(tmp_path / "plain"))
    with pytest.raises(UserError, match="there is no folder .*nowhere"):
        check_model(config_of(tmp_path / "nowhere"))
    for model, said in (
        ({"trust_remote_code": True}, "'trust_remote_code' has no effect without 'path'"),
        ({"path": str(own), "code": code_of(own)}, "'code' has no effect without 'trust_remote_code'"),
    ):
        with pytest.raises(UserError, match=said):
            config_from_mapping({"model": model}, "test")


def test_what_packing_and_vllm_cannot_do_is_refused_of_own_code_too(own: Path) -> None:
    """By the signs that every model is looked at for; by a class that vLLM could build nothing of."""
    change_settings(own, kv_lora_rank=8)
    with pytest.raises(UserError, match="multi-head latent attention.*packed training does not provide"):
        check_model(config_of(own))
    change_settings(own, kv_lora_rank=None, auto_map={name: AUTO_MAP[name] for name in AUTO_MAP if name != "AutoModel"})
    check_model(config_of(own))
    with pytest.raises(UserError, match="names no 'AutoModel' in its auto_map"):
        check_rollout_model(config_of(own))
    change_settings(own, auto_map=AUTO_MAP)
    check_rollout_model(config_of(own))


def test_the_class_that_is_wanted_has_to_be_named(own: Path) -> None:
    """A reward model's, or a language model's. Control: the other of the two is there; the library has its own."""
    with pytest.raises(UserError, match="names no 'AutoModelForSequenceClassification' in its auto_map"):
        check_model(config_of(own), scores=True)
    check_model(config_of(own))
    change_settings(own, auto_map={"AutoConfig": AUTO_MAP["AutoConfig"]})
    with pytest.raises(UserError, match="names no 'AutoModelForCausalLM' in its auto_map"):
        check_model(config_of(own))
    change_settings(own, auto_map=None, model_type="llama", architectures=["LlamaForCausalLM"])
    check_model(config_of(own))
    check_model(config_of(own), scores=True)


def test_where_no_code_is_ever_loaded_the_remedy_is_another(own: Path) -> None:
    """A server for a model. Control: the key is what the other messages name."""
    with pytest.raises(UserError, match="is not loaded") as refused:
        serve(own, 1, None, print)
    assert "--trust-remote-code" in refused.value.remedy
    with pytest.raises(UserError) as refused:
        check_own_code(own, "a model", None)
    assert "model.trust_remote_code" in refused.value.remedy


def test_an_evaluation_trusts_what_the_run_does(own: Path, tmp_path: Path) -> None:
    """The run's files wherever they lie, and none of a model that needs none."""
    config = config_of(own)
    Shape("llama", tied=False).write(tmp_path / "plain")
    of_plain = evaluation_config(config, tmp_path / "plain", None)
    assert (of_plain.model.trust_remote_code, of_plain.model.code) == (False, None)
    shutil.copytree(own, tmp_path / "other")
    (tmp_path / "other" / "modeling_ours.py").write_text("")
    check_model(evaluation_config(config, own, None))
    with pytest.raises(UserError, match="not what this run trusts"):
        check_model(evaluation_config(config, tmp_path / "other", None))


def test_a_copy_has_all_that_the_code_may_read(own: Path, tmp_path: Path) -> None:
    """And no weights, and nothing in place of what is there. Control: where no code is trusted nothing is copied."""
    target, plain = tmp_path / "out", tmp_path / "plain"
    target.mkdir()
    (target / "config.json").write_text("{}")
    (own / "pytorch_model.bin").write_bytes(b"")
    copy_code(own, target, None)
    assert [path.name for path in target.iterdir()] == ["config.json"]
    copy_code(own, target, code_of(own))
    assert {"letters.ours", "tokenization_ours.py", "modeling_ours.py"} <= {path.name for path in target.iterdir()}
    assert not [*target.glob("*.safetensors"), *target.glob("*.bin")]
    assert (target / "config.json").read_text() == "{}"
    Shape("llama", tied=False).write(plain)
    copy_code(plain, tmp_path, code_of(own))
    assert not (tmp_path / "tokenizer.json").exists()
    (own / "modeling_ours.py").write_text("")
    with pytest.raises(UserError, match="not what this run trusts"):
        copy_code(own, target, code_of(target))


@pytest.mark.parametrize("cached", [True, False])
def test_a_copy_has_no_secrets_of_elsewhere(own: Path, tmp_path: Path, cached: bool) -> None:
    """No hidden file, and not what a link leads to. Controls: links of the Hub's cache; code whose content is known."""
    hub = tmp_path / ("models--org--name" if cached else "place")
    folder, blobs = hub / ("snapshots" if cached else "models") / "one", hub / "blobs"
    shutil.copytree(own, folder)
    blobs.mkdir()
    for name in ("letters.ours", "modeling_ours.py"):
        (folder / name).rename(blobs / name)
        (folder / name).symlink_to(Path("../../blobs") / name)
    (tmp_path / "key").write_text("secret")
    (folder / ".env").write_text("secret")
    (folder / "key.txt").symlink_to(tmp_path / "key")
    (folder / "again.txt").symlink_to(folder / "tokenizer_config.json")
    target = tmp_path / "out"
    target.mkdir()
    copy_code(folder, target, code_of(folder))
    copied = {path.name for path in target.iterdir()}
    assert not copied & {".env", "key.txt"}
    assert code_of(target) == code_of(folder)
    assert "again.txt" in copied
    assert ("letters.ours" in copied) == cached


def test_the_table_of_the_library_is_read_as_it_is() -> None:
    """Without importing it; a model type that nobody has is not among them."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert language_models() == frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert "ours" not in language_models()

"""Families of models through the real engines, as `penstock bench families` measures them.

One by a class of vLLM's own that caps logits and scores, two with experts, two that carry a state from token to
token, and one that vLLM builds from the Transformers library's are in `make test-slow`. That packed rows of each are
the library's is test_architecture.py's, and test_mixers.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penstock.benchmarks.families.measuring import measure_folder
from penstock.benchmarks.workload.families import FAMILIES, REFUSED, SIZES, write_family
from penstock.configs.schema import TrainConfig
from penstock.engines.families.table import family_of
from penstock.engines.groups.group import EngineGroup
from tests.engines.rows import LOSS, SPLIT, random_rows, write_rows
from tests.engines.shared_ranks import SMALL, Ranks

EQUAL, STALE = 1e-5, 1e-2  # mean difference of log-probs in float32
WORKER = "tests.engines.families.measured_worker:MeasuredWorker"
TRAINED = [name for name in FAMILIES if name not in REFUSED]
ONE_OF_EACH_KIND = ("Gemma 2", "OLMo 2", "GLM-4.5", "gpt-oss", "Granite 4 (Mamba 2)", "Qwen 3.5")
Emptied = Callable[[Path], AbstractContextManager[EngineGroup]]


@pytest.fixture(scope="module")
def emptied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emptied]:
    """One rank for all families, which lets go of its model before it is given: a start takes longer than a family.

    Not the one of other tests, which would end with it where a family goes wrong.
    """
    ranks = Ranks.start(1, tmp_path_factory.mktemp("families"), worker=WORKER)

    @contextmanager
    def given(work: Path) -> Iterator[EngineGroup]:
        work.mkdir(parents=True, exist_ok=True)
        ranks.ask("discard")
        yield ranks.group

    yield given
    ranks.group.close(grace_s=1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in ONE_OF_EACH_KIND else pytest.param(name, marks=pytest.mark.exhaustive) for name in TRAINED]
)
def test_what_is_trained_is_what_vllm_serves(name: str, emptied: Emptied, tmp_path: Path) -> None:
    """Packed rows, gradients, vLLM after an update and with adapters, what is written: all as the library has it.

    Every parameter is the trainer's own, but for those that vLLM has transposed. Control: the policy before the
    update is another by far.
    """
    row = measure_folder(write_family(name, tmp_path / "model"), tmp_path / "work", emptied)
    assert "refused" not in row
    figures = {"packed", "gradient", "rollout", "lora", "exported"}
    figures |= {"lora_experts"} if family_of(row["model_type"]).experts else set()
    assert max(row[figure] for figure in figures) < EQUAL
    assert row.get("lora_experts") != row["lora"]  # of other adapters, not the same ones asked again
    assert row["stale"] > STALE
    transposed = len(family_of(row["model_type"]).transposed) * SIZES["num_hidden_layers"]
    assert row["parameters_shared"] > 0 and row["parameters_copied"] == transposed


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_provided_is_refused_in_a_line(name: str, tmp_path: Path) -> None:
    """By a check, by a rank, or by the comparison of log-probs; never trained on something else."""
    row = measure_folder(write_family(name, tmp_path / "model"), tmp_path / "work")
    assert row["refused"] and "\n" not in row["refused"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "count"), [("Qwen 3 MoE", 6), pytest.param("GLM-4.5", 6, marks=pytest.mark.exhaustive)]
)
def test_experts_in_shards_reach_vllm(family: str, count: int, one_rank: Ranks, tmp_path: Path) -> None:
    """By ZeRO-3's gather, also what corrects a choice, which rests. Control: each other parameter has moved."""
    before = _after_a_step(one_rank, write_family(family, tmp_path / "model"), tmp_path)
    assert one_rank.ask("mismatches")[0]["names"] == []
    experts = {name: value for name, value in one_rank.parameters().items() if "experts" in name or "gate.w" in name}
    assert len(experts) == count and all((value - before[name]).abs().max() > 1e-4 for name, value in experts.items())


def _after_a_step(ranks: Ranks, folder: Path, work: Path) -> dict[str, torch.Tensor]:
    """Build a model in shards, take a step, and reshard; return the parameters before."""
    assert ranks.build(folder, ("actor", "rollout"), actor={"zero_stage": 3}).strategy == "gather"
    ranks.ask("reshard", version=0)
    before = ranks.parameters()
    path = write_rows(work / "rows.parquet", random_rows(8))
    split = {**SPLIT, "mini_batches": 2, "micro_batch_tokens": 32}
    ranks.ask("update_actor", path=path, version=0, split=split, loss=LOSS, learning_rate=1e-2)
    ranks.ask("reshard", version=1)
    return before


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["GLM-4.5", "Trinity"])
def test_what_corrects_a_choice_stays_exact_beside_bfloat16(family: str, one_rank: Ranks, tmp_path: Path) -> None:
    """In the trainer, in vLLM and in what is written. Control: all else is rounded, and has moved."""
    folder = write_family(family, tmp_path / "model")
    model = {"path": str(folder), "dtype": "bfloat16"}
    assert one_rank.build(folder, ("actor", "rollout"), model=model).strategy == "shared"
    one_rank.ask("reshard", version=0)
    path = write_rows(tmp_path / "rows.parquet", random_rows(8))
    split = {**SPLIT, "mini_batches": 2, "micro_batch_tokens": 32}
    one_rank.ask("update_actor", path=path, version=0, split=split, loss=LOSS, learning_rate=1e-2)
    one_rank.ask("reshard", version=1)
    assert one_rank.ask("mismatches")[0]["names"] == []
    one_rank.ask("export", folder=str(tmp_path / "written"))
    given, written = (load_file(where / "model.safetensors") for where in (folder, tmp_path / "written"))
    corrections = [name for name in given if name.endswith(("e_score_correction_bias", "expert_bias"))]
    assert corrections and all(torch.equal(written[name], given[name]) for name in corrections)
    assert all((given[name].bfloat16().float() != given[name]).any() for name in corrections)
    others = [name for name in written if name not in corrections]
    assert all(written[name].dtype is torch.bfloat16 for name in others)
    assert not torch.equal(written["lm_head.weight"].float(), given["lm_head.weight"])


@pytest.mark.slow
def test_what_vllm_cannot_build_is_refused_in_words(
    one_rank: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DiffLlama calls its attention past the library's interface; the trainer could."""
    monkeypatch.setitem(FAMILIES, "DiffLlama", ("diffllama", {}))
    folder = write_family("DiffLlama", tmp_path / "model")
    config = TrainConfig.model_validate({**SMALL, "model": {"path": str(folder)}}).model_dump(mode="json")
    arguments = {"config": config, "folder": str(folder), "roles": ["actor", "rollout"]}
    one_rank.ask("discard")
    error = one_rank.ask("refusal", of="build", arguments=arguments)[0]["error"]
    assert "is not served by vLLM: Layer 0 does not dispatch through the Transformers attention interface" in error


@pytest.mark.slow
def test_shards_of_a_model_that_vllm_changes_the_class_of_are_gathered(one_rank: Ranks, tmp_path: Path) -> None:
    """ZeRO-3 gathers in hooks, past which vLLM's changes would call the trainer's model.

    An optimizer step and a reshard after vLLM has started; the trainer's class is the library's again. Control: vLLM's
    model is of a class of its own.
    """
    _after_a_step(one_rank, write_family("OLMo 2", tmp_path / "model"), tmp_path)
    assert one_rank.ask("mismatches")[0]["names"] == []
    classes = one_rank.ask("backbone_classes")[0]
    assert classes["trainer"] == ["Olmo2Model", "Olmo2PreTrainedModel"]
    assert classes["vllm"][:2] == ["Olmo2Model", "Olmo2Model"]

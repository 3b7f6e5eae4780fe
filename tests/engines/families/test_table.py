"""The table of families: each row is true of the libraries' code, and a new shape is supported by a row alone.

The new shape is a Llama whose layers have other names (renamed.py): transformers builds and vLLM serves it, and only
the table knows which layers belong together. Control: without the row it is refused, or left as it is.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.benchmarks.workload.families import FAMILIES as BY_NAME
from penstock.benchmarks.workload.families import SIZES as SMALL_SIZES
from penstock.benchmarks.workload.families import write_family
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.trainer import LoraConfig
from penstock.engines.families import table
from penstock.engines.families.architecture import check_architecture
from penstock.engines.families.shape import read_shape
from penstock.engines.families.table import FAMILIES, USUAL, Family, family_of
from penstock.engines.kernels.gated_mlp import GatedMlp, gate_in_products
from penstock.engines.kernels.weight_gradients import JointProduct, SummedLinear, sum_in_products
from penstock.engines.models.loading import load_causal_lm
from penstock.engines.models.models import PackedPolicy
from penstock.engines.rollout.vllm import take_resizing_from_pillow
from penstock.engines.weights.layout import family_in
from penstock.engines.weights.lora import adapted_layers, attach
from tests.engines.families import renamed
from tests.engines.rows import LOSS, SPLIT, random_rows, write_rows
from tests.engines.shared_ranks import SMALL, Ranks
from tests.engines.sums import sums_of

ROLES = ("actor", "rollout")
THROUGH_TRANSFORMERS = ("vaultgemma", "gpt_neox")  # vLLM has no class of theirs; see test_every_family.py
DECODERS = [row for row in FAMILIES if not row.encoder and not row.incomparable]  # of models that see: test_images.py
DENSE = [name for row in DECODERS if not row.experts for name in row.model_types]
EQUAL = 1e-5  # mean difference of log-probs in float32
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "pad_token_id": 0}
EXPERTS = {
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 32},
    **{"n_group": 1, "first_k_dense_replace": 0, "num_dense_layers": 0, "mlp_layer_types": ["sparse"]},
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
WITH_STATES = {kind: settings for kind, settings in BY_NAME.values() if family_of(kind).mixers}  # layers of each type


def _modules(model_type: str) -> dict[str, str]:
    """Classes of a model's modules by their names."""
    with torch.device("meta"):
        sizes = {**SMALL_SIZES, **WITH_STATES[model_type]} if model_type in WITH_STATES else {**SIZES, **HEADS}
        lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))
    return {name: type(module).__name__ for name, module in lm.named_modules()}


@pytest.mark.parametrize("model_type", [*DENSE, "gemma", "olmo2"])
def test_layers_are_called_as_the_table_says(model_type: str) -> None:
    """In a row, and in two families that are as usual. Control: OPT, which has no row, has others."""
    parts = {name for linear in family_of(model_type).linears for name in linear.parts}
    assert parts <= {name.rpartition(".")[2] for name in _modules(model_type)}
    assert not parts <= {name.rpartition(".")[2] for name in _modules("opt")}


@pytest.mark.parametrize("model_type", [*(name for name in DENSE if name not in THROUGH_TRANSFORMERS), "gemma"])
def test_vllm_stacks_the_layers_that_the_table_says(model_type: str) -> None:
    """By its classes' own word. Control: of Mixtral, whose experts are no layers of the table, or of Llama, another."""
    from vllm import ModelRegistry

    take_resizing_from_pillow()  # a class may lie beside one that sees

    def stacked(architecture: str) -> dict[str, list[str]]:
        mapping: dict[str, list[str]] = ModelRegistry.models[architecture].load_model_cls().packed_modules_mapping
        return {served: parts for served, parts in mapping.items() if len(parts) > 1}

    linears = family_of(model_type).linears
    expected = {linear.served: list(linear.parts) for linear in linears if len(linear.parts) > 1}
    assert stacked(_modules(model_type)[""]) == expected
    assert any(stacked(other) != expected for other in ("MixtralForCausalLM", "LlamaForCausalLM"))


@pytest.mark.parametrize("row", [row for row in FAMILIES if row.experts], ids=lambda row: row.model_types[0])
def test_experts_are_called_and_stacked_as_the_table_says(row: Family) -> None:
    """What they are called in vLLM is test_every_family.py's. Control: a dense model has no such parameters."""
    for model_type in row.model_types:
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES, **HEADS, **EXPERTS))
        held = {**dict(lm.named_parameters()), **dict(lm.named_buffers())}
        for own, _ in row.experts:
            (values,) = (value for name, value in held.items() if name.endswith(own))
            assert len(values) == 4, "one expert after the other"
        fixed = [name for name, value in held.items() if len(value) == 4 and not value.requires_grad]
        assert bool(fixed) == row.corrected, "what corrects a choice of experts has no gradient"
        assert not [name for name in _modules("llama") if name.endswith("experts")]


@pytest.mark.parametrize("row", DECODERS, ids=lambda row: row.model_types[0])
def test_the_layers_that_are_replaced_or_computed_row_by_row_are_the_families_own(row: Family) -> None:
    """The memory estimate goes by the model's type, kernels and mixers by the class: all find it in the row.

    Control: two types with other MLPs have none of these classes, and no row that says so.
    """
    for model_type in row.model_types:
        assert set(row.mixers) <= set(_modules(model_type).values())
        assert len(set(_modules(model_type).values()) & set(row.gated_mlps)) == len(row.gated_mlps)
    for other in ("gemma2", "phi3"):
        assert not set(_modules(other).values()) & set(row.gated_mlps) and family_of(other).gated_mlps == ()


def test_no_type_has_two_rows_and_one_without_a_row_is_as_usual() -> None:
    types = [name for row in FAMILIES for name in row.model_types]
    assert len(types) == len(set(types))
    assert family_of("unheard_of") is USUAL and family_of("llama") is not USUAL


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The new shape."""
    return renamed.write(tmp_path / "model")


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row in the table."""
    monkeypatch.setattr(table, "FAMILIES", renamed.table_with_row())


def _config(folder: Path) -> TrainConfig:
    return TrainConfig.model_validate({**SMALL, "model": {"path": str(folder)}})


def _gap(ranks: Ranks) -> float:
    """Mean difference between vLLM's and the trainer's log-probs."""
    prompts = Ragged.of([np.arange(3, 3 + length) for length in (1, 4, 7)], np.int32)
    reply = ranks.ask("rollout_logprobs", prompts=prompts.values_T, offsets=prompts.offsets_B1, tokens=8)[0]
    return float(np.abs(reply["vllm"] - reply["trainer"]).mean())


def _step(ranks: Ranks, folder: Path) -> None:
    path = write_rows(folder / "rows.parquet", random_rows(8))
    split = {**SPLIT, "mini_batches": 2, "micro_batch_tokens": 32}
    ranks.ask("update_actor", path=path, version=0, split=split, loss=LOSS, learning_rate=1e-2)


@pytest.mark.slow
def test_a_new_shape_trains_and_its_weights_reach_vllm_with_a_row_and_is_refused_without(
    one_rank: Ranks, folder: Path
) -> None:
    """Real DeepSpeed and real vLLM: all weights are shared, so the layers that belong together lie together."""
    config = _config(folder).model_dump(mode="json")
    arguments = {"config": config, "folder": str(folder), "roles": list(ROLES)}
    one_rank.ask("discard")
    one_rank.ask("table_of_families", with_renamed=False)
    error = one_rank.ask("refusal", of="build", arguments=arguments)[0]["error"]
    assert "LlamaForCausalLM has parameters without a known counterpart" in error and "w" in error
    one_rank.ask("table_of_families", with_renamed=True)
    built = one_rank.build(folder, ROLES)
    assert built.parameters_copied == 0 and built.parameters_shared == one_rank.ask("mismatches")[0]["of"] > 0
    before = one_rank.parameters()
    _step(one_rank, folder)
    one_rank.ask("reshard", version=1)
    assert one_rank.ask("mismatches")[0]["names"] == [] and _gap(one_rank) < EQUAL
    assert all((value - before[name]).abs().max() > 1e-3 for name, value in one_rank.parameters().items())
    one_rank.ask("table_of_families", with_renamed=False)


def test_a_row_says_what_a_sign_means_in_its_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """A type of layers of its own that is full attention, a setting of the same name that changes no logits.

    Control: without the row both are refused, and other families are refused with it, too.
    """
    settings = {"layer_types": ["full_attention", "all_attention"], "logit_scale": 0.5}
    row = Family(("named_otherwise",), layer_types=(*USUAL.layer_types, "all_attention"), logit_settings=())

    def refusal(model_type: str) -> str:
        try:
            check_architecture({**settings, "model_type": model_type}, ["model.norm.weight"], "it")
        except UserError as error:
            return str(error)
        return ""

    without = refusal("named_otherwise")
    assert "sets 'logit_scale', which changes scores or logits" in without
    monkeypatch.setattr(table, "FAMILIES", (*FAMILIES, row))
    assert refusal("named_otherwise") == "" and refusal("llama") == without


def test_what_is_counted_without_torch_goes_by_the_row(row: None, folder: Path) -> None:
    """Names of layers that get adapters, and the matrices that vLLM cannot share with the base. Control: no row."""
    shape, lora = read_shape(folder), LoraConfig(targets=["wq", "w2"])
    assert set(shape.matrices) == {name for linear in renamed.ROW.block for name in linear.parts}
    touched = sum(rows * columns for name in ("wq", "wk", "wv", "w2") for rows, columns in [shape.matrices[name]])
    assert shape.merged_parameters(lora) == shape.layers * touched
    lm = load_causal_lm(folder, torch.float32, False)
    attach(lm, lora, seed=0)
    adapters = sum(layer.lora_A.numel() + layer.lora_B.numel() for layer in adapted_layers(lm).values())
    assert shape.adapter_parameters(lora) == adapters > 0


@pytest.mark.parametrize(("name", "adapted"), [("DeepSeek-V3", ["q_a_proj", "kv_b_proj"]), ("Moonlight", ["q_proj"])])
def test_latent_attention_is_counted_by_its_sizes(name: str, adapted: list[str], tmp_path: Path) -> None:
    """Each matrix as the library makes it. Control: a dense model of the same sizes has others."""
    folder = write_family(name, tmp_path / "model")
    shape, lm = read_shape(folder), load_causal_lm(folder, torch.float32, False)
    made = {
        part: tuple(module.weight.shape)
        for part, module in lm.model.layers[0].self_attn.named_children()
        if isinstance(module, torch.nn.Linear)
    }
    assert shape.matrices == made and set(made) >= {"kv_a_proj_with_mqa", "kv_b_proj"}
    assert shape.explained and (shape.head_size, shape.value_size) == (32, 24)
    attach(lm, LoraConfig(targets=adapted), seed=0)
    adapters = sum(layer.lora_A.numel() + layer.lora_B.numel() for layer in adapted_layers(lm).values())
    assert shape.adapter_parameters(LoraConfig(targets=adapted)) == adapters > 0
    assert "kv_b_proj" not in read_shape(write_family("Llama", tmp_path / "dense")).matrices


@pytest.mark.parametrize("name", ["Qwen 3.5", "Qwen 3 Next"])
def test_gated_delta_nets_are_counted_by_their_sizes(name: str, tmp_path: Path) -> None:
    """Each layer's linear layers as the library makes them. Control: the two kinds of layers are not alike."""
    shape, lm = read_shape(write_family(name, tmp_path)), load_causal_lm(tmp_path, torch.float32, False)
    own = [
        {
            part.rpartition(".")[2]: tuple(module.weight.shape)
            for part, module in layer.named_modules()
            if isinstance(module, torch.nn.Linear) and (shape.experts is None or not part.startswith("mlp"))
        }
        for layer in lm.model.layers
    ]
    assert own == [shape.state_matrices, shape.matrices] and own[0] != own[1]
    assert shape.kinds[:2] == [(1, own[1]), (1, own[0])]
    lora = LoraConfig(targets=["q_proj", *(part for part in own[0] if part.startswith("in_proj_"))])
    attach(lm, lora, seed=0)
    adapted = adapted_layers(lm).values()
    assert shape.adapter_parameters(lora) == sum(one.lora_A.numel() + one.lora_B.numel() for one in adapted) > 0
    assert shape.adapters(lora) == len(adapted)
    fused = [part for part in own[0] if part.startswith("in_proj_")]
    merged = sum(rows * columns for part in fused for rows, columns in [own[0][part]])
    attention = sum(rows * columns for part in ("q_proj", "k_proj", "v_proj") for rows, columns in [own[1][part]])
    assert shape.merged_parameters(lora) == merged + attention


@pytest.mark.parametrize("known", [True, False])
def test_faster_products_take_the_layers_that_the_row_names(
    known: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries, keys and values as one; MLPs that keep their parameters' names. Control: without the row none."""
    if known:
        monkeypatch.setattr(table, "FAMILIES", renamed.table_with_row())
    policy = PackedPolicy(load_causal_lm(folder, torch.bfloat16, False))
    assert family_in(policy) is (renamed.ROW if known else USUAL)
    names = [name for name, _ in policy.named_parameters()]
    sum_in_products(policy, sums_of(policy)[0])
    gate_in_products(policy)
    linears = [module for module in policy.modules() if isinstance(module, SummedLinear)]
    joint: set[JointProduct] = {linear.joint for linear in linears if linear.joint is not None}
    assert len(linears) == 7 * 2 and len(joint) == (2 if known else 0)
    assert sum(isinstance(module, GatedMlp) for module in policy.modules()) == (2 if known else 0)
    assert sorted(name for name, _ in policy.named_parameters()) == sorted(names)

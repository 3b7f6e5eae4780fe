"""LoRA in one process: the adapters' mathematics against float64, PEFT as a second opinion, what is counted of them.

Engines with adapters (training, reshard, checkpoints, reference): test_lora_engines.py.
Suffixes: `_NI` rows x in, `_NO` rows x out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from pydantic import ValidationError
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from penstock.base.errors import UserError
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.trainer import LoraConfig
from penstock.engines.batches.packing import pack
from penstock.engines.families.shape import ModelShape, read_shape
from penstock.engines.families.table import USUAL
from penstock.engines.models.loading import load_causal_lm, load_reward_model
from penstock.engines.models.models import PackedPolicy
from penstock.engines.models.peft import write_adapter
from penstock.engines.sizing.flops import forward_flops, training_flops
from penstock.engines.sizing.memory import Rank, Recomputed, rank_phases
from penstock.engines.weights.layout import fused_view, ordered_parameters, plan
from penstock.engines.weights.lora import (
    LoraLinear,
    adapted_layers,
    adapter_state,
    attach,
    base_parameters,
    dithered,
    lay_fused_together,
    load_adapter,
    merged_state,
    without_adapters,
)
from tests.engines.shared_ranks import Shape
from tests.engines.unpacked import load_unpacked, row_logprobs
from tests.engines.weights.adapted import EVERY, ROWS, load_adapted, packed_logprobs

FolderOf = Callable[[Shape], Path]
CPU = torch.device("cpu")
SHAPE = Shape("qwen2", tied=True)
LORA = LoraConfig(rank=4, alpha=6.0)
ATTENTION = LoraConfig(rank=2, alpha=6.0, targets=["q_proj", "v_proj"])


def test_a_layer_and_its_gradients_are_those_of_the_formula_in_float64() -> None:
    """y = W x + b + s B A x; dA = s B' g x', dB = s g (A x)', and nothing for W and b."""
    random = np.random.default_rng(3)
    x_NI, g_NO = random.normal(size=(7, 5)), random.normal(size=(7, 3))
    w_OI, b_O = random.normal(size=(3, 5)), random.normal(size=3)
    a_RI, b_OR = random.normal(size=(2, 5)), random.normal(size=(3, 2))
    config, scale = LoraConfig(rank=2, alpha=3.0), 1.5
    base = nn.Linear(5, 3)
    layer = LoraLinear(base.requires_grad_(False), config, torch.Generator()).double()
    with torch.no_grad():
        pairs = ((layer.weight, w_OI), (layer.bias, b_O), (layer.lora_A, a_RI), (layer.lora_B, b_OR))
        for parameter, values in pairs:
            parameter.copy_(torch.from_numpy(values))
    x = torch.from_numpy(x_NI).requires_grad_()
    y = layer(x.view(1, 7, 5))
    y.backward(torch.from_numpy(g_NO).view(1, 7, 3))
    whole_OI = w_OI + scale * b_OR @ a_RI
    wanted = {
        "y": (y.detach()[0], x_NI @ whole_OI.T + b_O),
        "x": (x.grad, g_NO @ whole_OI),
        "A": (layer.lora_A.grad, scale * b_OR.T @ g_NO.T @ x_NI),
        "B": (layer.lora_B.grad, scale * g_NO.T @ (x_NI @ a_RI.T)),
    }
    for name, (found, expected) in wanted.items():
        assert found is not None
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-12, err_msg=name)
    assert (layer.weight.grad, base.bias.grad) == (None, None)
    np.testing.assert_allclose(layer.merged().numpy(), whole_OI, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("config", [LORA, ATTENTION], ids=["all", "attention"])
def test_a_models_gradients_are_the_chain_rules_through_the_merged_weights(
    config: LoraConfig, folder_of: FolderOf
) -> None:
    """The oracle never sees an adapter: whole rows in float64 with W + s B A, and from its gradient G of that matrix
    dA = s B' G and dB = s G A'.
    """
    lm, weights_T = (
        load_adapted(folder_of(SHAPE), config, dtype=torch.float64),
        torch.linspace(-1, 1, len(ROWS.mask.values_T)),
    )
    layers = adapted_layers(lm)
    logprobs_T = packed_logprobs(lm)
    (logprobs_T * weights_T).sum().backward()
    oracle = load_unpacked(folder_of(SHAPE)).double()
    dense = dict(oracle.named_parameters())
    with torch.no_grad():
        for name, layer in layers.items():
            dense[name] += config.scale * layer.lora_B.double() @ layer.lora_A.double()
    expected_T = torch.cat([row_logprobs(oracle, ROWS, row)[0] for row in EVERY])
    (expected_T * weights_T).sum().backward()
    torch.testing.assert_close(logprobs_T.double(), expected_T, rtol=1e-6, atol=1e-6)
    for name, layer in layers.items():
        gradient = dense[name].grad
        assert gradient is not None and layer.lora_A.grad is not None and layer.lora_B.grad is not None
        for found, factor in (
            (layer.lora_A.grad, layer.lora_B.double().t() @ gradient),
            (layer.lora_B.grad, gradient @ layer.lora_A.double().t()),
        ):
            assert found.abs().max() > 1e-4
            torch.testing.assert_close(found.double(), config.scale * factor, rtol=1e-4, atol=1e-6)
    assert all(value.grad is None for value in base_parameters(lm).values())


def test_merged_weights_in_bfloat16_keep_updates_that_the_nearest_value_would_lose() -> None:
    """An update of a hundredth of the last bit, as the first steps make, arrives in sum. Control: rounded, it does not.

    The oracle knows both neighbours of every value and how far it lies between them, in float64.
    """
    generator = torch.Generator().manual_seed(2)
    base_OI = (torch.randn(512, 768, generator=generator) * 0.02).bfloat16()
    b_OR, a_RI = torch.randn(512, 4, generator=generator) * 1e-5, torch.randn(4, 768, generator=generator)
    exact_OI = base_OI.float() + 0.1 * b_OR @ a_RI
    rounded_OI = dithered(exact_OI)
    step_OI = torch.exp2((torch.frexp(exact_OI)[1] - 8).double())
    below_OI = (exact_OI.double() / step_OI).floor() * step_OI
    up_OI = (rounded_OI.double() - below_OI) / step_OI
    assert set(up_OI.unique().tolist()) == {0.0, 1.0}
    assert up_OI.mean().item() == pytest.approx(((exact_OI.double() - below_OI) / step_OI).mean().item(), abs=1e-3)
    update_OI = (exact_OI - base_OI).double()
    kept, lost = (
        ((values_OI.double() - base_OI.double()) @ a_RI.double().t()).mul(update_OI @ a_RI.double().t()).sum()
        / (update_OI @ a_RI.double().t()).square().sum()
        for values_OI in (rounded_OI, exact_OI.bfloat16())
    )
    assert kept.item() == pytest.approx(1.0, abs=0.05)
    assert lost.item() < 0.1
    assert torch.equal(dithered(base_OI.float()), base_OI)
    assert torch.equal(dithered(exact_OI), rounded_OI)


@torch.no_grad()
def test_fresh_adapters_and_adapters_switched_off_are_the_base_bit_for_bit(folder_of: FolderOf) -> None:
    """So the KL to the base is exactly 0 before the first step. Control: adapters in force change every log-prob."""
    folder = folder_of(SHAPE)
    base_T = packed_logprobs(load_causal_lm(folder, torch.float32, False))
    fresh = load_causal_lm(folder, torch.float32, False)
    attach(fresh, LORA, seed=0)
    assert torch.equal(packed_logprobs(fresh), base_T)
    lm = load_adapted(folder, LORA)
    before_T = packed_logprobs(lm)
    assert (before_T - base_T).abs().min() > 1e-5
    with without_adapters(lm):
        assert torch.equal(packed_logprobs(lm), base_T)
    assert torch.equal(packed_logprobs(lm), before_T)


@torch.no_grad()
def test_the_same_seed_draws_the_same_adapters_within_the_usual_bound(folder_of: FolderOf) -> None:
    """Uniform within 1 / sqrt(in), as PyTorch and PEFT have it; ranks must agree without communication."""
    lms = [load_causal_lm(folder_of(SHAPE), torch.float32, False) for _ in range(3)]
    for lm, seed in zip(lms, (0, 0, 1), strict=True):
        attach(lm, LORA, seed)
    one, same, other = (adapter_state(lm) for lm in lms)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one if name.endswith("lora_A"))
    for name, layer in adapted_layers(lms[0]).items():
        largest = layer.lora_A.abs().max() * layer.in_features**0.5
        assert 0.9 < largest <= 1, name
        assert not layer.lora_B.any()


@torch.no_grad()
def test_what_is_written_is_the_same_model_merged_and_for_peft(folder_of: FolderOf, tmp_path: Path) -> None:
    """PEFT, which shares no code, computes from the adapter's folder what the merged weights do."""
    lm = load_adapted(folder_of(SHAPE), ATTENTION)
    write_adapter(lm, tmp_path / "adapter")
    assert len({path.stat().st_mode for path in (tmp_path / "adapter").iterdir()}) == 1  # whoever reads one reads all
    tokens = torch.arange(3, 30)[None]
    base = load_unpacked(folder_of(SHAPE))
    plain = base(tokens).logits
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(tokens).logits
    merged = load_unpacked(folder_of(SHAPE))
    merged.load_state_dict(merged_state(lm), strict=True)
    ours = merged(tokens).logits
    assert (ours - plain).abs().max() > 0.1
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["q_proj", "v_proj"]
    assert "/" not in str(settings["base_model_name_or_path"])  # whoever gets the folder learns no path
    again = load_causal_lm(folder_of(SHAPE), torch.float32, False)
    attach(again, ATTENTION, seed=5)
    load_adapter(again, adapter_state(lm))
    assert torch.equal(packed_logprobs(again), packed_logprobs(lm))
    with pytest.raises(ValueError, match="other layers or sizes"):
        load_adapter(load_adapted(folder_of(SHAPE), LORA), adapter_state(lm))


def test_only_targets_get_adapters_and_a_score_head_stays_trained(folder_of: FolderOf) -> None:
    """By default every linear layer of the blocks; the language head never."""
    lm = load_adapted(folder_of(SHAPE), ATTENTION)
    assert {name.split(".")[-2] for name in adapted_layers(lm)} == {"q_proj", "v_proj"}
    assert len(adapted_layers(lm)) == 2 * 2
    everywhere = load_adapted(folder_of(SHAPE), LORA)
    assert len(adapted_layers(everywhere)) == 7 * 2
    assert base_parameters(everywhere).keys() == dict(load_unpacked(folder_of(SHAPE)).named_parameters()).keys()
    assert {name for name, value in everywhere.named_parameters() if value.requires_grad} == set(
        adapter_state(everywhere)
    )
    classifier = load_reward_model(folder_of(Shape("qwen3", tied=False, classes=1)), torch.float32)
    attach(classifier, ATTENTION, seed=0)
    trained = [name for name, value in classifier.named_parameters() if value.requires_grad and "lora" not in name]
    assert trained == ["score.weight"]


def test_frozen_matrices_that_vllm_fuses_lie_together(folder_of: FolderOf) -> None:
    """Only then can it read them where they are. Control: before that they do not; values stay."""
    lm = load_adapted(folder_of(SHAPE), ATTENTION)
    before = {name: value.detach().clone() for name, value in lm.named_parameters()}

    def views() -> dict[str, bool]:
        named = base_parameters(lm)
        groups = [fused for fused in plan(named, USUAL) if len(fused.parts) > 1]
        return {fused.name: fused_view([named[part].data for part in fused.parts]) is not None for fused in groups}

    assert not any(views().values())
    lay_fused_together(lm)
    together = [name for name, found in views().items() if found]
    assert [name.split(".")[-2:] for name in together] == [["qkv_proj", "bias"], ["gate_up_proj", "weight"]] * 2
    assert all(torch.equal(value, before[name]) for name, value in lm.named_parameters())


def test_targets_that_the_model_has_not_are_refused(folder_of: FolderOf) -> None:
    """With the names that it has."""
    lm = load_causal_lm(folder_of(SHAPE), torch.float32, False)
    with pytest.raises(UserError, match=r"no linear layer \['c_attn'\]") as caught:
        attach(lm, LoraConfig(targets=["q_proj", "c_attn"]), seed=0)
    assert "down_proj, gate_proj, k_proj" in str(caught.value)
    assert all(value.requires_grad for value in lm.parameters())


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"lora": {}, "zero_stage": 3}, "'lora' needs 'zero_stage' 0, 1 or 2"),
        ({"lora": {"rank": 0}}, "greater than or equal to 1"),
        ({"lora": {"alpha": 0}}, "greater than 0"),
        ({"lora": {"targets": []}}, "at least 1 item"),
        ({"lora": {"targets": ["q_proj", "q_proj"]}}, "'targets' has 'q_proj' twice"),
        ({"lora": {"dropout": 0.1}}, "Extra inputs are not permitted"),
    ],
)
def test_settings_that_cannot_be_are_refused(section: dict[str, Any], message: str) -> None:
    """For every trained model alike."""
    for name in ("actor", "sft", "critic"):
        with pytest.raises(ValidationError, match=message):
            TrainConfig.model_validate({"algorithm": {"name": "ppo"}, name: section})


@pytest.mark.parametrize("config", [LORA, ATTENTION, LoraConfig(rank=3, targets=["k_proj", "up_proj"])])
def test_sizes_without_torch_are_the_models_own(config: LoraConfig, folder_of: FolderOf) -> None:
    """What is trained, and what the rollout engine holds beside the base: whole fused matrices."""
    shape, lm = read_shape(folder_of(SHAPE)), load_adapted(folder_of(SHAPE), config)
    assert shape.adapter_parameters(config) == sum(value.numel() for value in ordered_parameters(lm))
    assert shape.trained_parameters(config) == shape.adapter_parameters(config)
    assert (shape.trained_parameters(None), shape.adapter_parameters(None)) == (shape.parameters, 0)
    adapted = adapted_layers(lm)
    groups = [fused.parts for fused in plan(base_parameters(lm), USUAL) if not adapted.keys().isdisjoint(fused.parts)]
    whole = sum(base_parameters(lm)[part].numel() for parts in groups for part in parts)
    assert shape.merged_parameters(config) == whole
    assert sorted(name for linear in USUAL.block for name in linear.parts) == sorted(shape.matrices)


BILLION = ModelShape(
    parameters=1_000_000_000,
    layers=20,
    hidden_size=2000,
    intermediate_size=6000,
    heads=20,
    kv_heads=10,
    head_size=100,
    vocabulary=5000,
    positions=1024,
)


def test_the_memory_estimate_counts_adapters_where_all_weights_were_trained() -> None:
    """Gradients and AdamW's state shrink to them, the reference is no model of its own, merged weights are a copy."""
    rank = Rank(dict.fromkeys(("actor", "reference", "rollout"), BILLION), 1, "cuda", 2)
    kept = {"actor": Recomputed(activations=False, logits=True)}

    def phases(lora: dict[str, Any] | None) -> dict[str, dict[str, int]]:
        config = {"algorithm": {"kl": {}}, "actor": {"zero_stage": 2, "lora": lora}}
        return rank_phases(TrainConfig.model_validate(config), rank, kept)

    whole, low = phases(None), phases({"rank": 8})
    update, adapters = "update of the actor", BILLION.adapter_parameters(LoraConfig(rank=8))
    assert adapters == 20 * 8 * (2 * (2000 + 2000) + 2 * (1000 + 2000) + 3 * (2000 + 6000))
    assert (whole[update]["actor masters and moments"], low[update]["actor masters and moments"]) == (
        12e9,
        12 * adapters,
    )
    assert (whole[update]["actor gradients"], low[update]["actor gradients"]) == (4e9, 4 * adapters)
    assert low[update]["actor weights"] == 2 * (BILLION.parameters + adapters)
    assert (whole["rollout"]["reference"], "reference" in low["rollout"]) == (2e9, False)
    assert ("rollout weights" in whole["rollout"], low["rollout"]["rollout weights"]) == (
        False,
        2 * BILLION.block_matrices * 20 // BILLION.layers,
    )
    attention = phases({"rank": 8, "targets": ["o_proj"]})
    assert attention["rollout"]["rollout weights"] == 2 * 20 * 2000 * 2000
    assert low[update]["activations"] - whole[update]["activations"] == 2 * 16384 * 8 * 20 * 7


@pytest.mark.parametrize("scalar", [False, True])
def test_flops_are_those_of_pytorchs_counter_on_the_model_with_adapters(scalar: bool, folder_of: FolderOf) -> None:
    """Frozen weights get no gradient of their own; what goes through them is counted down to the embeddings."""
    folder = folder_of(SHAPE)
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    sizes, length = read_shape(folder), 9
    attach(lm, ATTENTION, seed=0)
    lm.enable_input_require_grads()
    head = nn.Linear(sizes.hidden_size, 1) if scalar else lm.lm_head
    counts = []
    with FlopCounterMode(display=False) as counter:
        hidden = lm.model(torch.full((1, length), 5)).last_hidden_state[0]
        outputs = head(hidden[2:-1])
        counts.append(counter.get_total_flops())
        outputs.sum().backward()
        counts.append(counter.get_total_flops())
    # Eager attention multiplies all pairs, ours counts those that see each other.
    unseen = 4.0 * sizes.layers * sizes.heads * sizes.head_size * (length * length - length * (length + 1) / 2)
    lengths = np.array([3]), np.array([length - 3])
    given: dict[str, Any] = {"scalar_head": scalar, "adapters": sizes.adapter_parameters(ATTENTION)}
    assert forward_flops(sizes, *lengths, **given) + unseen == counts[0]
    assert training_flops(sizes, *lengths, **given) + 3 * unseen == counts[1]


def test_a_frozen_language_head_gets_no_gradient_and_hidden_states_the_same(folder_of: FolderOf) -> None:
    """It is the largest matrix: one product of its size less is computed in the backward pass."""
    gradients, counts, batch = [], [], pack(ROWS, EVERY, CPU)
    for frozen in (False, True):
        policy = PackedPolicy(load_causal_lm(folder_of(Shape("llama", tied=False)), torch.float32, False))
        policy.head.weight.requires_grad_(not frozen)
        total = policy(batch, 1.0)[0].sum()
        with FlopCounterMode(display=False) as counter:
            total.backward()
        counts.append(counter.get_total_flops())
        gradients.append(policy.lm.model.embed_tokens.weight.grad)
        assert (policy.head.weight.grad is None) == frozen
    assert gradients[0] is not None and torch.equal(*gradients)
    assert counts[0] - counts[1] == 2 * policy.head.weight.numel() * len(batch.targets_T)

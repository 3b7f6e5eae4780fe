"""LoRA on the experts of a mixture, in one process: against plain autograd expert by expert, and PEFT.

Engines with such adapters (reshard, checkpoints): test_lora_engines.py and tests/engines/families/test_every_family.py.
Suffixes: `_NH` tokens x hidden, `_NK` tokens x experts of each.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn

from penstock.base.errors import UserError
from penstock.benchmarks.workload.families import FAMILIES, write_family
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.trainer import LoraConfig
from penstock.engines.families.shape import read_shape
from penstock.engines.families.table import family_of
from penstock.engines.models.loading import load_causal_lm
from penstock.engines.models.peft import write_adapter
from penstock.engines.sizing.memory import Rank, Recomputed, rank_phases
from penstock.engines.weights import lora as adapters
from penstock.engines.weights.broadcast import FlatSource
from penstock.engines.weights.buckets import in_buckets, numels_of
from penstock.engines.weights.experts import stacks_of_experts
from penstock.engines.weights.layout import ordered_parameters
from penstock.engines.weights.lora import (
    LoraExperts,
    adapted_layers,
    adapter_state,
    attach,
    base_parameters,
    dithered,
    merged_state,
    without_adapters,
)
from penstock.engines.weights.slices import shapes_of
from tests.engines.unpacked import load_unpacked
from tests.engines.weights.adapted import load_adapted, packed_logprobs

SHAPES = (
    "Qwen 3 MoE",
    "gpt-oss",
    "DeepSeek-V3",
)  # as most; transposed, with biases and another gate; not in all layers
LORA = LoraConfig(rank=8, alpha=12.0, targets=["o_proj"], experts=True)
LINEARS = LoraConfig(rank=8, alpha=12.0, targets=["o_proj"])
FOR_PEFT = (  # by what is beside experts: nothing; biases; an MLP with a gate; dense layers, and attention's own gate
    "Mixtral",
    "gpt-oss",
    "Qwen 2 MoE",
    "Trinity",
    "DeepSeek-V3",
    "Qwen 3 Next",  # and gated delta nets
)
MIXTURES = sorted(name for name, (model_type, _) in FAMILIES.items() if family_of(model_type).experts)
ALL, ALL_LINEARS = LoraConfig(rank=8, experts=True), LoraConfig(rank=8)
GATE_UP = ("gate_proj", "up_proj")


@pytest.fixture(scope="module", params=SHAPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture."""
    return write_family(request.param, tmp_path_factory.mktemp("mixture") / "model")


@torch.no_grad()
def test_fresh_adapters_and_adapters_switched_off_are_the_base_bit_for_bit(folder: Path) -> None:
    """Linear layers start as they do without adapters on experts. Control: in force these change every log-prob."""
    base_T = packed_logprobs(load_causal_lm(folder, torch.float32, False))
    fresh, linears = (load_causal_lm(folder, torch.float32, False) for _ in range(2))
    attach(fresh, LORA, seed=0)
    attach(linears, LINEARS, seed=0)
    assert torch.equal(packed_logprobs(fresh), base_T)
    started = adapter_state(fresh)
    assert all(torch.equal(value, started[name]) for name, value in adapter_state(linears).items())
    assert base_parameters(fresh).keys() == base_parameters(load_causal_lm(folder, torch.float32, False)).keys()
    lm = load_adapted(folder, LORA)
    nn.init.zeros_(next(layer for layer in adapted_layers(lm).values() if not isinstance(layer, LoraExperts)).lora_B)
    before_T = packed_logprobs(lm)
    assert (before_T - base_T).abs().min() > 1e-5
    with without_adapters(lm):
        assert torch.equal(packed_logprobs(lm), base_T)
    assert torch.equal(packed_logprobs(lm), before_T)


def _expert_by_expert(
    experts: Any, factors: dict[str, torch.Tensor], hidden_NH: torch.Tensor, experts_NK: torch.Tensor, shift: int
) -> torch.Tensor:
    """What experts and adapters make of each token and expert, [N, K, H], a pair at a time; `shift`: of A alone."""

    def product(name: str, number: int, value: torch.Tensor) -> torch.Tensor:
        weight = getattr(experts, name)[number].detach().to(value.dtype)
        weight = weight if experts.is_transposed else weight.t()
        found = value @ weight
        if experts.has_bias:
            found = found + getattr(experts, f"{name}_bias")[number].detach().to(value.dtype)
        a_RI = factors[f"{name}_lora.lora_A"][(number + shift) % experts.num_experts]
        b_OR = factors[f"{name}_lora.lora_B"][number]
        return found + LORA.scale * (b_OR @ (a_RI @ value))

    rows = []
    for token, chosen in enumerate(experts_NK.tolist()):
        gated = [experts._apply_gate(product("gate_up_proj", number, hidden_NH[token])) for number in chosen]
        pairs = [product("down_proj", number, value) for number, value in zip(chosen, gated, strict=True)]
        rows.append(torch.stack(pairs))
    return torch.stack(rows)


def test_outputs_and_gradients_are_those_of_plain_autograd_expert_by_expert(folder: Path) -> None:
    """In float64, of A, B, tokens and the router's weights; an expert without a token has none.

    Controls: A of the next expert gives others, and experts' own weights get none.
    """
    lm = load_adapted(folder, LORA)
    (*_, experts) = stacks_of_experts(lm).values()
    random = torch.Generator().manual_seed(3)
    count, size = experts.num_experts, lm.config.hidden_size
    hidden_NH = torch.randn(12, size, generator=random)
    experts_NK = torch.stack(
        [torch.arange(12) % (count - 1), torch.arange(1, 13) % (count - 1)], 1
    )  # the last has none
    weights_NK, grad_NH = torch.rand(12, 2, generator=random), torch.randn(12, size, generator=random)

    def found(exact: bool, shift: int = 0) -> dict[str, torch.Tensor]:
        dtype = torch.float64 if exact else torch.float32
        inputs = {"hidden": hidden_NH, "weights": weights_NK, **dict(experts.named_parameters())}
        given = {
            name: value.detach().to(dtype).requires_grad_() for name, value in inputs.items() if "_proj" not in name
        }
        factors = {name: value for name, value in experts.named_parameters() if ".lora_" in name}
        if exact:
            factors = {name: value.detach().double().requires_grad_() for name, value in factors.items()}
            each_NKH = _expert_by_expert(experts, factors, given["hidden"], experts_NK, shift)
            output_NH = (each_NKH * given["weights"].unsqueeze(2)).sum(1)
        else:
            output_NH = experts(given["hidden"], experts_NK, given["weights"])
        output_NH.backward(grad_NH.to(dtype))
        learnt = {**given, **factors}
        gradients = {name: value.grad for name, value in learnt.items() if value.grad is not None}
        assert gradients.keys() == learnt.keys()
        return {"output": output_NH.detach(), **gradients}

    ours, plain, other = found(exact=False), found(exact=True), found(exact=True, shift=1)
    assert ours.keys() == plain.keys() >= {"output", "hidden", "weights", "gate_up_proj_lora.lora_A"}
    for name, value in plain.items():
        torch.testing.assert_close(ours[name].double(), value, rtol=1e-4, atol=1e-4 * float(value.abs().max()))
        assert (other[name] - value).abs().max() > 0.01 * value.abs().max(), name
        if ".lora_" in name:
            assert not ours[name][-1].any() and ours[name][:-1].abs().amax((1, 2)).min() > 0
    assert all(value.grad is None for value in base_parameters(lm).values())


@torch.no_grad()
def test_merged_experts_are_what_the_adapters_compute(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To float32's rounding, however many are merged at a time. Control: the base."""
    lm, base, merged = (
        load_adapted(folder, LORA),
        load_causal_lm(folder, torch.float32, False),
        load_causal_lm(folder, torch.float32, False),
    )
    merged.load_state_dict(merged_state(lm), strict=True)
    torch.testing.assert_close(packed_logprobs(merged), packed_logprobs(lm), rtol=1e-5, atol=1e-5)
    assert (packed_logprobs(base) - packed_logprobs(lm)).abs().mean() > 0.05
    monkeypatch.setattr(adapters, "MERGED_AT_ONCE", 1)
    one_by_one = merged_state(lm)
    assert all(torch.equal(value, one_by_one[name]) for name, value in merged.state_dict().items())


@torch.no_grad()
def test_merged_experts_in_bfloat16_are_rounded_as_linear_layers_are(folder: Path) -> None:
    """Up or down, so that small updates do not get lost. Control: to the nearest value they are others."""
    lm = load_adapted(folder, LORA, spread=1e-3).bfloat16()
    for layer in adapted_layers(lm).values():
        if isinstance(layer, LoraExperts):
            a_ERI, b_EOR = layer.lora_A.float(), layer.lora_B.float()
            update = torch.bmm(b_EOR, a_ERI)
            exact = layer.weight.float() + layer.scale * (update.mT if layer.transposed else update)
            steps = (layer.merged().float() - exact).abs() / torch.exp2((torch.frexp(exact)[1] - 8).float())
            assert steps.max() < 1.01 and (steps > 0.51).float().mean() > 0.1
            assert torch.equal(dithered(layer.weight.float()), layer.weight)


@torch.no_grad()
@pytest.mark.parametrize("experts", [True, False])
@pytest.mark.parametrize("name", FOR_PEFT)
def test_peft_computes_the_same_from_the_adapters_folder(name: str, experts: bool, tmp_path: Path) -> None:
    """It shares no code with ours; of adapters on all linear layers, and on experts.

    Controls: the base, and that nothing in the folder is left unread.
    """
    folder = write_family(name, tmp_path / "model")
    lm = load_adapted(folder, LoraConfig(rank=8, alpha=12.0, experts=experts), spread=0.05)
    write_adapter(lm, tmp_path / "adapter")
    tokens, base, merged = torch.arange(3, 30)[None], *(load_unpacked(folder, attention="eager") for _ in range(2))
    plain = base(tokens).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PEFT only warns of missing and unknown names
        loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    theirs = loaded(tokens).logits
    merged.load_state_dict(merged_state(lm), strict=True)
    ours = merged(tokens).logits
    assert (ours - plain).abs().max() > 0.1
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_another_group_is_sent_merged_experts(folder: Path) -> None:
    """Every number of every bucket. Control: the base, of which the transposed experts keep their shape."""
    lm = load_adapted(folder, LORA)
    shapes = shapes_of(lm)
    buckets = in_buckets(numels_of(shapes), 4)
    sent = torch.cat([bucket.view(-1).clone() for bucket in FlatSource(lm, buckets).buckets()])
    for state, same in ((merged_state(lm), True), (dict(base_parameters(lm)), False)):
        assert torch.equal(sent, torch.cat([state[name].view(-1) for name in shapes])) == same


def test_experts_are_computed_without_a_wait_for_the_device(folder: Path) -> None:
    """One graph without a break, for any number of tokens: what asked for a value would break it."""
    lm = load_adapted(folder, LORA)
    (*_, experts) = stacks_of_experts(lm).values()
    compiled = torch.compile(experts.forward, backend="eager", fullgraph=True, dynamic=True)
    for tokens in (5, 9):
        hidden_NH, experts_NK = torch.randn(tokens, lm.config.hidden_size), torch.randint(0, 4, (tokens, 2))
        given = (hidden_NH, experts_NK, torch.rand(tokens, 2))
        torch.testing.assert_close(compiled(*given), experts(*given))


@pytest.mark.parametrize("name", MIXTURES)
def test_sizes_without_torch_are_the_models_own(name: str, tmp_path: Path) -> None:
    """What is trained, what a token meets of it, what vLLM has copies of; of whole MLPs for one fused matrix.

    Control: what is left out of the targets is not counted.
    """
    shape, counted = read_shape(write_family(name, tmp_path)), []
    assert shape.experts is not None
    for config in (LORA, LINEARS, ALL, ALL_LINEARS):
        lm = load_adapted(tmp_path, config)
        layers = adapted_layers(lm)
        stacks = {name: layer for name, layer in layers.items() if isinstance(layer, LoraExperts)}
        assert bool(stacks) == config.experts
        assert shape.adapter_parameters(config) == sum(value.numel() for value in ordered_parameters(lm))
        parts = {name: layer.lora_A.numel() + layer.lora_B.numel() for name, layer in layers.items()}
        others = shape.experts.count - shape.experts.chosen
        unmet = sum(parts[name] for name in stacks) // shape.experts.count * others
        assert shape.adapter_parameters_per_token(config) == sum(parts.values()) - unmet
        assert shape.merged_parameters(config) == sum(layer.weight.numel() for layer in layers.values())
        assert shape.adapters(config) == len(layers) - len(stacks)
        counted.append(shape.adapter_parameters(config))
    assert counted[2] > counted[0] > counted[1] < counted[3] < counted[2]
    by_name = {name: linear.weight.numel() for name, linear in layers.items()}
    together = sum(size for name, size in by_name.items() if ".mlp." in name and name.split(".")[-2] in GATE_UP)
    assert shape.merged_parameters(LoraConfig(targets=["up_proj"])) == together


@pytest.mark.parametrize("name", ["Qwen 2 MoE", "Trinity"])
def test_routers_rest(name: str, tmp_path: Path) -> None:
    """Nothing of them is trained, also where, as in Trinity, they are linear layers. Control: without adapters."""
    lm = load_causal_lm(write_family(name, tmp_path), torch.float32, False)
    routers = [key for key in base_parameters(lm) if not {"gate", "router"}.isdisjoint(key.split("."))]
    assert routers and all(base_parameters(lm)[key].requires_grad for key in routers if "bias" not in key)
    attach(lm, ALL, seed=0)
    assert not any(value.requires_grad for value in base_parameters(lm).values())
    assert adapted_layers(lm).keys().isdisjoint(routers)


def test_the_memory_estimate_counts_adapters_of_experts(folder: Path) -> None:
    """Their states, the outputs of A, and vLLM's copies, once also where vLLM has copies anyway. Control: without."""
    shape = read_shape(folder)
    rank = Rank(dict.fromkeys(("actor", "rollout"), shape), 1, "cuda", 2)
    recomputed = {"actor": Recomputed(activations=False, logits=False)}

    def parts(experts: bool) -> dict[str, int]:
        lora = {"rank": 8, "targets": ["o_proj"], "experts": experts}
        config = TrainConfig.model_validate({"actor": {"lora": lora}, "rollout": {"sleep": False}})
        return rank_phases(config, rank, recomputed)["update of the actor"]

    without, given = parts(False), parts(True)
    more = shape.adapter_parameters(LORA) - shape.adapter_parameters(LINEARS)
    assert more > 0
    assert given["actor weights"] - without["actor weights"] == 2 * more
    assert given["actor masters and moments"] - without["actor masters and moments"] == 12 * more
    copied = 0 if shape.family.transposed else shape.expert_parameters
    assert given["rollout weights"] - without["rollout weights"] == 2 * copied
    assert given["activations"] > without["activations"]


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    """In words, and nothing is frozen. Control: without the option it gets its adapters."""
    lm = load_causal_lm(write_family("Qwen 3", tmp_path / "model"), torch.float32, False)
    with pytest.raises(UserError, match="lora.experts has no effect: the model has no experts"):
        attach(lm, LORA, seed=0)
    assert all(value.requires_grad for value in lm.parameters())
    attach(lm, LINEARS, seed=0)
    assert adapted_layers(lm)

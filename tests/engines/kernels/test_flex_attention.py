"""FlexAttention over packed sequences: which keys its blocks hold, what it computes, and when it is taken.

On a CPU PyTorch computes it without a kernel of its own, backward as well if it is not told that this is a CPU; the
oracles are attention row by row and the Transformers library. On a GPU the compiled kernels are held against the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention as library

from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.benchmarks.workload.families import write_family
from penstock.checks.model import attention as checks
from penstock.checks.model.starting_model import check_model
from penstock.configs.evaluation import EvaluationConfig, evaluation_config
from penstock.configs.loading.load import config_from_mapping
from penstock.configs.schema import TrainConfig
from penstock.engines.batches.packing import PackedBatch, Rows, pack
from penstock.engines.commands.build import Kernels
from penstock.engines.families.attention import needs_flex
from penstock.engines.groups.machine import HOPPER
from penstock.engines.kernels import attention_kernel, flash_attention, flex_attention, gated_mlp
from penstock.engines.kernels.attention import attention_by_rows, repeat_prefixes
from penstock.engines.kernels.attention_kernel import choose_attention, kernels_on
from penstock.engines.kernels.flex_attention import BLOCK, block_mask, mask_of, packed_flex_attention
from penstock.engines.models.loading import load_causal_lm
from penstock.engines.models.models import PackedPolicy
from tests.engines.families.test_architecture import GOOD, write_model
from tests.engines.rows import random_rows
from tests.engines.unpacked import load_unpacked, row_logprobs

CPU = torch.device("cpu")
RUNS = {"several blocks": (1, 130, 3), "one block": (3, 4)}  # lengths of responses; the first two share a prompt
WINDOWS: dict[str, int | None] = {"all": None, "short": 8, "longer than a block": 150}


def _batch(lengths: tuple[int, ...], device: torch.device = CPU) -> PackedBatch:
    random = np.random.default_rng(len(lengths))
    prompts = [random.integers(3, 60, random.integers(30, 60)) for _ in lengths]
    prompts = [prompts[row - row % 2] for row in range(len(lengths))]
    responses = Ragged.of([random.integers(3, 60, length) for length in lengths], np.int32)
    mask = Ragged.of([np.ones(length, np.uint8) for length in lengths], np.uint8)
    return pack(Rows(Ragged.of(prompts, np.int32), responses, mask, {}), list(range(len(lengths))), device)


def _inputs(batch: PackedBatch, size: int = 32, value: int = 24) -> tuple[torch.Tensor, ...]:
    """Queries of four heads, keys and values of two, sinks."""
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int, size: int) -> torch.Tensor:  # heads lie first in memory, as a model's
        values = torch.randn(heads, len(batch.tokens_N), size, generator=generator)
        return values.to(batch.tokens_N.device).transpose(0, 1).requires_grad_()

    sinks = torch.randn(4, generator=generator).to(batch.tokens_N.device).requires_grad_()
    return normal(4, size), normal(2, size), normal(2, value), sinks


def _computed(function: Any, batch: PackedBatch, inputs: tuple[torch.Tensor, ...], **settings: Any) -> list[Any]:
    """The output, and the gradients of all that it depends on."""
    query_N, key_N, value_N, sinks = inputs
    key_K, value_K = (repeat_prefixes(tensor, batch.layout.shared) for tensor in (key_N, value_N))
    sunk = settings.pop("sunk", False)
    out = function(query_N, key_K, value_K, batch.layout, 0.3, sinks=sinks if sunk else None, **settings)
    weights = torch.arange(out.numel(), device=out.device).view_as(out).sin().to(out.dtype)
    return [out, *torch.autograd.grad((out * weights).sum(), inputs if sunk else inputs[:3])]


@pytest.fixture
def without_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a GPU compiles, traced alike and computed by PyTorch's own reference."""
    torch._dynamo.reset()
    monkeypatch.setattr(library, "_validate_device", lambda *_: None)
    traced = torch.compile(flex_attention.attend, dynamic=True, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(flex_attention, "_compiled", lambda: traced)
    with torch._dynamo.config.patch(specialize_float=True):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("lengths", RUNS.values(), ids=RUNS)
def test_blocks_are_listed_exactly(lengths: tuple[int, ...], window: int | None) -> None:
    """Those of which some keys are seen, and those that are seen whole; of each row from its slots, one by one.

    Control: without a window other blocks are listed.
    """
    layout = _batch(lengths).layout
    assert layout.slots_K is not None
    keys, tokens = len(layout.slots_K), int(layout.cu_queries_S1[-1])
    sequence_K, place_K = layout.slots_K // layout.max_keys, layout.slots_K % layout.max_keys
    own_N = torch.arange(keys) if layout.shared is None else layout.shared.own_N
    distance = place_K[own_N].unsqueeze(1) - place_K
    seen = (sequence_K[own_N].unsqueeze(1) == sequence_K) & (distance >= 0)
    seen &= distance < (keys if window is None else window)
    mask = block_mask(layout, tokens, keys, window)
    rows, columns = mask.kv_indices.shape[-2:]
    padded = torch.zeros(rows * BLOCK, columns * BLOCK, dtype=torch.bool)
    padded[:tokens, :keys] = seen
    blocks = padded.view(rows, BLOCK, columns, BLOCK).transpose(1, 2).flatten(2)
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    partial, whole = (
        library._ordered_to_dense(number, indices, columns)[0, 0].bool()
        for number, indices in (
            (mask.kv_num_blocks, mask.kv_indices),
            (mask.full_kv_num_blocks, mask.full_kv_indices),
        )
    )
    assert torch.equal(whole, blocks.all(-1)) and torch.equal(partial, blocks.any(-1) & ~blocks.all(-1))
    listed = mask.to_dense()
    if window == 8 and tokens > BLOCK:
        assert not torch.equal(listed, block_mask(layout, tokens, keys, None).to_dense())
    by_rule = mask.mask_mod(torch.tensor(0), torch.tensor(0), torch.arange(tokens).unsqueeze(1), torch.arange(keys))
    assert torch.equal(by_rule, seen)


def test_a_mask_is_made_once_for_a_micro_batch_and_window() -> None:
    """A window that no row reaches is none. Control: a shorter one has a mask of its own."""
    layout = _batch(RUNS["several blocks"]).layout
    assert layout.slots_K is not None
    sizes = int(layout.cu_queries_S1[-1]), len(layout.slots_K)
    first = mask_of(layout, *sizes, None)
    assert first is mask_of(layout, *sizes, None) is mask_of(layout, *sizes, layout.max_keys)
    assert first is not mask_of(layout, *sizes, 8) and len(layout.masks) == 2


@pytest.mark.parametrize("settings", [{}, {"softcap": 2.0, "sunk": True}], ids=["plain", "capped, with sinks"])
@pytest.mark.usefixtures("without_kernel")
def test_it_computes_what_attention_row_by_row_does(settings: dict[str, Any]) -> None:
    """Values narrower than keys, fewer heads of keys, shared prompts, each window; with all gradients, sinks' as well.

    Nothing is compiled for another number of tokens. Controls: another cap, and no sinks, give something else.
    """
    compiled = []
    for lengths in RUNS.values():
        batch, counted = _batch(lengths), counters["stats"]["unique_graphs"]
        inputs = _inputs(batch)
        for window in WINDOWS.values():
            ours = _computed(packed_flex_attention, batch, inputs, sliding_window=window, **settings)
            theirs = _computed(attention_by_rows, batch, inputs, sliding_window=window, **settings)
            for one, other in zip(ours, theirs, strict=True):
                assert (one - other).norm() < 1e-5 * other.norm()
            for changed in ({**settings, "softcap": 0.1}, {**settings, "sunk": not settings.get("sunk")}):
                control = _computed(attention_by_rows, batch, inputs, sliding_window=window, **changed)
                assert (ours[0] - control[0]).norm() > 1e-2 * control[0].norm()
        compiled.append(counters["stats"]["unique_graphs"] - counted)
    assert compiled == [1, 0]


@pytest.mark.parametrize(
    ("family", "recomputed"),
    [
        pytest.param("GptOssConfig", True, marks=pytest.mark.slow),
        pytest.param("Gemma2Config", False, marks=pytest.mark.exhaustive),
        pytest.param("DeepseekV3Config", False, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.usefixtures("without_kernel")
def test_a_model_on_a_gpu_has_the_librarys_log_probs_and_gradients(
    family: str, recomputed: bool, tmp_path: Path
) -> None:
    """Also where activations are recomputed. Control: the gradient of other rows is another."""
    folder, rows = write_model(tmp_path, family, GOOD[family]), random_rows(4, samples=2)
    lm = load_causal_lm(folder, torch.float32, recomputed)
    policy, oracle = PackedPolicy(lm).train(), load_unpacked(folder, attention="eager")

    def gradients(model: Any, logprobs_T: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        logprobs_T.square().sum().backward()
        grads = [value.grad for _, value in sorted(model.named_parameters()) if value.grad is not None]
        return torch.cat([grad.flatten() for grad in grads])

    def ours(chosen: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        batch = pack(rows, chosen, CPU)
        on_a_gpu = replace(batch, layout=replace(batch.layout, slots_K=None))
        logprobs_T = policy(on_a_gpu, 1.0)[0]
        assert set(on_a_gpu.layout.masks) == ({None} if family == "DeepseekV3Config" else {None, 4})
        return logprobs_T, gradients(lm, logprobs_T)

    expected_T = torch.cat([row_logprobs(oracle, rows, row)[0] for row in range(4)])
    logprobs_T, gradient = ours([0, 1, 2, 3])
    expected = gradients(oracle, expected_T)
    torch.testing.assert_close(logprobs_T, expected_T, rtol=1e-5, atol=1e-5)
    assert (gradient - expected).norm() < 1e-4 * expected.norm()
    assert (ours([0, 1, 2])[1] - expected).norm() > 1e-2 * expected.norm()


def test_what_needs_it_is_told_by_the_configuration() -> None:
    """Controls: without a cap, and with values as wide as keys, flash attention computes such models."""
    latent = {"model_type": "deepseek_v3", "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    for settings, why in (
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "caps"),
        ({"model_type": "gemma2", "attn_logit_softcapping": None}, ""),
        ({"model_type": "gpt_oss"}, "sinks"),
        (latent, "latent"),
        ({**latent, "v_head_dim": 192}, ""),
        ({"model_type": "qwen3"}, ""),
    ):
        assert why in needs_flex(settings) and bool(why) == bool(needs_flex(settings))


def test_a_rank_with_it_says_so_and_other_kernels_refuse_what_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left out in silence. Control: what does not need it has flash attention, unless it is named."""
    monkeypatch.setattr(attention_kernel, "_chosen", ["auto"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: HOPPER)
    monkeypatch.setattr(flash_attention, "obstacle", lambda: "none here")
    monkeypatch.setattr(gated_mlp, "obstacle", lambda: None)
    assert kernels_on("cuda", flex=True) == Kernels("FlexAttention", [])
    assert kernels_on("cuda", flex=False) == Kernels("FlashAttention 2", ["no FlashAttention 4: none here"])
    with pytest.raises(UserError, match="flex needs a GPU"):
        choose_attention("flex", "cpu")
    choose_attention("flex", "cuda")
    assert kernels_on("cuda").attention == "FlexAttention"
    batch = _batch(RUNS["one block"])
    query_N, key_N, value_N, _ = _inputs(batch, value=32)
    key_K, value_K = (repeat_prefixes(tensor, batch.layout.shared) for tensor in (key_N, value_N))
    sinks = {"sinks": torch.zeros(query_N.shape[1])}
    choose_attention("flash_attention_2", "cuda")
    for why, values, needed in (
        ("has attention sinks", value_K, sinks),
        ("caps", value_K, {"softcap": 1.0}),
        ("has values of another size", value_K[..., :8], {}),
    ):
        with pytest.raises(UserError, match=f"flash_attention_2: the model {why}.*no kernel") as refused:
            attention_kernel.causal_varlen_attention(query_N, key_K, values, batch.layout, None, **needed)
        assert "flex" in refused.value.remedy


def test_a_start_names_the_kernel_that_a_model_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of caps, sinks and float32 on a GPU. Controls: by itself and by name it starts; a CPU needs none."""

    def start(dtype: str = "auto", attention: str = "auto", path: str | None = None) -> None:
        source: dict[str, Any] = {"tiny": {}} if path is None else {"path": path}
        model = {"dtype": dtype, "attention": attention, **source}
        check_model(config_from_mapping({"model": model}, "test"))

    capped = str(write_model(tmp_path, "Gemma2Config", {**GOOD["Gemma2Config"], "head_dim": 16}))
    sinks = str(write_model(tmp_path / "sinks", "GptOssConfig", {**GOOD["GptOssConfig"], "head_dim": 16}))
    start("float32")
    start(path=sinks)
    with pytest.raises(UserError, match="flex needs a GPU"):
        start(attention="flex")
    monkeypatch.setattr(checks, "visible_gpus", lambda: [0])
    start("bfloat16", "flash_attention_2")
    for why, asked in (("caps", {"path": capped}), ("has", {"path": sinks}), ("computes in", {"dtype": "float32"})):
        start(**asked)
        start(**asked, attention="flex")
        with pytest.raises(UserError, match=f"flash_attention_2: the model {why} ") as refused:
            start(**asked, attention="flash_attention_2")
        assert "flex" in refused.value.remedy


def test_a_folder_that_is_none_is_left_to_the_check_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A critic's or a reward model's, where there is a GPU. Control: one that is there is read."""
    monkeypatch.setattr(checks, "visible_gpus", lambda: [0])
    capped, missing = str(write_model(tmp_path, "Gemma2Config", GOOD["Gemma2Config"])), str(tmp_path / "missing")

    def alone(folder: str) -> list[str]:
        both: list[dict[str, Any]] = [{"critic": {"path": folder}, "algorithm": {"name": "ppo"}}]
        both.append({"reward": {"model": folder}})
        return [checks.flex_alone(TrainConfig.model_validate({"model": {"tiny": {}}, **one})) for one in both]

    assert alone(missing) == ["", ""] and all("caps" in why for why in alone(capped))
    sections = {"model": {"tiny": {}}, "critic": {"path": missing}, "algorithm": {"name": "ppo"}}
    check_model(TrainConfig.model_validate(sections))


def test_an_evaluation_that_vllm_alone_computes_may_be_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the trainer's kernel. Controls: one whose KL the trainer computes, and a training, which have none."""
    folder = write_family("Qwen 3", tmp_path / "model")
    monkeypatch.setattr(checks, "visible_gpus", lambda: [0])

    def of(evaluators: list[str]) -> EvaluationConfig:
        model = {"path": str(folder), "dtype": "float32", "attention": "flash_attention_2"}
        sections: dict[str, Any] = {"model": model, "algorithm": {"kl": {}}}
        sections["evaluate"] = {"evaluators": evaluators}
        return evaluation_config(TrainConfig.model_validate(sections), folder, folder)

    check_model(of(["length"]))
    trained = {"tiny": {}, "dtype": "float32", "attention": "flash_attention_2"}
    for config in (of(["kl"]), TrainConfig.model_validate({"model": trained})):
        with pytest.raises(UserError, match="flash_attention_2: the model computes in float32"):
            check_model(config)


@pytest.mark.parametrize(("kernel", "dtype"), [("flex", "auto"), ("auto", "float32")])
def test_smaller_heads_than_it_computes_are_refused(kernel: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, and where it alone computes a model. Controls: heads of 16, and a model that does not need it."""
    monkeypatch.setattr(checks, "visible_gpus", lambda: [0])

    def start(size: int, **settings: str) -> None:
        tiny = {"hidden_size": 2 * size, "heads": 2, "kv_heads": 2}
        checks.check_attention(TrainConfig.model_validate({"model": {"tiny": tiny, **settings}}))

    start(16, attention=kernel, dtype=dtype)
    start(8)
    with pytest.raises(UserError, match="(?i)flex.*: that computes heads of at least 16 numbers.* 8"):
        start(8, attention=kernel, dtype=dtype)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("size", "value"), [(64, 64), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_kernels_compute_attention(size: int, value: int, dtype: torch.dtype) -> None:
    """As compiled for a GPU, what attention row by row computes in float64 on a CPU: the output and all gradients.

    Controls: with another window, another cap or without sinks the output is another.
    """
    gpu, host = _batch(RUNS["several blocks"], torch.device("cuda")), _batch(RUNS["several blocks"])
    inputs = tuple(tensor.detach().to(dtype).requires_grad_() for tensor in _inputs(gpu, size, value))
    exact = tuple(tensor.detach().cpu().double().requires_grad_() for tensor in inputs)
    settings: dict[str, Any] = {"sliding_window": 150, "softcap": 2.0, "sunk": True}
    ours, theirs = (
        _computed(packed_flex_attention, gpu, inputs, **settings),
        _computed(attention_by_rows, host, exact, **settings),
    )
    for one, other in zip(ours, theirs, strict=True):
        assert (one.cpu().double() - other).norm() < (2e-2 if dtype == torch.bfloat16 else 1e-4) * other.norm()
    for changed in ({"sliding_window": None}, {"softcap": 0.1}, {"sunk": False}):
        control = _computed(attention_by_rows, host, exact, **{**settings, **changed})[0]
        assert (ours[0].cpu().double() - control).norm() > 3e-2 * control.norm()

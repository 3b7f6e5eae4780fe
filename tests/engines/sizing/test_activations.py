"""The table of what is kept for the backward pass, held against what autograd keeps when a tiny model runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn

from penstock.base.ragged import Ragged
from penstock.benchmarks.workload.families import write_family
from penstock.engines.batches.packing import Rows, pack
from penstock.engines.batches.row_groups import group_rows
from penstock.engines.batches.shares import RankSet
from penstock.engines.families.shape import ModelShape, read_shape
from penstock.engines.kernels import lm_head as logprobs
from penstock.engines.kernels import sequence_parallel
from penstock.engines.kernels.fp8_blocks import compute_in_fp8
from penstock.engines.kernels.gated_mlp import gate_in_products
from penstock.engines.kernels.weight_gradients import sum_in_products
from penstock.engines.models.expert_parallel import cut_experts
from penstock.engines.models.loading import load_causal_lm
from penstock.engines.models.models import PackedPolicy, compile_blocks
from penstock.engines.sizing import memory
from penstock.engines.sizing.activations import Computation, MicroBatch, kept_bytes, keys_per_token, layer_table, total
from tests.engines.gated_kernels import plain_gated_mlp
from tests.engines.shared_ranks import Shape
from tests.engines.sums import sums_of

PARTITIONED = "aot_eager_decomp_partition"  # as on a GPU, without its kernels
FolderOf = Callable[[Shape], Path]
PROMPT, RESPONSE, ROWS = 10, 30, 8
MICRO_BATCH = MicroBatch((PROMPT + RESPONSE) * ROWS, RESPONSE * ROWS)
SHAPES = [Shape("qwen2", tied=True), Shape("qwen3", tied=False), Shape("llama", tied=True, intermediate=384)]


def _rows(samples: int) -> Rows:
    """Rows of equal length, so that spreading them for attention on a CPU pads nothing."""
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 60, PROMPT) for _ in range(ROWS // samples)]
    responses = Ragged.of([random.integers(3, 60, RESPONSE) for _ in range(ROWS)], np.int32)
    mask = Ragged(np.ones(len(responses.values_T), np.uint8), responses.offsets_B1)
    return Rows(Ragged.of([prompt for prompt in prompts for _ in range(samples)], np.int32), responses, mask, {})


def _kept(policy: nn.Module, rows: Rows, sums: Mapping[str, torch.Tensor] = MappingProxyType({})) -> int:
    """Bytes of all storage that autograd keeps for the backward pass, parameters and their sums aside, each once."""
    lasting = {tensor.untyped_storage().data_ptr() for tensor in [*policy.parameters(), *sums.values()]}
    kept: dict[int, torch.Tensor] = {}  # the tensors are held, or their addresses would be given out again

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    batch = pack(rows, list(range(ROWS)), torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = policy(batch, 1.0)
    assert outputs[0].requires_grad
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in lasting)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.architecture)
def test_the_table_is_what_autograd_keeps(shape: Shape, dtype: torch.dtype, folder_of: FolderOf) -> None:
    """Within 1 % in both dtypes, with and without query and key norms, with a narrow and a wide MLP."""
    folder = folder_of(shape)
    policy = PackedPolicy(load_causal_lm(folder, dtype, False)).train()
    predicted = kept_bytes(read_shape(folder), Computation(dtype.itemsize, "cpu"), MICRO_BATCH)
    assert predicted == pytest.approx(_kept(policy, _rows(1)), rel=0.01)


@pytest.mark.parametrize("gated", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=lambda shape: shape.architecture)
def test_the_table_is_what_compiled_blocks_keep(
    shape: Shape, gated: bool, folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same layers and partition into forward and backward pass as on a GPU, without its kernels.

    So no C++ compiler is needed. Control: what the blocks keep as they are, and with the other MLP, is something else.
    """
    folder = folder_of(shape)
    policy, sums = _compiled(folder, monkeypatch)
    if gated:
        gate_in_products(policy)
    with plain_gated_mlp():
        kept = _kept(policy, _rows(1), sums)
    sizes = read_shape(folder)

    def predicted(compiled: bool, gated: bool) -> int:
        return kept_bytes(sizes, Computation(2, "cpu", compiled, gated), MICRO_BATCH)

    assert predicted(True, gated) == pytest.approx(kept, rel=0.01)
    assert predicted(True, not gated) != pytest.approx(kept, rel=0.03)
    assert predicted(False, False) > 1.3 * kept


@pytest.mark.slow
def test_the_table_is_what_blocks_in_fp8_keep(folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the other MLP in four products: rounded rows are made again. Control: the table without it."""
    folder = folder_of(SHAPES[1])
    policy, sums = _compiled(folder, monkeypatch)
    weights = {str(number): one for number, one in enumerate(compute_in_fp8(policy).weights)}
    copies = {
        name + part: rows for name, one in weights.items() for part, rows in zip("abcd", one.tensors, strict=True)
    }
    kept = _kept(policy, _rows(1), {**sums, **copies})

    def predicted(gated: bool) -> int:
        return kept_bytes(read_shape(folder), Computation(2, "cpu", True, gated), MICRO_BATCH)

    assert predicted(True) == pytest.approx(kept, rel=0.01)
    assert predicted(False) != pytest.approx(kept, rel=0.03)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", ["Mixtral", "Qwen 2 MoE", "Qwen 3 MoE"])
def test_the_table_is_what_a_mixture_keeps(
    family: str, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without an MLP beside the experts. Control: the table of a dense model of the same other sizes."""
    lm = load_causal_lm(write_family(family, tmp_path), torch.bfloat16, False)
    if compiled:
        monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=PARTITIONED))
        compile_blocks(lm)
    policy = PackedPolicy(lm).train()
    optimizer, sums = sums_of(policy)
    if compiled:
        sum_in_products(policy, optimizer)
    kept, sizes = _kept(policy, _rows(1), sums), read_shape(tmp_path)
    computation = Computation(2, "cpu", compiled)
    assert kept_bytes(sizes, computation, MICRO_BATCH) == pytest.approx(kept, rel=0.01)
    assert kept_bytes(replace(sizes, experts=None), computation, MICRO_BATCH) != pytest.approx(kept, rel=0.05)


def _compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[PackedPolicy, dict[str, torch.Tensor]]:
    """Return a policy whose blocks are compiled, whose products add up its gradients, and these sums."""
    lm = load_causal_lm(folder, torch.bfloat16, False)
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=PARTITIONED))
    compile_blocks(lm)
    policy = PackedPolicy(lm).train()
    optimizer, sums = sums_of(policy)
    sum_in_products(policy, optimizer)
    return policy, sums


def _of_whole_chunks(
    family: str, dtype: torch.dtype, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, ModelShape, Computation, MicroBatch]:
    """Return what autograd keeps of rows of two whole chunks, and what the table gets of them."""
    monkeypatch.setitem(_rows.__globals__, "PROMPT", 40)
    monkeypatch.setitem(_rows.__globals__, "RESPONSE", 88)
    policy = PackedPolicy(load_causal_lm(write_family(family, folder), dtype, False)).train()
    batch, computation = MicroBatch(128 * ROWS, 88 * ROWS), Computation(dtype.itemsize, "cpu")
    return _kept(policy, _rows(1)), read_shape(folder), computation, batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["Qwen 3.5", "Qwen 3 Next"])
def test_the_table_is_what_gated_delta_nets_keep(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 2 %, of rows of two whole chunks. Control: the table of attention in each layer."""
    kept, sizes, computation, batch = _of_whole_chunks(family, dtype, tmp_path, monkeypatch)
    assert kept_bytes(sizes, computation, batch) == pytest.approx(kept, rel=0.02)
    assert kept_bytes(replace(sizes, delta=None), computation, batch) < 0.7 * kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["Granite 4 (Mamba 2)", "Falcon-H1", "Nemotron-H", "LFM2"])
def test_the_table_is_what_other_layers_with_a_state_keep(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 2 %, of rows of whole chunks. Control: the table of attention in each layer."""
    kept, sizes, computation, batch = _of_whole_chunks(family, dtype, tmp_path, monkeypatch)
    assert kept_bytes(sizes, computation, batch) == pytest.approx(kept, rel=0.02)
    attention = replace(sizes, mamba=None, convolution=None, without_attention=0, model_type="llama")
    assert kept_bytes(attention, computation, batch) != pytest.approx(kept, rel=0.05)


def test_rows_of_unequal_length_keep_what_the_table_says_of_their_padding(tmp_path: Path) -> None:
    """One row of 248 tokens beside seven of 24: within 2 % for its chunks. Control: without padding it is too little.

    In whole chunks it is less than the estimate counts on.
    """
    policy = PackedPolicy(load_causal_lm(write_family("Qwen 3.5", tmp_path), torch.float32, False)).train()
    lengths_S, random = np.array([248, *[24] * 7]), np.random.default_rng(0)
    responses = Ragged.of([random.integers(3, 60, length - 8) for length in lengths_S], np.int32)
    mask = Ragged(np.ones(len(responses.values_T), np.uint8), responses.offsets_B1)
    kept = _kept(policy, Rows(Ragged.of([random.integers(3, 60, 8) for _ in lengths_S], np.int32), responses, mask, {}))
    groups = group_rows(lengths_S, torch.from_numpy).groups
    computed, tokens = sum(64 * group.rows * -(-group.longest // 64) for group in groups), int(lengths_S.sum())
    assert computed < memory.PADDED * 64 * int((-(-lengths_S // 64)).sum())
    told = [
        kept_bytes(read_shape(tmp_path), Computation(4, "cpu"), MicroBatch(tokens, tokens - 64, 1.0, padded))
        for padded in (1.0, computed / tokens)
    ]
    assert told[0] < 0.8 * kept and kept < 1.02 * told[1]


def test_the_table_is_what_ranks_keep_that_exchange_heads_for_tokens(
    folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the tokens, without the other rank: what it would send has the same size. Control: all of the tokens."""
    folder, halves = folder_of(SHAPES[1]), RankSet(2, 0, None)

    def received(sent: torch.Tensor, send: object, receive: tuple[int, ...], group: object) -> torch.Tensor:
        return sent.new_ones(sum(receive), *sent.shape[1:])

    monkeypatch.setattr(sequence_parallel, "_all_to_all", received)
    monkeypatch.setitem(_kept.__globals__, "pack", partial(pack, ranks=halves))
    kept = _kept(PackedPolicy(load_causal_lm(folder, torch.float32, False)).train(), _rows(1))
    batch = MicroBatch(MICRO_BATCH.tokens // 2, MICRO_BATCH.responses // 2)
    exchanged = Computation(4, "cpu", exchanged=True)
    assert kept_bytes(read_shape(folder), exchanged, batch) == pytest.approx(kept, rel=0.01)
    assert kept_bytes(read_shape(folder), exchanged, MICRO_BATCH) > 1.9 * kept


@pytest.mark.parametrize("family", ["Mixtral", "Qwen 2 MoE"])
def test_the_table_is_what_ranks_keep_that_share_out_experts(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many tokens come from the other rank as go there: no more than of experts that are all on one.

    Control: the table of a dense model of the same other sizes.
    """
    lm, sizes = load_causal_lm(write_family(family, tmp_path), torch.float32, False), read_shape(tmp_path)

    def received(sent: torch.Tensor, send: object, receive: tuple[int, ...], group: object) -> torch.Tensor:
        return sent.new_ones(sum(receive), *sent.shape[1:])

    monkeypatch.setattr(sequence_parallel, "_all_to_all", received)
    monkeypatch.setattr(torch.distributed, "all_to_all_single", lambda received, sent, group: received.copy_(sent))
    cut_experts(lm, RankSet(2, 0, None))
    kept = _kept(PackedPolicy(lm).train(), _rows(1))
    computation = Computation(4, "cpu")
    assert kept_bytes(sizes, computation, MICRO_BATCH) == pytest.approx(kept, rel=0.01)
    assert kept_bytes(replace(sizes, experts=None), computation, MICRO_BATCH) != pytest.approx(kept, rel=0.05)


@pytest.mark.parametrize("samples", [1, 4])
def test_keys_of_shared_prompts_are_counted_as_they_are_packed(samples: int) -> None:
    """Once for the prompt, once more for each response to it."""
    batch = pack(_rows(samples), list(range(ROWS)), torch.device("cpu"))
    expected = int(batch.layout.cu_keys_S1[-1]) / len(batch.tokens_N)
    assert keys_per_token(PROMPT, RESPONSE, samples) == pytest.approx(expected)


def test_a_line_that_is_missing_would_show(folder_of: FolderOf) -> None:
    """Negative control: every line but the few numbers per token is more than the tolerance above."""
    sizes = read_shape(folder_of(SHAPES[0]))
    table = layer_table(sizes, Computation(4, "cpu"))
    numbers = {"norms' root", "query and key norms' root", "query and key norms", "attention's logsumexp"}
    assert all(kept.bytes_per_token > 0.02 * total(table) for kept in table if kept.module not in numbers)


def test_recomputation_keeps_the_blocks_inputs_and_one_block(folder_of: FolderOf) -> None:
    """Of 2 layers that is less than all, and a layer more costs only its input."""
    sizes = read_shape(folder_of(SHAPES[0]))
    deeper = type(sizes)(**{**vars(sizes), "layers": 3})
    batch, whole = MicroBatch(100, 50), Computation(2, "cuda", compiled=True)
    recomputed = [kept_bytes(shape, replace(whole, checkpointing=True), batch) for shape in (sizes, deeper)]
    assert recomputed[1] - recomputed[0] == 100 * 2 * sizes.hidden_size
    assert recomputed[0] < kept_bytes(sizes, whole, batch)


def test_the_estimates_logits_are_those_that_exist() -> None:
    """The estimate imports no torch, so it has the number once more."""
    assert memory.LOGITS_CHUNK == logprobs.LOGITS_CHUNK_BYTES

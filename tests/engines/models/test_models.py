"""The packed forward pass computes what the library computes on each row alone.

The oracle is `tests.engines.unpacked`: whole rows one at a time, PyTorch's attention, full logits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from penstock.base.errors import UserError
from penstock.configs.sections.model import TinyModel
from penstock.engines.batches.micro_batches import plan_micro_batches
from penstock.engines.batches.packing import PackedLayout, Rows, pack
from penstock.engines.kernels import attention
from penstock.engines.kernels import lm_head as logprobs
from penstock.engines.models.loading import load_causal_lm, load_reward_model
from penstock.engines.models.models import PackedCritic, PackedPolicy, PackedRewardModel
from penstock.engines.models.tiny import make_tiny_model
from tests.engines.rows import random_rows
from tests.engines.shared_ranks import EOS, PAD, VOCABULARY, Shape
from tests.engines.unpacked import load_unpacked, row_logprobs, row_tokens, row_values

CPU = torch.device("cpu")
SHAPES = [Shape("qwen2", tied=True), Shape("qwen3", tied=False), Shape("llama", tied=True)]
WINDOW = Shape("qwen2", tied=True, sliding_window=True)
FolderOf = Callable[[Shape], Path]


ROWS = random_rows(9)
SHARED = replace(ROWS, prompts=ROWS.prompts.take(np.array([4, 0, 4, 4, 1, 0, 0, 2, 4])))  # prompts of several rows
EVERY = list(range(len(ROWS)))
ORDERS: list[list[list[int]]] = [
    [EVERY],
    [EVERY[::-1]],
    [[row] for row in EVERY],
    plan_micro_batches(ROWS, 3, 30)[0] + plan_micro_batches(ROWS, 3, 30)[1] + plan_micro_batches(ROWS, 3, 30)[2],
]


def _by_row(micro_batches: Sequence[Sequence[int]], parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Flat values of several micro-batches, row by row in the order of the file."""
    lengths = ROWS.responses.lengths_B
    rows = [row for micro_batch in micro_batches for row in micro_batch]
    pieces = torch.cat(parts).split([int(lengths[row]) for row in rows])
    return [pieces[rows.index(row)] for row in EVERY]


@pytest.mark.parametrize("shape", [*SHAPES, WINDOW], ids=["qwen2", "qwen3", "llama", "window"])
@pytest.mark.parametrize("data", [ROWS, SHARED], ids=["own-prompts", "shared-prompts"])
@torch.no_grad()
def test_log_probs_are_those_of_each_row_alone_however_rows_are_packed(
    shape: Shape, data: Rows, folder_of: FolderOf
) -> None:
    """Row order, company in a micro-batch, prompts computed once and attention without padding change nothing."""
    policy = PackedPolicy(load_causal_lm(folder_of(shape), torch.float32, False)).eval()
    oracle = load_unpacked(folder_of(shape))
    for micro_batches in ORDERS:
        outputs = [policy(pack(data, rows, CPU), 0.7) for rows in micro_batches]
        logprobs = _by_row(micro_batches, [logprobs_T for logprobs_T, _ in outputs])
        entropies = _by_row(micro_batches, [entropies_T for _, entropies_T in outputs])
        for row in EVERY:
            expected_T, entropy_T = row_logprobs(oracle, data, row, temperature=0.7)
            torch.testing.assert_close(logprobs[row], expected_T, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(entropies[row], entropy_T, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_attention_that_crosses_rows_would_show(folder_of: FolderOf) -> None:
    """Negative control for the test above: the same tokens as one long sequence give other log-probs by far."""
    policy = PackedPolicy(load_causal_lm(folder_of(SHAPES[1]), torch.float32, False)).eval()
    batch = pack(ROWS, EVERY, CPU)
    length = len(batch.tokens_N)
    whole = torch.tensor([0, length], dtype=torch.int32)
    joined = PackedLayout(whole, whole, length, length, 1, None, torch.arange(length), np.array([length]))
    apart_T, _ = policy(batch, 1.0)
    joined_T, _ = policy(replace(batch, layout=joined), 1.0)
    first = int(ROWS.responses.lengths_B[0])
    torch.testing.assert_close(apart_T[:first], joined_T[:first], rtol=1e-5, atol=1e-5)  # nothing lies before row 0
    assert (apart_T[first:] - joined_T[first:]).abs().mean() > 0.1


@pytest.mark.parametrize("data", [ROWS, SHARED], ids=["own-prompts", "shared-prompts"])
def test_chunks_recomputation_and_shared_prompts_change_neither_values_nor_gradients(
    data: Rows, folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three response tokens at a time, logits kept or not, gradient checkpointing or not, against autograd by rows."""
    folder = folder_of(SHAPES[0])
    oracle = load_unpacked(folder)
    expected_B = [row_logprobs(oracle, data, row) for row in EVERY]
    (torch.cat([a for a, _ in expected_B]).square().mean() + torch.cat([b for _, b in expected_B]).mean()).backward()
    gradients = {name: parameter.grad for name, parameter in oracle.named_parameters()}
    for chunk_tokens, checkpointing, keep_logits in ((3, False, False), (3, False, True), (1 << 20, True, False)):
        monkeypatch.setattr(logprobs, "LOGITS_CHUNK_BYTES", 4 * VOCABULARY * chunk_tokens)
        lm = load_causal_lm(folder, torch.float32, checkpointing)
        logprobs_T, entropies_T = PackedPolicy(lm, keep_logits).train()(pack(data, EVERY, CPU), 1.0)
        torch.testing.assert_close(logprobs_T, torch.cat([a for a, _ in expected_B]), rtol=1e-5, atol=1e-5)
        (logprobs_T.square().mean() + entropies_T.mean()).backward()
        for name, parameter in lm.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_response_that_sees_another_prompt_would_show(folder_of: FolderOf) -> None:
    """Negative control for shared prompts: with the keys of the wrong prompt, log-probs differ by far."""
    policy = PackedPolicy(load_causal_lm(folder_of(SHAPES[1]), torch.float32, False)).eval()
    batch = pack(SHARED, EVERY, CPU)
    shared = batch.layout.shared
    assert shared is not None
    source_K = shared.source_K.clone()
    source_K[shared.copies_C] = shared.copied_C.flip(0)
    wrong = replace(batch, layout=replace(batch.layout, shared=replace(shared, source_K=source_K)))
    assert (policy(batch, 1.0)[0] - policy(wrong, 1.0)[0]).abs().mean() > 0.1


def test_values_are_those_of_each_row_alone(folder_of: FolderOf) -> None:
    """The critic values the state before each response token. It starts at zero, so its head is randomised first."""
    folder = folder_of(SHAPES[2])
    critic = PackedCritic(load_causal_lm(folder, torch.float32, False))
    torch.manual_seed(0)
    with torch.no_grad():
        assert critic(pack(ROWS, EVERY, CPU)).abs().max() == 0
        nn.init.normal_(critic.head.weight, std=0.1)
        nn.init.normal_(critic.head.bias)
        oracle = load_unpacked(folder)
        for micro_batches in ORDERS:
            values = _by_row(micro_batches, [critic(pack(ROWS, rows, CPU)) for rows in micro_batches])
            for row in EVERY:
                expected_T = row_values(oracle, critic.head, ROWS, row)
                assert expected_T.abs().max() > 0.1
                torch.testing.assert_close(values[row], expected_T, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_reward_scores_are_those_of_each_sequence_alone(folder_of: FolderOf) -> None:
    """A score is read at a sequence's last token, wherever that lies in the packed run."""
    folder = folder_of(Shape("qwen3", tied=False, classes=1))
    reward_model = PackedRewardModel(load_reward_model(folder, torch.float32)).eval()
    oracle = load_unpacked(folder, AutoModelForSequenceClassification)
    expected_B = torch.stack([oracle(input_ids=row_tokens(ROWS, row)[0]).logits[0, 0] for row in EVERY])
    assert expected_B.std() > 0.1
    torch.testing.assert_close(reward_model(pack(ROWS, EVERY, CPU)), expected_B, rtol=1e-5, atol=1e-5)
    backwards_B = reward_model(pack(ROWS, EVERY[::-1], CPU)).flip(0)
    torch.testing.assert_close(backwards_B, expected_B, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_sliding_window_that_is_left_out_would_show(folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the windowed model with all tokens in sight gives other log-probs by far."""
    policy = PackedPolicy(load_causal_lm(folder_of(WINDOW), torch.float32, False)).eval()
    windowed_T, _ = policy(pack(ROWS, EVERY, CPU), 1.0)
    monkeypatch.setattr(attention, "_window", lambda length, sliding_window: None)
    full_T, _ = policy(pack(ROWS, EVERY, CPU), 1.0)
    assert (windowed_T - full_T).abs().mean() > 0.01


def test_models_that_packing_would_run_wrongly_are_refused(folder_of: FolderOf, tmp_path: Path) -> None:
    """A cap that is not its family's may be another's; several labels are no score. Both are the user's choice."""
    capped = tmp_path / "capped"
    shutil.copytree(folder_of(SHAPES[0]), capped)
    config = json.loads((capped / "config.json").read_text(encoding="utf-8"))
    (capped / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": 30.0}), encoding="utf-8")
    with pytest.raises(UserError, match="final_logit_softcapping"):
        load_causal_lm(capped, torch.float32, False)
    with pytest.raises(UserError, match="2 labels"):
        load_reward_model(folder_of(Shape("qwen3", tied=False, classes=2)), torch.float32)


def test_a_tiny_model_is_an_ordinary_folder_and_follows_its_seed(tmp_path: Path) -> None:
    """Same seed, same weights; the global generator is left alone; the stop token is declared."""
    tiny = TinyModel(layers=1)
    state = torch.get_rng_state()
    seeds = {"a": 1, "b": 1, "c": 2}
    counts = [make_tiny_model(tmp_path / name, tiny, VOCABULARY, EOS, PAD, seed) for name, seed in seeds.items()]
    assert torch.equal(torch.get_rng_state(), state)
    a, b, c = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in "abc")
    assert counts == [sum(parameter.numel() for parameter in a.parameters())] * 3
    assert (a.generation_config.eos_token_id, a.config.vocab_size, a.config.num_hidden_layers) == (EOS, VOCABULARY, 1)
    assert len({path.stat().st_mode for path in (tmp_path / "a").iterdir()}) == 1  # whoever reads one reads all
    weights = [lm.model.layers[0].mlp.up_proj.weight for lm in (a, b, c)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])

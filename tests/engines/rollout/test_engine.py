"""A rollout's tokens are the policy's, end where they should, and come again from the same seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from penstock.base.ragged import Ragged
from penstock.configs.sections.rollout import RolloutConfig
from penstock.engines.batches.packing import Rows
from penstock.engines.commands.rollout import EngineResponses
from penstock.engines.families.shape import ModelShape, shape_of_weights
from penstock.engines.rollout.batch_sizes import CPU_KV_CACHE_LIMIT
from penstock.engines.rollout.engine import GIB, Generator, engine_arguments, kv_cache_bytes, stop_token_ids
from penstock.engines.weights.loader import Binding
from tests.engines.rows import LOSS, SPLIT, random_rows, write_rows
from tests.engines.shared_ranks import EOS, Ranks, Shape
from tests.engines.unpacked import load_unpacked, row_logprobs, row_tokens

SHAPE = Shape("qwen3", tied=False)
LIMIT = 40
PROMPTS = Ragged.of([np.arange(4, 4 + length) for length in (1, 7, 3, 12, 5, 2, 9, 4)], np.int32)
FolderOf = Callable[[Shape], Path]


@dataclass(frozen=True)
class Rollout:
    """Generates on one rank."""

    ranks: Ranks
    folder: Path

    def __call__(self, prompts: Ragged = PROMPTS, **sampling: Any) -> Any:
        return self.ranks.ask("generate", **_request(prompts, self.folder, **sampling))[0]


@pytest.fixture
def rollout(one_rank: Ranks, folder_of: FolderOf) -> Rollout:
    """A rollout engine on the starting weights."""
    folder = folder_of(SHAPE)
    one_rank.build(folder, ("actor", "rollout"), data={"max_prompt_tokens": 300})
    return Rollout(one_rank, folder)


def _request(prompts: Ragged, folder: Path, **sampling: Any) -> dict[str, Any]:
    defaults = {
        "samples": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_tokens": LIMIT,
        "ignore_eos": False,
        "seed": [7, 0, 0],
    }
    return {
        "prompts": prompts,
        "sampling": {**defaults, **sampling},
        "tokenizer": str(folder),
    }


def _responses(reply: EngineResponses) -> list[list[int]]:
    rows = reply.responses
    return [rows.row(index).tolist() for index in range(len(rows))]


def _as_rows(prompts: Ragged, samples: int, reply: EngineResponses) -> Rows:
    responses = reply.responses
    repeated = prompts.take(np.repeat(np.arange(len(prompts)), samples))
    return Rows(repeated, responses, Ragged(np.ones(len(responses.values_T), np.uint8), responses.offsets_B1), {})


def _greedy(lm: Any, prompts: Ragged, tokens: int) -> list[list[int]]:
    """The library's own greedy generation, one prompt at a time."""
    answers = []
    for row in range(len(prompts)):
        asked = torch.from_numpy(prompts.row(row).astype(np.int64))[None]
        whole = lm.generate(input_ids=asked, max_new_tokens=tokens, do_sample=False)
        answers.append(whole[0, asked.shape[1] :].tolist())
    return answers


# ---- which tokens --------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(rollout: Rollout) -> None:
    """A lost iteration is done again bit for bit; what was generated in between does not matter."""
    first, other, again = (rollout(samples=3, seed=[seed, 0, 0]) for seed in (7, 8, 7))
    np.testing.assert_array_equal(first.responses.values_T, again.responses.values_T)
    np.testing.assert_array_equal(first.responses.offsets_B1, again.responses.offsets_B1)
    assert _responses(first) != _responses(other)
    rows = _responses(first)
    assert len({tuple(row) for row in rows}) > len(PROMPTS)  # samples of a prompt differ from each other


def test_greedy_tokens_are_the_librarys(rollout: Rollout) -> None:
    """Temperature 0, and the likeliest token alone at temperature 1: rows in prompt order, samples side by side."""
    expected = _greedy(load_unpacked(rollout.folder), PROMPTS, LIMIT)
    assert len({tuple(row) for row in expected}) > 1
    assert _responses(rollout(temperature=0.0)) == expected
    assert _responses(rollout(samples=2, top_k=1)) == [row for row in expected for _ in range(2)]


@pytest.mark.slow
@torch.no_grad()
def test_tokens_are_drawn_at_the_temperature_asked_for(rollout: Rollout) -> None:
    """The mean log-prob of samples is minus the mean entropy of what they come from; at other temperatures not."""
    lm = load_unpacked(rollout.folder)
    reply = rollout(samples=8, temperature=0.5)
    rows = _as_rows(PROMPTS, 8, reply)
    gaps = {}
    for temperature in (0.4, 0.5, 0.65):
        scored = [row_logprobs(lm, rows, row, temperature) for row in range(len(rows))]
        gaps[temperature] = float(torch.cat([a + b for a, b in scored]).mean())
    assert len(reply.responses.values_T) > 1000
    assert abs(gaps[0.5]) < 0.1
    assert gaps[0.4] < -0.2
    assert gaps[0.65] > 0.2


@torch.no_grad()
def test_nucleus_and_top_k_leave_out_the_tail(rollout: Rollout) -> None:
    """No token outside the nucleus or the k likeliest. Control: without them there are such tokens."""
    lm = load_unpacked(rollout.folder)

    def ranks_and_masses(**sampling: Any) -> tuple[np.ndarray, np.ndarray]:
        """Of every token: how many were likelier, and their probability together."""
        rows = _as_rows(PROMPTS, 2, rollout(samples=2, **sampling))
        likelier = []
        for row in range(len(rows)):
            tokens, prompt = row_tokens(rows, row)
            probs_TV = lm(input_ids=tokens).logits[0, prompt - 1 : -1].softmax(-1)
            above_TV = probs_TV > probs_TV.gather(-1, tokens[0, prompt:, None])
            likelier.append(torch.stack([above_TV.sum(-1).float(), (probs_TV * above_TV).sum(-1)]))
        ranks_T, masses_T = torch.cat(likelier, dim=1).numpy()
        return ranks_T, masses_T

    free_ranks, free_masses = ranks_and_masses()
    assert (free_ranks.max() >= 5, free_masses.max() > 0.6) == (True, True)
    assert ranks_and_masses(top_k=5)[0].max() < 5
    assert ranks_and_masses(top_p=0.5)[1].max() < 0.5 + 1e-5


# ---- where they end ------------------------------------------------------------------------------------------------


def test_a_stop_token_ends_a_response_and_belongs_to_it(rollout: Rollout) -> None:
    """The policy is trained on ending; what was cut at the limit is flagged, what ended by itself is not."""
    reply = rollout(samples=8)
    rows, truncated = _responses(reply), reply.truncated_B.tolist()
    assert len(rows) == len(truncated) == 8 * len(PROMPTS)
    assert 0 < sum(truncated) < len(rows)
    for row, cut in zip(rows, truncated, strict=True):
        assert EOS not in row[:-1]
        assert (len(row) == LIMIT and row[-1] != EOS) if cut else row[-1] == EOS


def test_stop_tokens_can_be_ignored_for_benchmarks(rollout: Rollout) -> None:
    """Every response then has the full length; the same seed's control above shows that some would have ended."""
    reply = rollout(samples=8, ignore_eos=True)
    assert set(reply.responses.lengths_B.tolist()) == {LIMIT}
    assert reply.truncated_B.all()
    assert any(EOS in row[:-1] for row in _responses(reply))


def test_texts_are_the_decoded_responses(rollout: Rollout) -> None:
    """Without the stop token and other special ones: rewards compare text."""
    reply = rollout()
    tokenizer = AutoTokenizer.from_pretrained(rollout.folder)
    plain = [[token for token in row if token not in tokenizer.all_special_ids] for row in _responses(reply)]
    texts = reply.texts.to_pylist()
    assert texts == [tokenizer.decode(row) for row in plain]
    assert any(row[-1] == EOS for row in _responses(reply))
    assert all("<eos>" not in text for text in texts)


# ---- on which weights ----------------------------------------------------------------------------------------------


def test_prefixes_cached_under_older_weights_are_forgotten(rollout: Rollout, tmp_path: Path) -> None:
    """A rollout after an update computes its prompts anew, and says which policy version it comes from.

    Control: if the cache is kept, vLLM's log-probs of the same prompt are no longer the trainer's.
    """
    ranks = rollout.ranks
    long = Ragged.of([np.random.default_rng(0).integers(3, 60, 290)], np.int32)
    asked = {"prompts": long.values_T, "offsets": long.offsets_B1, "tokens": 8}
    assert rollout(long).policy_version == 0  # its blocks are cached from here on
    path = write_rows(tmp_path / "rows.parquet", random_rows(8))
    ranks.ask("update_actor", path=path, version=0, split=SPLIT, loss=LOSS, learning_rate=1e-2)
    ranks.ask("reshard", version=1)
    kept = ranks.ask("rollout_logprobs", **asked, keep_prefixes=True)[0]
    assert np.abs(kept["vllm"] - kept["trainer"]).mean() > 0.05
    ranks.ask("export", folder=str(tmp_path / "exported"))
    reply = rollout(long, temperature=0.0, max_tokens=20)
    assert _responses(reply) == _greedy(load_unpacked(tmp_path / "exported"), long, 20)
    assert reply.policy_version == 1
    assert _responses(reply) != _greedy(load_unpacked(rollout.folder), long, 20)


# ---- settings ------------------------------------------------------------------------------------------------------


def test_a_rank_imports_nothing_that_no_rank_needs(rollout: Rollout) -> None:
    """Libraries of seconds, which others import in passing. Control: those that it trains and generates with."""
    (found,) = rollout.ranks.ask("imported", names=["mlflow", "sklearn", "scipy", "deepspeed", "transformers", "vllm"])
    assert found["names"] == ["deepspeed", "transformers", "vllm"]


def test_stop_tokens_come_from_the_generation_settings_and_else_from_the_config() -> None:
    """Chat models declare several; a model that declares none never stops by itself."""

    def lm(generation: Any, config: Any) -> Any:
        return SimpleNamespace(
            generation_config=SimpleNamespace(eos_token_id=generation), config=SimpleNamespace(eos_token_id=config)
        )

    assert stop_token_ids(lm([3, 5], 1)) == [3, 5]
    assert stop_token_ids(lm(0, 1)) == [0]
    assert stop_token_ids(lm(None, 1)) == [1]
    assert stop_token_ids(lm(None, None)) == []


def test_the_kv_cache_holds_all_sequences_unless_told_otherwise() -> None:
    """128 tokens x 2 x 2 layers x 2 heads x 32 x 4 bytes a block; one sequence more than asked for, then the limit.

    A model that says nothing of heads of keys has as many as of queries.
    """
    sizes = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 8, "vocab_size": 8}
    whole = {**sizes, "num_attention_heads": 4}
    model = shape_of_weights({**whole, "num_key_value_heads": 2}, {})
    block = 128 * 2 * 2 * 2 * 32 * 4

    def size(length: int, sequences: int, shape: ModelShape = model, **settings: Any) -> int:
        return kv_cache_bytes(RolloutConfig(**settings), sequences, shape, length, torch.float32, cuda=False)

    assert size(128, 3) == 4 * block
    assert size(129, 3) == 8 * block
    assert size(129, 3, kv_cache_gib=0.25) == GIB // 4
    assert size(128, 3, tensor_parallel=2) == size(128, 3, tensor_parallel=4) == 2 * block
    assert size(128, 3, shape_of_weights(whole, {})) == 8 * block
    assert size(1 << 20, 256) <= CPU_KV_CACHE_LIMIT


def test_an_engine_is_started_as_the_recipe_says() -> None:
    """CUDA graphs of every size on a GPU unless refused, and never on a CPU; the GPUs of an engine."""

    def started(gpu: int | None, **settings: Any) -> dict[str, Any]:
        return engine_arguments(RolloutConfig(**settings), 12, 99, GIB, gpu=gpu, sleeps=False, logprobs=False)

    assert started(0)["cudagraph_capture_sizes"][:7] == [1, 2, 4, 8, 12, 16, 24]
    assert not started(0)["enforce_eager"]
    for without in (started(0, cuda_graphs=False), started(None)):
        assert without["enforce_eager"]
        assert without["cudagraph_capture_sizes"] is None
    assert [started(0, tensor_parallel=ranks)["tensor_parallel_size"] for ranks in (1, 2)] == [1, 2]


def test_an_engine_with_states_keeps_them_in_float32_and_needs_no_flashinfer() -> None:
    """Nor does it keep prefixes. Control: another is left to vLLM."""

    def started(states: bool) -> dict[str, Any]:
        return engine_arguments(RolloutConfig(), 12, 99, GIB, gpu=0, sleeps=False, logprobs=False, states=states)

    with_states, without = started(True), started(False)
    assert with_states["mamba_ssm_cache_dtype"] == "float32" and not with_states["enable_prefix_caching"]
    assert with_states["additional_config"] == {"gpu": 0, "gdn_prefill_backend": "triton"}
    assert "mamba_ssm_cache_dtype" not in without and without["additional_config"] == {"gpu": 0}


def test_compiled_code_of_another_gpu_is_another_engines() -> None:
    """vLLM finds compiled code by a hash of its settings; so is that of other products. Control: of the same GPU."""
    from vllm.config import VllmConfig

    def found_by(gpu: int | None, **settings: Any) -> str:
        started = engine_arguments(RolloutConfig(**settings), 12, 99, GIB, gpu=gpu, sleeps=False, logprobs=False)
        return VllmConfig(additional_config=started["additional_config"]).compute_hash()

    assert len({found_by(gpu) for gpu in (None, 0, 1, 1)}) == 3
    assert len({found_by(0), found_by(0, weights="auto"), found_by(0, weights="fp8"), found_by(1, weights="fp8")}) == 3


@pytest.mark.parametrize("emptied", [True, False])
def test_a_prefix_cache_that_keeps_older_prefixes_ends_the_generation(emptied: bool) -> None:
    """vLLM only says so where a request still holds some of its cache."""
    generator = Generator.__new__(Generator)
    generator.asleep, generator.dropped, generator.own_reshard, generator.looks_anew = set(), False, None, False
    generator.llm = SimpleNamespace(reset_prefix_cache=lambda: emptied)
    generator.loop = SimpleNamespace(version=7, keys_of=None)  # type: ignore[assignment]
    if emptied:
        generator.wake()
        assert generator.loop.keys_of == 7
        return
    with pytest.raises(RuntimeError, match="build on older weights"):
        generator.wake()


def test_an_engine_falls_asleep_once_after_it_was_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one whose weights alone were woken for a reshard, or one that has its GPU to itself."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, 2 * GIB))
    generator = Generator.__new__(Generator)
    generator.sleeps, generator.asleep, generator.own_reshard = True, set(), None
    generator.llm = SimpleNamespace(sleep=lambda **settings: calls.append(settings))
    generator.sleep()
    generator.sleep()
    assert calls == [{"level": 1}]
    generator.asleep.remove("weights")
    generator.sleep()
    assert len(calls) == 1
    generator.asleep.clear()
    generator.sleep()
    assert len(calls) == 2
    generator.sleeps, generator.asleep = False, set()
    generator.sleep()
    assert len(calls) == 2


@pytest.mark.parametrize("layers", [("layer",), ()], ids=["with copies", "without"])
def test_copies_in_fp8_are_dropped_in_sleep_and_made_again(
    layers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the reshard that this group makes alone. Control: where all is the trainer's nothing is dropped."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, 2 * GIB))
    calls: list[Any] = []
    generator = Generator.__new__(Generator)
    generator.sleeps, generator.asleep, generator.unmapped, generator.looks_anew = True, set(), 0, False
    generator.dropped, generator.images = False, None
    generator.binding, generator.own_reshard = Binding((), (), layers), lambda: calls.append("weights") or 0
    generator.fp8_copies = lambda: calls.append("copies") or 0  # type: ignore[assignment]
    generator.llm = SimpleNamespace(
        sleep=lambda level: calls.append(level),
        wake_up=lambda tags: calls.extend(tags),
        reset_prefix_cache=lambda: True,
    )
    generator.loop = SimpleNamespace(version=7, keys_of=None)  # type: ignore[assignment]
    generator.sleep()
    generator.wake()
    assert calls == ([2, "weights", "weights", "copies", "kv_cache"] if layers else [1, "weights", "kv_cache"])

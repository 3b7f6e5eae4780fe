"""A model that sees, through the real engines: vLLM and the trainer compute the same for prompts with images.

In float32 on a CPU, by the commands that a training uses. That packed rows are the library's: models/test_seeing.py.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.base.ragged import Ragged, offsets_of
from penstock.configs.schema import TrainConfig
from penstock.state.experience import write_columns
from tests.engines.rows import LOSS, SPLIT
from tests.engines.seeing import PROMPTS, Seen, library_logprobs, library_model, seen_rows, write_seeing_model
from tests.engines.shared_ranks import SMALL, Ranks

EQUAL, OTHER = 1e-5, 1e-2  # mean difference of log-probs in float32
SECTIONS = {"data": {"max_prompt_tokens": 64, "images": "images"}}


def _sampled(ranks: Ranks, seen: Seen, seed: int) -> tuple[Ragged, np.ndarray]:
    """What vLLM samples after the prompts, and its log-probs, in the order of the prompts."""
    asked = {"prompts": seen.prompts, "images": seen.images, "tokens": 6, "seed": [seed, 0, 9]}
    reply = ranks.ask("sample_to_compare", **asked)[0]
    order = np.argsort(reply.positions_P)
    logprobs = Ragged(reply.logprobs_T, reply.responses.offsets_B1).take(order)
    return reply.responses.take(order), logprobs.values_T


def _trainers(ranks: Ranks, seen: Seen, responses: Ragged) -> np.ndarray:
    asked = {"prompts": seen.prompts, "images": seen.images, "responses": responses, "budget": 10_000}
    reply = ranks.ask("logprobs_to_compare", **asked)[0]
    lengths_B = responses.lengths_B[reply.rows]
    return Ragged(reply.values_T, offsets_of(lengths_B)).take(np.argsort(reply.rows)).values_T


def _step(ranks: Ranks, seen: Seen, path: Path) -> None:
    """An update on the rows with their images, hard enough to change every weight of the decoder."""
    tokens = len(seen.responses.values_T)
    advantages = np.random.default_rng(1).normal(size=tokens).astype(np.float32)
    offsets_B1 = seen.responses.offsets_B1
    columns = {
        "prompt_tokens": seen.prompts,
        "response_tokens": seen.responses,
        "images": seen.images,
        "loss_mask": Ragged(np.ones(tokens, np.uint8), offsets_B1),
        "advantages": Ragged(advantages, offsets_B1),
    }
    write_columns(path, columns)
    split = {**SPLIT, "micro_batch_tokens": 64}
    ranks.ask("update_actor", path=str(path), version=0, split=split, loss=LOSS, learning_rate=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "learns"),
    [
        ("qwen2_5_vl", False),
        pytest.param("qwen2_5_vl", True, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_vl", False, marks=pytest.mark.exhaustive),
        ("qwen3_vl", True),
    ],
)
def test_vllm_and_trainer_see_the_same(one_rank: Ranks, tmp_path: Path, family: str, learns: bool) -> None:
    """Before and after an update with images and a reshard; what is exported the library loads, and computes the same.

    Controls: with other pictures the trainer gives the same tokens other log-probs; and so it does after the update,
    with which vLLM has not caught up. With the encoder of before the update, and all else of after it, the library
    gives tokens other log-probs than vLLM if the encoder learns.
    """
    model = write_seeing_model(tmp_path / "model", family)
    seen = seen_rows(model, tmp_path / "images")
    others = seen_rows(model, tmp_path / "images", seed=1)
    of_model = {"path": str(model), "train_encoder": learns}
    config = TrainConfig(**{**SMALL, "model": of_model, **SECTIONS}).model_dump(mode="json")
    one_rank.ask("discard")
    asked = {"config": config, "folder": str(model), "roles": ["actor", "rollout"]}
    built = one_rank.ask("build", **asked, images=str(tmp_path / "images"))[0]
    assert built.parameters_shared > 0 == built.parameters_copied
    assert (built.trained < built.parameters) != learns

    tokens, vllm_T = _sampled(one_rank, seen, seed=0)
    assert np.abs(vllm_T - _trainers(one_rank, seen, tokens)).mean() < EQUAL
    assert np.abs(vllm_T - _trainers(one_rank, replace(others, responses=tokens), tokens)).mean() > OTHER

    _step(one_rank, seen, tmp_path / "rows.parquet")
    assert np.abs(vllm_T - _trainers(one_rank, seen, tokens)).mean() > OTHER
    one_rank.ask("reshard", version=1)
    assert one_rank.ask("mismatches")[0]["names"] == []
    tokens, vllm_T = _sampled(one_rank, seen, seed=1)
    assert np.abs(vllm_T - _trainers(one_rank, seen, tokens)).mean() < EQUAL

    one_rank.ask("export", folder=str(tmp_path / "written"))
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "written"))
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert moved == {name for name in before if learns or "visual." not in name}
    save_file({name: (before if "visual." in name else after)[name] for name in after}, _copy_of(tmp_path / "written"))
    of_library = (_library_logprobs(tmp_path / folder, seen, tokens, vllm_T) for folder in ("written", "stale"))
    vllm_rows_T, library_T = next(of_library)
    assert np.abs(vllm_rows_T - library_T).mean() < EQUAL
    vllm_rows_T, stale_T = next(of_library)
    assert (np.abs(vllm_rows_T - stale_T).mean() > OTHER) == learns


def _copy_of(folder: Path) -> Path:
    """Copy a model's folder beside itself; return the file of its weights."""
    copy = shutil.copytree(folder, folder.parent / "stale")
    return copy / "model.safetensors"


def _library_logprobs(folder: Path, seen: Seen, tokens: Ragged, vllm_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """vLLM's log-probs, and the library's with a folder's weights, of the responses that the library reads as such."""
    lm, written = library_model(folder), replace(seen, responses=tokens)
    texts = [row for row in range(len(PROMPTS)) if lm.config.image_token_id not in tokens.row(row)]
    assert len(texts) > 3  # the library takes a sampled image token for one more image
    with torch.no_grad():
        library_T = torch.cat([library_logprobs(lm, written, row) for row in texts])
    return Ragged(vllm_T, tokens.offsets_B1).take(np.asarray(texts)).values_T, library_T.numpy()

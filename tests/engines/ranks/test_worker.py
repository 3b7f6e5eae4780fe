"""The worker's forward commands: every row once, on whichever rank, and as the model alone would answer.

Updates, rollout, reshard and checkpoints have files of their own beside this one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from penstock.configs.schema import TrainConfig
from penstock.configs.sections.model import TinyModel
from penstock.data.tokenizer import make_byte_tokenizer
from tests.engines.rows import SPLIT, gathered, random_rows, take_rows, with_columns, write_rows
from tests.engines.shared_ranks import Ranks, Shape
from tests.engines.unpacked import load_unpacked, row_logprobs, row_values

FolderOf = Callable[[Shape], Path]


@torch.no_grad()
@pytest.mark.parametrize(("count", "budget"), [(7, 10_000), (7, 40), (1, 40)])
def test_log_probs_come_once_per_row_from_whichever_rank(
    count: int, budget: int, two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """Two ranks share the rows out, also a single row; back in file order they are the oracle's."""
    folder, rows = folder_of(Shape("llama", tied=True)), take_rows(random_rows(8, samples=2), list(range(count)))
    two_ranks.build(folder, ("actor", "reference"), algorithm={"kl": {}}, actor={"zero_stage": 3})
    path = write_rows(tmp_path / "rows.parquet", rows)
    lm = load_unpacked(folder)
    expected_T = torch.cat([row_logprobs(lm, rows, row, 0.8)[0] for row in range(count)]).numpy()
    for role in ("actor", "reference"):
        replies = two_ranks.ask("logprobs", path=path, role=role, temperature=0.8, budget=budget)
        assert [len(reply.rows) > 0 for reply in replies] == [True, count > 1]
        np.testing.assert_allclose(gathered(rows, replies), expected_T, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_values_are_the_trained_critics(two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path) -> None:
    """After a few steps, so that the values are not the zeros they start as; from a folder that is not the actor's."""
    folder, bare = folder_of(Shape("qwen3", tied=False)), random_rows(8, samples=2)
    actor = folder_of(Shape("qwen2", tied=True))
    rows = with_columns(bare, {"values": np.zeros(len(bare.responses.values_T))})
    path = write_rows(tmp_path / "rows.parquet", rows)
    two_ranks.build(actor, ("critic",), algorithm={"name": "ppo"}, critic={"zero_stage": 2, "path": str(folder)})
    split = {**SPLIT, "epochs": 3}
    two_ranks.ask("update_critic", path=path, split=split, clip=None, learning_rate=1e-2)
    values_T = gathered(rows, two_ranks.ask("values", path=path, budget=64))
    trained = two_ranks.parameters("critic")
    lm, head = load_unpacked(folder), nn.Linear(128, 1)
    lm.base_model.load_state_dict(
        {name.removeprefix("backbone."): value for name, value in trained.items() if name.startswith("backbone.")}
    )
    head.load_state_dict({name: trained[f"head.{name}"] for name in ("weight", "bias")})
    expected_T = torch.cat([row_values(lm, head, rows, row) for row in range(len(rows))]).numpy()
    assert np.abs(expected_T).max() > 0.1
    np.testing.assert_allclose(values_T, expected_T, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_each_rank_scores_its_own_texts_in_order(two_ranks: Ranks, folder_of: FolderOf) -> None:
    """Ranks may have different numbers of texts, also none; micro-batches within a rank change no score."""
    folder = folder_of(Shape("qwen3", tied=False, classes=1))
    two_ranks.build(folder_of(Shape("qwen3", tied=False)), ("reward",), reward={"model": str(folder)})
    texts = ["12+34=046.", "a", "a longer text than the others", "7", "12+34=047."]
    tokenizer, oracle = AutoTokenizer.from_pretrained(folder), load_unpacked(folder, AutoModelForSequenceClassification)
    expected = [oracle(torch.tensor([tokenizer(text)["input_ids"]])).logits[0, 0].item() for text in texts]
    for budget in (12, 10_000):
        shares = two_ranks.ask_each("score", [{"texts": texts}, {"texts": []}], budget=budget)
        assert shares[0].scores_B.tolist() == pytest.approx(expected, abs=1e-5)
        assert shares[1].scores_B.tolist() == []
    assert np.std(expected) > 0.1


def test_a_tiny_model_is_made_once_beside_its_tokenizer(two_ranks: Ranks, tmp_path: Path) -> None:
    """Rank 0 writes; when the command returns it is there for all ranks, and it trains and generates like any other."""
    make_byte_tokenizer(tmp_path)
    config = TrainConfig(model={"tiny": TinyModel(layers=1).model_dump()}, seed=3)
    two_ranks.ask("make_tiny", config=config.model_dump(mode="json"), folder=str(tmp_path))
    built = two_ranks.build(tmp_path, ("actor", "rollout"))
    assert built.parameters == sum(parameter.numel() for parameter in load_unpacked(tmp_path).parameters())
    assert built.parameters_copied == 0

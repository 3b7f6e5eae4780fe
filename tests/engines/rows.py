"""Experience for the engine tests: random ragged rows, as a file and in memory, and settings to train on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.base.ragged import Ragged, offsets_of
from penstock.engines.batches.packing import Rows, pack
from penstock.engines.commands.forward import TokenValues
from penstock.state.experience import write_columns
from tests.engines.shared_ranks import VOCABULARY

SPLIT: dict[str, Any] = {
    "mini_batches": 1,
    "epochs": 1,
    "samples": 2,
    "together": 2,
    "micro_batch_tokens": 10_000,
    "max_response_tokens": 20,
    "aggregation": "token-mean",
    "seed": 0,
}
LOSS: dict[str, Any] = {
    "policy_loss": "ppo_clip",
    "settings": {"clip_low": 0.2, "clip_high": 0.3},
    "temperature": 1.0,
    "entropy_coefficient": 0.0,
    "kl_estimator": None,
    "kl_coefficient": 0.0,
}


def random_rows(count: int, seed: int = 0, samples: int = 1) -> Rows:
    """Ragged rows with advantages and returns, `samples` in a row with the same prompt.

    The first response is one token long; the last row counts nothing, and every third row not its first token.
    """
    random = np.random.default_rng([seed, count])
    prompts = [random.integers(3, VOCABULARY, random.integers(1, 9)) for _ in range(count)]
    prompts = [prompts[row - row % samples] for row in range(count)]
    lengths = [1, *random.integers(1, 20, count - 1).tolist()]
    responses = Ragged.of([random.integers(3, VOCABULARY, length) for length in lengths], np.int32)
    masks = [np.ones(length, np.uint8) for length in lengths]
    for row in range(2, count, 3):
        masks[row][0] = 0
    if count > 1:
        masks[-1][:] = 0
    tokens = len(responses.values_T)
    columns = {
        "advantages": Ragged(random.normal(size=tokens).astype(np.float32), responses.offsets_B1),
        "returns": Ragged(random.normal(size=tokens).astype(np.float32), responses.offsets_B1),
    }
    return Rows(Ragged.of(prompts, np.int32), responses, Ragged.of(masks, np.uint8), columns)


def branched_rows(seed: int = 0) -> Rows:
    """Paths of a tree, with advantages and returns of each path's own and some tokens that do not count.

    Row by row: a conversation; two that branch off it, the second in mid-turn; one that branches off the last; the same
    once more; one that ends where others branch; another answer to the same prompt; an agent whose prompt is the first
    turn of them all, and one that begins within it; one by itself.
    """
    random = np.random.default_rng(seed)

    def said(length: int) -> list[int]:
        return random.integers(3, VOCABULARY, length).tolist()

    prompt, first, second = said(5), said(90), said(70)
    paths = [
        (prompt, [*first, *said(10)]),
        (prompt, [*first, *second, *said(7)]),
        (prompt, [*first[:80], *said(4)]),
        (prompt, [*first, *second, *(last := said(9))]),
        (prompt, [*first, *second, *last]),
        (prompt, first),
        (prompt, said(12)),
        ([*prompt, *first], said(11)),
        ([*prompt, *first, *said(3)], said(6)),
        (said(7), said(20)),
    ]
    prompts, responses = (Ragged.of(column, np.int32) for column in zip(*paths, strict=True))
    tokens = len(responses.values_T)
    mask = Ragged((random.random(tokens) < 0.9).astype(np.uint8), responses.offsets_B1)
    values = {name: random.normal(size=tokens).astype(np.float32) for name in ("advantages", "returns")}
    return with_columns(Rows(prompts, responses, mask, {}), values)


def with_columns(rows: Rows, columns: Mapping[str, np.ndarray]) -> Rows:
    """The rows with more columns, each flat over all response tokens."""
    ragged = {name: Ragged(values.astype(np.float32), rows.responses.offsets_B1) for name, values in columns.items()}
    return Rows(rows.prompts, rows.responses, rows.mask, {**rows.columns, **ragged})


def take_rows(rows: Rows, index: list[int]) -> Rows:
    """Some of the rows, in the order given."""
    index_B = np.asarray(index)
    columns = {name: column.take(index_B) for name, column in rows.columns.items()}
    return Rows(rows.prompts.take(index_B), rows.responses.take(index_B), rows.mask.take(index_B), columns)


def planned(rows: Rows, plan: list[list[list[int]]]) -> tuple[int, int]:
    """Pack the runs of all ranks; return the tokens that they compute, and those spared besides equal prompts."""
    runs = [pack(rows, micro, torch.device("cpu")) for rank in plan for micro in rank if micro]
    return sum(len(run.tokens_N) for run in runs), sum(run.branched for run in runs)


def write_rows(path: Path, rows: Rows) -> str:
    """Write the rows as an experience file; its path as commands take it."""
    columns = {"prompt_tokens": rows.prompts, "response_tokens": rows.responses, "loss_mask": rows.mask}
    write_columns(path, {**columns, **rows.columns})
    return str(path)


def gathered(rows: Rows, replies: Sequence[TokenValues]) -> np.ndarray:
    """One flat column in file order out of the ranks' shares; every row must have come exactly once."""
    order = np.concatenate([reply.rows for reply in replies])
    assert sorted(order.tolist()) == list(range(len(rows)))
    values = np.concatenate([reply.values_T for reply in replies])
    column = Ragged(values, offsets_of(rows.responses.lengths_B[order]))
    return column.take(np.argsort(order)).values_T

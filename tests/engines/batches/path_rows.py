"""Samples of several conversations, as an experience file has them, and each conversation as a row of its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.base.ragged import Ragged
from penstock.engines.batches.packing import Rows
from penstock.engines.batches.paths import paths_of
from tests.engines.rows import with_columns
from tests.engines.shared_ranks import VOCABULARY


@dataclass(frozen=True)
class PathRows:
    """Samples and their paths, with the same tokens in the same order.

    Attributes:
        alone: the paths by hand, each a row with the columns of its tokens.
        sample_P: whose they are.
        columns: of an experience file.
    """

    samples: Rows
    alone: Rows
    sample_P: list[int]
    columns: dict[str, Ragged]


def rows_of_paths(seed: int = 0) -> PathRows:
    """Four samples of two prompts.

    One conversation; two from scratch; one that branches after its first turn, twice, and begins anew at last; one
    whose second path begins where its first one does. Some tokens do not count.
    """
    random = np.random.default_rng(seed)

    def said(length: int) -> list[int]:
        return random.integers(3, VOCABULARY, length).tolist()

    prompt, other, first, told = said(5), said(6), said(80), said(4)
    samples = [
        [(prompt, said(12))],
        [(prompt, said(7)), (said(9), said(5))],
        [
            (prompt, [*first, *told, *said(6)]),
            ([*prompt, *first, *said(3)], said(8)),
            ([*prompt, *first, *told], said(5)),
            (said(4), said(11)),
        ],
        [(other, said(9)), (other, said(10))],
    ]
    paths = [path for sample in samples for path in sample]
    sample_P = [number for number, sample in enumerate(samples) for _ in sample]
    prompts, responses = (Ragged.of(column, np.int32) for column in zip(*paths, strict=True))
    tokens = len(responses.values_T)
    mask_T = (random.random(tokens) < 0.8).astype(np.uint8)
    advantages_T = random.normal(size=tokens)
    alone = Rows(prompts, responses, Ragged(mask_T, responses.offsets_B1), {})
    whole = Ragged.of([[token for _, response in sample for token in response] for sample in samples], np.int32)
    columns = {
        "prompt_tokens": Ragged.of([sample[0][0] for sample in samples], np.int32),
        "response_tokens": whole,
        "loss_mask": Ragged(mask_T, whole.offsets_B1),
        "path_ends": Ragged.of([np.cumsum([len(told) for _, told in sample]) for sample in samples], np.int32),
        "path_prompt_tokens": Ragged.of(
            [[token for begins, _ in sample[1:] for token in begins] for sample in samples], np.int32
        ),
        "path_prompt_ends": Ragged.of(
            [np.cumsum([len(begins) for begins, _ in sample[1:]]) for sample in samples], np.int32
        ),
        "advantages": Ragged(advantages_T.astype(np.float32), whole.offsets_B1),
    }
    found = paths_of(columns["prompt_tokens"], whole, columns)
    rows = Rows(columns["prompt_tokens"], whole, columns["loss_mask"], {"advantages": columns["advantages"]})
    of_samples = Rows(rows.prompts, rows.responses, rows.mask, rows.columns, paths=found)
    return PathRows(of_samples, with_columns(alone, {"advantages": advantages_T}), sample_P, columns)

"""Which rows go together: rows to ranks and micro-batches, so that every rank has equal work and prompts stay shared.

The samples of a prompt stand next to each other, and the forward pass computes a prompt once for all its samples in a
micro-batch (engines/packing.py). So the rows are laid out as one line, prompt by prompt, and the line is cut into
pieces of equal length: at most one prompt per cut is computed twice, and as each cut is made at the row nearest to
its ideal place, errors do not add up over a rank's micro-batches.

The plan is a pure function of the rows, so every rank computes the same plan by itself and nothing is sent. All ranks
run the same number of micro-batches, because gradients are reduced in step.

Suffixes: `_B` rows, `_B1` offsets (B+1).
"""

from __future__ import annotations

import numpy as np

from engines.packing import Rows, first_seen
from state.experience import offsets_of


def plan_micro_batches(
    rows: Rows, ranks: int, budget: int, index_B: np.ndarray | None = None, together: int = 1
) -> list[list[list[int]]]:
    """Return plan[rank][micro_batch] -> row numbers, each micro-batch within `budget` tokens where rows allow it.

    Every rank gets the same number of micro-batches. A row longer than the budget gets one of its own. A list may
    be empty when there are fewer rows than places; `pack` then makes a run that counts nothing.

    Args:
        index_B: the rows to plan; None for all.
        together: so many rows that follow each other, all of one prompt, are never cut apart.
    """
    index_B = np.arange(len(rows)) if index_B is None else index_B
    index_B = index_B[np.argsort(first_seen(rows.prompt_ids_B[index_B]), kind="stable")]
    ids_B, prompts_B = rows.prompt_ids_B[index_B], rows.prompts.lengths_B[index_B]
    opens_B = np.append(True, ids_B[1:] != ids_B[:-1])[: len(index_B)]
    line_B1 = offsets_of(rows.responses.lengths_B[index_B] + np.where(opens_B, prompts_B, 0))
    again_B = np.where(opens_B, 0, prompts_B)  # what a piece that begins with this row computes once more
    most = max(1, -(-len(index_B) // (together * ranks)))  # a unit each; more would only be empty
    count = min(most, max(1, -(-int(line_B1[-1]) // (budget * ranks))))
    while True:
        cuts = [together * unit for unit in _cuts(line_B1[::together], count * ranks)]
        pieces = list(zip(cuts[:-1], cuts[1:], strict=True))
        heaviest = max(
            (line_B1[stop] - line_B1[start] + again_B[start] for start, stop in pieces if stop - start > together),
            default=0,
        )
        if heaviest <= budget or count >= most:
            lists = [index_B[start:stop].tolist() for start, stop in pieces]
            return [lists[rank * count : (rank + 1) * count] for rank in range(ranks)]
        count += 1


def planned_tokens(rows: Rows, plan: list[list[list[int]]]) -> int:
    """Return the tokens that all forward passes of a plan run together; a shared prompt counts once in each."""
    micro_batches = [np.asarray(micro, dtype=np.int64) for rank in plan for micro in rank if micro]
    prompts = (micro[np.unique(rows.prompt_ids_B[micro], return_index=True)[1]] for micro in micro_batches)
    return sum(
        int(rows.responses.lengths_B[micro].sum() + rows.prompts.lengths_B[first].sum())
        for micro, first in zip(micro_batches, prompts, strict=True)
    )


def _cuts(line_B1: np.ndarray, pieces: int) -> list[int]:
    """Rows at which to cut so that each cut is as near as possible to its place on the line."""
    ideal = line_B1[-1] * np.arange(1, pieces) / pieces
    after = np.searchsorted(line_B1, ideal)
    before = np.maximum(after - 1, 0)
    nearest = np.where(line_B1[after] - ideal <= ideal - line_B1[before], after, before)
    return [0, *nearest.tolist(), len(line_B1) - 1]

"""From ragged experience to packed micro-batches: which rows go together, and the flat tensors of one forward pass.

Rows are never padded: one micro-batch is a flat run of tokens with offsets. The plan (rows to ranks and micro-batches)
is a pure function of the lengths, so every rank computes the same plan by itself and nothing is sent. All ranks run
the same number of micro-batches, because gradients are reduced in step.

Suffixes: `_N` all tokens of a micro-batch, `_T` its response tokens, `_B` rows, `_B1` offsets (B+1).
Left out: the forward pass (engines/models.py) and the losses (algorithms/).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from state.experience import Ragged, offsets_of


@dataclass(frozen=True)
class PackedLayout:
    """Where the sequences of a packed run lie; what attention needs to keep them apart."""

    cu_seqlens_B1: torch.Tensor  # int32, on the device
    max_length: int
    rows: int
    slots_N: torch.Tensor | None  # row x max_length + position, for attention on CPU


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch on the device."""

    tokens_N: torch.Tensor
    positions_N: torch.Tensor
    layout: PackedLayout
    predict_T: torch.Tensor  # index into N of the token whose hidden state predicts (and values) response token t
    targets_T: torch.Tensor
    mask_T: torch.Tensor  # float 0/1: the model's own tokens
    offsets_B1: torch.Tensor  # response tokens per row
    columns: dict[str, torch.Tensor]  # per-token columns: old log-probs, advantages, ...


@dataclass(frozen=True)
class Rows:
    """Prompt and response tokens of a whole experience file, with its per-token columns, in host memory."""

    prompts: Ragged
    responses: Ragged
    mask: Ragged
    columns: Mapping[str, Ragged]

    @property
    def lengths_B(self) -> np.ndarray:
        """Prompt plus response tokens per row."""
        return self.prompts.lengths_B + self.responses.lengths_B

    def __len__(self) -> int:
        return len(self.prompts)


def partition(lengths: np.ndarray, bins: int) -> list[list[int]]:
    """Split items into `bins` lists of nearly equal total length: longest first, each to the lightest bin.

    Ties go to the lower item and the lower bin, so the result depends on the lengths alone.
    """
    heap = [(0, index) for index in range(bins)]
    result: list[list[int]] = [[] for _ in range(bins)]
    for item in np.argsort(-lengths, kind="stable").tolist():
        load, index = heapq.heappop(heap)
        result[index].append(item)
        heapq.heappush(heap, (load + int(lengths[item]), index))
    return result


def plan_micro_batches(lengths_B: np.ndarray, ranks: int, budget: int) -> list[list[list[int]]]:
    """Return plan[rank][micro_batch] -> row indices, each micro-batch within `budget` tokens where rows allow it.

    Every rank gets the same number of micro-batches. A row longer than the budget gets one of its own. A list may
    be empty when there are fewer rows than places; `pack` then makes a run that counts nothing.
    """
    most = max(1, -(-len(lengths_B) // ranks))  # a row each; more would only be empty
    count = min(most, max(1, -(-int(lengths_B.sum()) // (budget * ranks))))
    while True:
        bins = partition(lengths_B, count * ranks)
        heaviest = max((int(lengths_B[rows].sum()) for rows in bins if len(rows) > 1), default=0)
        if heaviest <= budget or count >= most:
            return [bins[rank::ranks] for rank in range(ranks)]
        count += 1


def pack(rows: Rows, index: list[int], device: torch.device) -> PackedBatch:
    """Pack the given rows into one micro-batch on `device`.

    An empty `index` gives row 0 with its mask at zero: the forward pass happens (collectives stay in step), and
    nothing of it counts.
    """
    chosen_B = np.asarray(index or [0], dtype=np.int64)
    prompts, responses, mask = rows.prompts.take(chosen_B), rows.responses.take(chosen_B), rows.mask.take(chosen_B)
    lengths_B = prompts.lengths_B + responses.lengths_B
    starts_B = offsets_of(lengths_B)[:-1]
    positions_N = _ramp(lengths_B)
    # The prompt of row b fills N[starts[b]:], its response follows; `into` scatters a ragged column there.
    tokens_N = np.empty(int(lengths_B.sum()), dtype=np.int64)
    tokens_N[_into(starts_B, prompts.lengths_B)] = prompts.values_T
    responses_at = _into(starts_B + prompts.lengths_B, responses.lengths_B)
    tokens_N[responses_at] = responses.values_T
    weight = 0.0 if not index else 1.0
    return PackedBatch(
        tokens_N=_to(tokens_N, device),
        positions_N=_to(positions_N, device),
        layout=_layout(lengths_B, positions_N, device),
        predict_T=_to(responses_at - 1, device),
        targets_T=_to(responses.values_T.astype(np.int64), device),
        mask_T=_to(mask.values_T.astype(np.float32) * np.float32(weight), device),
        offsets_B1=_to(responses.offsets_B1, device),
        columns={name: _to(column.take(chosen_B).values_T, device) for name, column in rows.columns.items()},
    )


def _layout(lengths_B: np.ndarray, positions_N: np.ndarray, device: torch.device) -> PackedLayout:
    longest = int(lengths_B.max())
    slots_N = None
    if device.type == "cpu":
        slots_N = torch.from_numpy(np.repeat(np.arange(len(lengths_B)) * longest, lengths_B) + positions_N)
    return PackedLayout(_to(offsets_of(lengths_B).astype(np.int32), device), longest, len(lengths_B), slots_N)


def _into(starts_B: np.ndarray, lengths_B: np.ndarray) -> np.ndarray:
    """Flat destinations of rows that begin at `starts` and have `lengths` entries."""
    return np.repeat(starts_B, lengths_B) + _ramp(lengths_B)


def _ramp(lengths_B: np.ndarray) -> np.ndarray:
    """0, 1, ... within each row."""
    return np.arange(int(lengths_B.sum())) - np.repeat(offsets_of(lengths_B)[:-1], lengths_B)


def _to(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)

"""From ragged experience to packed micro-batches: the flat tensors of one forward pass.

Rows are never padded, and a prompt is computed once for all its samples in a micro-batch: its tokens stand once in the
run, followed by the responses. Only attention sees that a response continues a prompt which lies elsewhere: each
response's queries get the keys of prompt and response, gathered. For 8 samples of a prompt of 256 tokens and
responses of 1,024 this spares 17 % of all layers' work, and changes no result: a prompt's hidden states do not depend
on what follows it.

Suffixes: `_N` tokens of a run, `_K` keys (a shared prompt's once per response), `_S` sequences of attention, `_T`
response tokens, `_B` rows, `_F` families (rows of one prompt), `_P` pieces (a family's prompt or a row's response).
Left out: which rows go together (penstock/engines/batches/micro_batches.py), the forward pass
(penstock/engines/models/models.py), losses (penstock/algorithms/).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from penstock.base.ragged import Ragged, offsets_of
from penstock.state.experience import column_names, read_columns

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class SharedPrompts:
    """How keys of shared prompts are repeated for each response, and their gradients added up again."""

    source_K: torch.Tensor  # token of the run that a key comes from
    own_N: torch.Tensor  # a token's key in its own sequence
    copies_C: torch.Tensor  # the other keys, repeated from a prompt
    copied_C: torch.Tensor  # tokens that those come from


@dataclass(frozen=True)
class PackedLayout:
    """Where the sequences of attention lie: queries are consecutive tokens of the run, keys may begin with a prompt."""

    cu_queries_S1: torch.Tensor  # int32, on the device
    cu_keys_S1: torch.Tensor
    max_queries: int
    max_keys: int
    sequences: int
    shared: SharedPrompts | None  # None: every sequence's keys are its own tokens
    slots_K: torch.Tensor | None  # sequence x max_keys + position, for attention on CPU


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch on the device."""

    tokens_N: torch.Tensor
    positions_N: torch.Tensor
    layout: PackedLayout
    predict_T: torch.Tensor  # index into N of the token whose hidden state predicts (and values) response token t
    last_B: torch.Tensor  # index into N of a row's last token
    targets_T: torch.Tensor
    mask_T: torch.Tensor  # float 0/1: the model's own tokens
    offsets_B1: torch.Tensor  # response tokens per row
    columns: dict[str, torch.Tensor]  # per-token columns: old log-probs, advantages, ...


@dataclass(frozen=True)
class Rows:
    """Prompt and response tokens of a whole experience file, with its per-token columns, in host memory.

    `accepted_B`: whether an update looks at a row at all; None for all rows.
    """

    prompts: Ragged
    responses: Ragged
    mask: Ragged
    columns: Mapping[str, Ragged]
    accepted_B: np.ndarray | None = None

    @property
    def lengths_B(self) -> np.ndarray:
        """Prompt plus response tokens per row."""
        return self.prompts.lengths_B + self.responses.lengths_B

    @property
    def prompt_ids_B(self) -> np.ndarray:
        """A number per row, equal where prompts are equal; found once, also for rows with other columns."""
        return self.prompts.ids_B

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, index_B: np.ndarray) -> Rows:
        """Return some of the rows, in the order given."""
        columns = {name: column.take(index_B) for name, column in self.columns.items()}
        accepted_B = None if self.accepted_B is None else self.accepted_B[index_B]
        prompts, responses, mask = (column.take(index_B) for column in (self.prompts, self.responses, self.mask))
        return Rows(prompts, responses, mask, columns, accepted_B)


@dataclass(frozen=True)
class PackedInTurn(Sequence[Batch]):
    """Micro-batches, each packed when its turn comes: while the device works on the one before.

    So one of them is on the device at a time, and the first does not wait for the last.
    """

    plan: list[list[int]]
    pack: Callable[[list[int]], Batch]

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, number: Any) -> Any:
        return self.pack(self.plan[number])


@dataclass(frozen=True)
class _Places:
    """Where prompts and responses of the chosen rows lie in the run; host memory."""

    family_B: np.ndarray
    first_F: np.ndarray  # a family's first row
    prompt_F: np.ndarray  # lengths
    response_B: np.ndarray
    prompt_start_F: np.ndarray
    response_start_B: np.ndarray

    @property
    def prompt_end_B(self) -> np.ndarray:
        """Behind the last token of a row's prompt."""
        return (self.prompt_start_F + self.prompt_F)[self.family_B]

    @property
    def tokens(self) -> int:
        """Length of the run."""
        return int(self.prompt_F.sum() + self.response_B.sum())


def read_rows(path: str, columns: Sequence[str] = ()) -> Rows:
    """Read an experience file's tokens, which rows are accepted if it says so, and the per-token columns asked for."""
    accepted = ("accepted",) if "accepted" in column_names(path) else ()
    read = read_columns(path, ("prompt_tokens", "response_tokens", "loss_mask", *accepted, *columns))
    named = {name: read[name] for name in columns}
    accepted_B = read["accepted"] > 0 if accepted else None
    return Rows(read["prompt_tokens"], read["response_tokens"], read["loss_mask"], named, accepted_B)


def pack(rows: Rows, index: list[int], device: torch.device) -> PackedBatch:
    """Pack the given rows into one micro-batch on `device`.

    An empty `index` gives the shortest row, its mask and columns at zero: the forward pass happens (collectives stay in
    step), and nothing of it counts, not even a NaN.
    """
    if not index:
        rows, index = uncounted(rows, [_shortest(rows)]), [0]
    chosen_B = np.asarray(index, dtype=np.int64)
    responses, mask = rows.responses.take(chosen_B), rows.mask.take(chosen_B)
    places = _place(rows.prompt_ids_B[chosen_B], rows.prompts.lengths_B[chosen_B], responses.lengths_B)
    prompts = rows.prompts.take(chosen_B[places.first_F])
    prompts_at = _into(places.prompt_start_F, places.prompt_F)
    responses_at = _into(places.response_start_B, places.response_B)
    tokens_N = np.empty(places.tokens, dtype=np.int64)
    tokens_N[prompts_at], tokens_N[responses_at] = prompts.values_T, responses.values_T
    positions_N = np.empty_like(tokens_N)
    positions_N[prompts_at] = _ramp(places.prompt_F)
    positions_N[responses_at] = _ramp(places.response_B) + np.repeat(
        places.prompt_F[places.family_B], places.response_B
    )
    return PackedBatch(
        tokens_N=to_device(tokens_N, device),
        positions_N=to_device(positions_N, device),
        layout=_layout(places, device),
        predict_T=to_device(_predicting(places, responses_at), device),
        last_B=to_device(_last(places), device),
        targets_T=to_device(responses.values_T.astype(np.int64), device),
        mask_T=to_device(mask.values_T.astype(np.float32), device),
        offsets_B1=to_device(responses.offsets_B1, device),
        columns={name: to_device(column.take(chosen_B).values_T, device) for name, column in rows.columns.items()},
    )


def uncounted(rows: Rows, index: list[int]) -> Rows:
    """Return some of the rows with their mask and columns at zero: nothing that comes of them is a NaN."""
    taken = rows.take(np.asarray(index, dtype=np.int64))

    def zeros(column: Ragged) -> Ragged:
        return Ragged(np.zeros_like(column.values_T), column.offsets_B1)

    columns = {name: zeros(column) for name, column in taken.columns.items()}
    return replace(taken, mask=zeros(taken.mask), columns=columns)


def _shortest(rows: Rows) -> int:
    """Return the shortest row with a response, or the shortest of all if none has one.

    Without a response the language head would have no part in the pass.
    """
    lengths_B = np.where(rows.responses.lengths_B > 0, rows.lengths_B, np.iinfo(np.int64).max)
    return int(lengths_B.argmin())


def _place(ids_B: np.ndarray, prompts_B: np.ndarray, response_B: np.ndarray) -> _Places:
    """Lay out each family's prompt, then its rows' responses."""
    _, first_F, family_B = np.unique(first_seen(ids_B), return_index=True, return_inverse=True)
    order_B, members_F = np.argsort(family_B, kind="stable"), np.bincount(family_B)
    prompt_F = prompts_B[first_F]
    # Pieces in order: a family's prompt, its responses, the next family's prompt, ...
    prompt_at_F = np.arange(len(first_F)) + offsets_of(members_F)[:-1]
    response_at_B = np.empty(len(ids_B), dtype=np.int64)
    response_at_B[order_B] = np.arange(len(ids_B)) + family_B[order_B] + 1
    lengths_P = np.empty(len(first_F) + len(ids_B), dtype=np.int64)
    lengths_P[prompt_at_F], lengths_P[response_at_B] = prompt_F, response_B
    starts_P = offsets_of(lengths_P)[:-1]
    return _Places(family_B, first_F, prompt_F, response_B, starts_P[prompt_at_F], starts_P[response_at_B])


def _predicting(places: _Places, responses_at: np.ndarray) -> np.ndarray:
    """The token before each response token; before the first one it is the prompt's last, wherever that lies."""
    predict_T = responses_at - 1
    any_B = places.response_B > 0
    predict_T[offsets_of(places.response_B)[:-1][any_B]] = places.prompt_end_B[any_B] - 1
    return predict_T


def _last(places: _Places) -> np.ndarray:
    end_B = places.response_start_B + places.response_B
    return np.where(places.response_B > 0, end_B, places.prompt_end_B) - 1


def _layout(places: _Places, device: torch.device) -> PackedLayout:
    """Sequences of attention in the order of the run.

    A family of one row is one sequence, prompt and response. In a larger one the prompt is a sequence by itself, and
    each response one whose keys begin with the prompt's.
    """
    alone_F = np.bincount(places.family_B) == 1
    alone_B = alone_F[places.family_B]
    prompt_queries_F = places.prompt_F.copy()
    prompt_queries_F[places.family_B[alone_B]] += places.response_B[alone_B]
    start_S = np.concatenate([places.prompt_start_F, places.response_start_B])
    queries_S = np.concatenate([prompt_queries_F, np.where(alone_B, 0, places.response_B)])
    before_S = np.concatenate([np.zeros_like(places.prompt_F), places.prompt_F[places.family_B]])
    prompt_S = np.concatenate([places.prompt_start_F, places.prompt_start_F[places.family_B]])
    order_S = np.argsort(start_S, kind="stable")
    order_S = order_S[queries_S[order_S] > 0]
    queries_S, before_S, prompt_S = queries_S[order_S], before_S[order_S], prompt_S[order_S]
    keys_S = queries_S + before_S
    slots_K = None
    if device.type == "cpu":
        slots_K = torch.from_numpy(np.repeat(np.arange(len(keys_S)) * int(keys_S.max()), keys_S) + _ramp(keys_S))
    return PackedLayout(
        cu_queries_S1=to_device(offsets_of(queries_S).astype(np.int32), device),
        cu_keys_S1=to_device(offsets_of(keys_S).astype(np.int32), device),
        max_queries=int(queries_S.max()),
        max_keys=int(keys_S.max()),
        sequences=len(keys_S),
        shared=_shared(queries_S, before_S, prompt_S, device) if before_S.any() else None,
        slots_K=slots_K,
    )


def _shared(queries_S: np.ndarray, before_S: np.ndarray, prompt_S: np.ndarray, device: torch.device) -> SharedPrompts:
    starts_S = offsets_of(queries_S + before_S)[:-1]
    own_N, copies_C = _into(starts_S + before_S, queries_S), _into(starts_S, before_S)
    copied_C = _into(prompt_S, before_S)
    source_K = np.empty(len(own_N) + len(copies_C), dtype=np.int64)
    source_K[own_N], source_K[copies_C] = np.arange(len(own_N)), copied_C
    return SharedPrompts(*(to_device(array, device) for array in (source_K, own_N, copies_C, copied_C)))


def first_seen(ids_B: np.ndarray) -> np.ndarray:
    """Number ids by the order in which they first appear: [7, 3, 7] -> [0, 1, 0]."""
    _, first, inverse_B = np.unique(ids_B, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse_B]


def _into(starts_B: np.ndarray, lengths_B: np.ndarray) -> np.ndarray:
    """Flat destinations of rows that begin at `starts` and have `lengths` entries."""
    return np.repeat(starts_B, lengths_B) + _ramp(lengths_B)


def _ramp(lengths_B: np.ndarray) -> np.ndarray:
    """0, 1, ... within each row."""
    return np.arange(int(lengths_B.sum())) - np.repeat(offsets_of(lengths_B)[:-1], lengths_B)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to the device; a GPU copies while the host goes on."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)

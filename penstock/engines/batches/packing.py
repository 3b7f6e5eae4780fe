"""From ragged experience to packed micro-batches: the flat tensors of one forward pass.

Rows are never padded, and what rows of a micro-batch begin with in common is computed once
(penstock/engines/batches/trees.py): the prompt of all its samples, whose tokens stand once in the run, followed by the
responses, and with it what branches of a conversation have in common. Only attention sees that a row continues tokens
which lie elsewhere: its own tokens are the queries, and get the keys of the whole row, gathered. For 8 samples of a
prompt of 256 tokens and responses of 1,024 this spares 17 % of all layers' work, and changes no result: a token's
hidden states do not depend on what follows it. Response tokens that rows share have one log-prob, which the loss reads
for each of the rows.

Suffixes: `_N` tokens of a run, `_K` keys (shared ones once per row), `_S` sequences of attention, `_T` response tokens,
`_U` response tokens, shared ones once, `_R` tokens of all rows, whole, `_B` rows.
Where rows are of several conversations these are what is packed (penstock/engines/batches/paths.py).
Left out: which rows go together (penstock/engines/batches/micro_batches.py), the forward pass
(penstock/engines/models/models.py), losses (penstock/algorithms/).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from penstock.base.ragged import Ragged, offsets_of
from penstock.engines.batches.images import ImageTokens, PackedImages, with_images
from penstock.engines.batches.paths import Paths, paths_of
from penstock.engines.batches.row_groups import RowGroups, group_rows
from penstock.engines.batches.shares import ALONE, RankSet, cut
from penstock.engines.batches.trees import Alike, Origins, alike_of, into, origins_of
from penstock.state.experience import IMAGES, PATH_ENDS, PATHS, ROUTES, column_names, read_columns

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class SharedPrefixes:
    """How keys of shared tokens are repeated for each row, and their gradients added up again."""

    source_K: torch.Tensor  # token of the run that a key comes from
    own_N: torch.Tensor  # a token's key in its own sequence
    copies_C: torch.Tensor  # the other keys, repeated from other sequences
    copied_C: torch.Tensor  # tokens that those come from


@dataclass(frozen=True)
class SharedTargets:
    """Response tokens that several rows share: which are looked at, and which of these each is."""

    first_U: torch.Tensor  # index into T
    of_T: torch.Tensor  # index into U


@dataclass(frozen=True)
class Share:
    """This rank's share of a run that several ranks compute together (penstock/engines/batches/shares.py)."""

    ranks: RankSet
    run: int  # tokens of the run
    tokens: tuple[int, ...]  # of each rank; a run of fewer tokens than ranks has more behind it, which nothing looks at
    predict_O: torch.Tensor  # index into the own tokens: what predicts distinct response tokens
    targets_O: torch.Tensor
    targets: tuple[int, ...]  # how many of those each rank has
    place_U: torch.Tensor  # where a distinct response token lies among those of all ranks

    @property
    def own_tokens(self) -> int:
        """How many tokens this rank has."""
        return self.tokens[self.ranks.own]


@dataclass(frozen=True)
class PackedLayout:
    """Where the sequences of attention lie: queries are consecutive tokens of the run, keys may begin elsewhere."""

    cu_queries_S1: torch.Tensor  # int32, on the device
    cu_keys_S1: torch.Tensor
    max_queries: int
    max_keys: int
    sequences: int
    shared: SharedPrefixes | None  # None: every sequence's keys are its own tokens
    slots_K: torch.Tensor | None  # sequence x max_keys + position, for attention on CPU
    keys_S: np.ndarray  # how many keys each has, on the host
    share: Share | None = None  # None: this rank computes the run alone
    # By sliding window, which keys tokens see: made by a GPU's kernel when it first asks (kernels/flex_attention.py).
    masks: dict[int | None, Any] = field(default_factory=dict, compare=False, repr=False)

    @functools.cached_property
    def row_groups(self) -> RowGroups:
        """The sequences side by side, for layers that carry a state; made when the first of them asks."""
        return group_rows(self.keys_S, functools.partial(to_device, device=self.cu_keys_S1.device))


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch on the device."""

    tokens_N: torch.Tensor  # with a share, as positions_N, the own ones; indices are into the whole run all the same
    positions_N: torch.Tensor
    layout: PackedLayout
    predict_T: torch.Tensor  # index into N of the token whose hidden state predicts (and values) response token t
    last_B: torch.Tensor  # index into N of the last token of a row, or of each of its paths
    targets_T: torch.Tensor
    mask_T: torch.Tensor  # float 0/1: the model's own tokens
    offsets_B1: torch.Tensor  # response tokens per row; those of all its paths
    columns: dict[str, torch.Tensor]  # per-token columns: old log-probs, advantages, ...
    shared: SharedTargets | None  # None: no two rows share a response token
    computed: int  # tokens of the run, if it counts
    branched: int  # tokens that it need not compute, besides those of equal prompts
    routes_NW: torch.Tensor | None = None  # int16: experts of each layer that they took in the rollout; -1: not known
    images: PackedImages | None = None  # of rows that may have images; then tokens below 0 stand for these

    def distinct(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return what belongs to response tokens, for those that rows share once: for U."""
        return values_T if self.shared is None else values_T.index_select(0, self.shared.first_U)

    @property
    def own(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What this rank computes of the distinct response tokens: indices into tokens_N that predict, and targets."""
        if (share := self.layout.share) is not None:
            return share.predict_O, share.targets_O
        return self.distinct(self.predict_T), self.distinct(self.targets_T)

    def each(self, values_U: torch.Tensor) -> torch.Tensor:
        """Return for every response token what is known of the distinct ones; the gradients of shared ones add up."""
        return values_U if self.shared is None else values_U.index_select(0, self.shared.of_T)


@dataclass(frozen=True)
class Rows:
    """Prompt and response tokens of a whole experience file, with its per-token columns, in host memory.

    `accepted_B`: whether an update looks at a row at all; None for all rows. `routes`: of each token the experts that
    it took in the rollout, layer after layer, as unsigned numbers of which the largest says that it is not known.
    `paths`: the conversations that rows are made of; None: each is one. `images`: what tokens below 0 stand for.
    """

    prompts: Ragged
    responses: Ragged
    mask: Ragged
    columns: Mapping[str, Ragged]
    accepted_B: np.ndarray | None = None
    routes: Ragged | None = None
    paths: Paths | None = None
    images: ImageTokens | None = None

    @property
    def lengths_B(self) -> np.ndarray:
        """Prompt plus response tokens per row."""
        return self.prompts.lengths_B + self.behind_prompts_of(np.arange(len(self)))

    def behind_prompts_of(self, index_B: np.ndarray) -> np.ndarray:
        """Tokens of the given rows but for their prompts; those of further paths are among them."""
        lengths_B = self.responses.lengths_of(index_B)
        return lengths_B if self.paths is None else lengths_B + self.paths.further_prompts_of(index_B)

    @property
    def sequences(self) -> Rows:
        """The conversations, one a row, as a forward pass has them; without columns where rows have several."""
        if self.paths is None:
            return self
        mask = Ragged(self.mask.values_T, self.paths.responses.offsets_B1)
        return Rows(self.paths.prompts, self.paths.responses, mask, {})

    @property
    def prompt_ids_B(self) -> np.ndarray:
        """A number per row, equal where prompts are equal; found once, also for rows with other columns."""
        return self.prompts.ids_B

    @property
    def shared_B(self) -> np.ndarray:
        """First tokens of each row that another row has, and that are computed there if the two go together."""
        shared_B = np.empty(len(self), dtype=np.int64)
        shared_B[self.arranged.order_B] = self.arranged.origins.shared_B
        return shared_B

    @functools.cached_property
    def arranged(self) -> Arranged:
        """All rows, prompt by prompt."""
        return _arrange(self, np.arange(len(self)))

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, index_B: np.ndarray) -> Rows:
        """Return some of the rows, in the order given."""
        columns = {name: column.take(index_B) for name, column in self.columns.items()}
        accepted_B = None if self.accepted_B is None else self.accepted_B[index_B]
        prompts, responses, mask = (column.take(index_B) for column in (self.prompts, self.responses, self.mask))
        routes = None if self.routes is None else self.routes.take(index_B)
        paths = None if self.paths is None else self.paths.take(index_B)
        return Rows(prompts, responses, mask, columns, accepted_B, routes, paths, self.images)


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
class Arranged:
    """Chosen rows prompt by prompt, as in a run, and what they share.

    Attributes:
        order_B: which of the chosen rows this is.
        prompts_B: tokens of its prompt.
        families_B: 0, 0, 1, ... the same for rows of the same prompt.
        alike: the rows, by their numbers here, that may share more than prompts.
    """

    order_B: np.ndarray
    prompts_B: np.ndarray
    families_B: np.ndarray
    alike: Alike

    @functools.cached_property
    def origins(self) -> Origins:
        """Where they get their first tokens from in one run of them all."""
        return origins_of(self.alike, self.prompts_B, self.families_B, np.zeros_like(self.families_B))

    def spared(self, line_B: np.ndarray, parts_B: np.ndarray) -> int:
        """Return how many tokens several runs need not compute.

        Args:
            line_B: the rows by their numbers here, run by run, a prompt's next to each other.
            parts_B: 0, 0, 1, ... the run of each row of the line.
        """
        place_B = np.empty_like(line_B)
        place_B[line_B] = np.arange(len(line_B))
        alike = self.alike.placed(place_B)
        return int(origins_of(alike, self.prompts_B[line_B], self.families_B[line_B], parts_B).shared_B.sum())


def read_rows(path: str, columns: Sequence[str] = (), routes: bool = False) -> Rows:
    """Read an experience file's tokens, which rows are accepted if it says so, and the per-token columns asked for.

    `routes`: also the experts that they took in the rollout.
    """
    present = column_names(path)
    others = [name for name in ("accepted", IMAGES, *PATHS) if name in present]
    taken = (ROUTES,) if routes else ()
    read = read_columns(path, ("prompt_tokens", "response_tokens", "loss_mask", *others, *taken, *columns))
    named = {name: read[name] for name in columns}
    accepted_B = read["accepted"] > 0 if "accepted" in others else None
    prompts, responses, mask = (read[name] for name in ("prompt_tokens", "response_tokens", "loss_mask"))
    paths = paths_of(prompts, responses, read) if PATH_ENDS in others else None
    prompts, images = with_images(prompts, read[IMAGES]) if IMAGES in others else (prompts, None)
    return Rows(prompts, responses, mask, named, accepted_B, read[ROUTES] if routes else None, paths, images)


def pack(rows: Rows, index: list[int], device: torch.device, ranks: RankSet = ALONE) -> PackedBatch:
    """Pack the given rows into one micro-batch on `device`.

    An empty `index` gives the shortest row, its mask and columns at zero: the forward pass happens (collectives stay in
    step), and nothing of it counts, not even a NaN.

    Args:
        ranks: those that compute it together; each of them packs the same rows.
    """
    counts = bool(index)
    if not index:
        rows, index = uncounted(rows, [_shortest(rows)]), [0]
    of_rows_B = np.asarray(index, dtype=np.int64)
    run, chosen_B = rows.sequences, of_rows_B if rows.paths is None else rows.paths.of_rows(of_rows_B)
    arranged, responses_B = arrange(run, chosen_B), run.responses.lengths_of(chosen_B)
    whole = _whole(run, chosen_B[arranged.order_B])
    starts_B, tokens = whole.offsets_B1[:-1], len(whole.values_T)
    source_R = arranged.origins.sources(starts_B, tokens)
    own_R = source_R == np.arange(tokens)
    at_R = (np.cumsum(own_R) - 1)[source_R]  # in the run
    tokens_N = whole.values_T[own_R].astype(np.int64)
    images = None
    if rows.images is not None:
        positions_3R = rows.images.positions(whole.values_T, whole.lengths_B)
        images = rows.images.packed(tokens_N, positions_3R[:, own_R], functools.partial(to_device, device=device))
    place_B = np.empty_like(chosen_B)
    place_B[arranged.order_B] = np.arange(len(chosen_B))
    response_T = into((starts_B + arranged.prompts_B)[place_B], responses_B)  # index into R
    predict_T, targets_T = at_R[response_T - 1], whole.values_T[response_T].astype(np.int64)
    distinct = _distinct(arranged, at_R[response_T])
    layout = _layout(arranged, whole, at_R, device)
    own_N: slice | np.ndarray = slice(None)
    if ranks.count > 1:
        first_U: slice | np.ndarray = slice(None) if distinct is None else distinct[0]
        own_N, share = _share(ranks, len(tokens_N), predict_T[first_U], targets_T[first_U], device)
        layout = replace(layout, share=share)
    return PackedBatch(
        tokens_N=to_device(tokens_N[own_N], device),
        positions_N=to_device(_ramp(whole.lengths_B)[own_R][own_N], device),
        layout=layout,
        predict_T=to_device(predict_T, device),
        last_B=to_device(at_R[whole.offsets_B1[1:] - 1][place_B], device),
        targets_T=to_device(targets_T, device),
        mask_T=to_device(rows.mask.take(of_rows_B).values_T.astype(np.float32), device),
        offsets_B1=to_device(offsets_of(rows.responses.lengths_of(of_rows_B)), device),
        columns={name: to_device(column.take(of_rows_B).values_T, device) for name, column in rows.columns.items()},
        shared=None if distinct is None else SharedTargets(*(to_device(array, device) for array in distinct)),
        computed=len(tokens_N) if counts else 0,
        branched=arranged.origins.beyond_prompts if counts else 0,
        routes_NW=None if rows.routes is None else _routes(rows.routes.take(chosen_B[arranged.order_B]), at_R, device),
        images=images,
    )


def _routes(routes: Ragged, at_R: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the experts of each token of the run: of tokens that rows share those of the first row that knows them.

    In the rollout such tokens saw the same tokens before them, so their routes differ, if at all, by rounding.
    """
    unknown = np.iinfo(routes.values_T.dtype).max
    routes_RW = routes.values_T.reshape(len(at_R), -1)
    known_R = np.flatnonzero(routes_RW[:, 0] != unknown)[::-1]  # of those that are put into one place the last stays
    routes_NW = np.full((int(at_R.max()) + 1, routes_RW.shape[1]), -1, np.int16)
    routes_NW[at_R[known_R]] = routes_RW[known_R]
    return to_device(routes_NW, device)


def arrange(rows: Rows, chosen_B: np.ndarray) -> Arranged:
    """Put rows into the order of a run, and see what they share; of all rows of a file that is kept."""
    every = len(chosen_B) == len(rows) and bool((chosen_B == np.arange(len(rows))).all())
    return rows.arranged if every else _arrange(rows, chosen_B)


def _arrange(rows: Rows, chosen_B: np.ndarray) -> Arranged:
    order_B, families_B = prompt_by_prompt(rows, chosen_B)
    chosen_B = chosen_B[order_B]
    alike = alike_of(rows.prompts, rows.responses, families_B, chosen_B)
    return Arranged(order_B, rows.prompts.lengths_of(chosen_B), families_B, alike)


def prompt_by_prompt(rows: Rows, chosen_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the order in which rows of the same prompt follow each other, and 0, 0, 1, ...: the prompts in it."""
    families_B = first_seen(rows.prompt_ids_B[chosen_B])
    order_B = np.argsort(families_B, kind="stable")
    return order_B, families_B[order_B]


def _whole(rows: Rows, index_B: np.ndarray) -> Ragged:
    """Prompts with their responses."""
    prompts, responses = rows.prompts.take(index_B), rows.responses.take(index_B)
    offsets_B1 = prompts.offsets_B1 + responses.offsets_B1
    whole = Ragged(np.empty(offsets_B1[-1], dtype=prompts.values_T.dtype), offsets_B1)
    whole.values_T[into(offsets_B1[:-1], prompts.lengths_B)] = prompts.values_T
    whole.values_T[into(offsets_B1[:-1] + prompts.lengths_B, responses.lengths_B)] = responses.values_T
    return whole


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


def _distinct(arranged: Arranged, at_T: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Tell response tokens apart by where they lie in the run, as `SharedTargets` has it; None: each has its own."""
    if not (arranged.origins.shared_B > arranged.prompts_B).any():
        return None
    _, first_U, of_T = np.unique(at_T, return_index=True, return_inverse=True)
    return None if len(first_U) == len(at_T) else (first_U, of_T)


def _share(
    ranks: RankSet, tokens: int, predict_U: np.ndarray, targets_U: np.ndarray, device: torch.device
) -> tuple[np.ndarray, Share]:
    """Return which tokens of the run are this rank's, and its share."""
    found = cut(ranks, tokens, predict_U)
    arrays = found.predict_O, targets_U[found.own_O], found.place_U
    predict_O, targets_O, place_U = (to_device(array, device) for array in arrays)
    own_N = np.minimum(np.arange(found.own.start, found.own.stop), tokens - 1)
    return own_N, Share(ranks, tokens, found.tokens, predict_O, targets_O, found.targets, place_U)


def _layout(arranged: Arranged, whole: Ragged, at_R: np.ndarray, device: torch.device) -> PackedLayout:
    """Sequences of attention in the order of the run: the own tokens of each row, after what it shares.

    Where rows have the same prompt it is a sequence by itself, before the first of them.
    """
    shared_B, lengths_B = arranged.origins.shared_B, whole.lengths_B
    opens_B = np.diff(arranged.families_B, prepend=-1) > 0
    of_several_B = np.bincount(arranged.families_B)[arranged.families_B] > 1
    prompt_end_B = np.where(opens_B & of_several_B, np.maximum(shared_B, arranged.prompts_B), shared_B)
    before_S = np.stack([shared_B, prompt_end_B], axis=1).reshape(-1)
    keys_S = np.stack([prompt_end_B, lengths_B], axis=1).reshape(-1)
    start_S = np.repeat(whole.offsets_B1[:-1], 2)
    some_S = keys_S > before_S
    before_S, keys_S, start_S = before_S[some_S], keys_S[some_S], start_S[some_S]
    queries_S = keys_S - before_S
    slots_K = None
    if device.type == "cpu":
        slots_K = torch.from_numpy(np.repeat(np.arange(len(keys_S)) * int(keys_S.max()), keys_S) + _ramp(keys_S))
    return PackedLayout(
        cu_queries_S1=to_device(offsets_of(queries_S).astype(np.int32), device),
        cu_keys_S1=to_device(offsets_of(keys_S).astype(np.int32), device),
        max_queries=int(queries_S.max()),
        max_keys=int(keys_S.max()),
        sequences=len(keys_S),
        shared=_shared(queries_S, before_S, start_S, at_R, device) if before_S.any() else None,
        slots_K=slots_K,
        keys_S=keys_S,
    )


def _shared(
    queries_S: np.ndarray, before_S: np.ndarray, start_S: np.ndarray, at_R: np.ndarray, device: torch.device
) -> SharedPrefixes:
    starts_S = offsets_of(queries_S + before_S)[:-1]
    own_N, copies_C = into(starts_S + before_S, queries_S), into(starts_S, before_S)
    copied_C = at_R[into(start_S, before_S)]
    source_K = np.empty(len(own_N) + len(copies_C), dtype=np.int64)
    source_K[own_N], source_K[copies_C] = np.arange(len(own_N)), copied_C
    return SharedPrefixes(*(to_device(array, device) for array in (source_K, own_N, copies_C, copied_C)))


def first_seen(ids_B: np.ndarray) -> np.ndarray:
    """Number ids by the order in which they first appear: [7, 3, 7] -> [0, 1, 0]."""
    _, first, inverse_B = np.unique(ids_B, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse_B]


def _ramp(lengths_B: np.ndarray) -> np.ndarray:
    """0, 1, ... within each row."""
    return np.arange(int(lengths_B.sum())) - np.repeat(offsets_of(lengths_B)[:-1], lengths_B)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to the device; a GPU copies while the host goes on."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)

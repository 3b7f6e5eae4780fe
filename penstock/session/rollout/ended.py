"""Ended responses: a rollout that was cut off and is begun again does not generate again what had ended.

A file `experience/000012.ended.arrows` gets a batch for each piece of news from the engines, a row per response. It
outlives ranks and flow, and is gone once the experience is written. The rollout that is begun again takes over what is
whole in it, if that depends on the same policy, prompts and settings, and generates the rest.

The rest comes from other random streams. Where they have to be the same (`rollout.reproducible`, so on a CPU) nothing
is kept: the whole rollout is generated again, and comes out the same to the last bit.

Left out: what engines make of it (penstock/engines/rollout/responses.py), rounds that replace refused groups, and play
with environments, whose episodes are known by their environments (penstock/engines/rollout/episodes.py).
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from penstock.base.ragged import Ragged
from penstock.engines.commands.rollout import CarriedResponses, EndedResponses, Sampling
from penstock.session.rollout.carried import logprobs_of
from penstock.session.session import Training
from penstock.state.experience import from_arrow, to_arrow

ORIGIN, CHECK = b"origin", b"crc32"
FURTHER_STREAMS = 1 << 16  # purposes of random streams from here on are those of rollouts that are begun again
SCHEMA = pa.schema(
    {
        "position": pa.int64(),
        "sample": pa.int64(),
        "tokens": pa.large_list(pa.int32()),
        "logprobs": pa.large_list(pa.float32()),
        "versions": pa.large_list(pa.int32()),
        "truncated": pa.bool_(),
    }
)


def keeps_ended(training: Training) -> bool:
    """Whether ended responses of a rollout are kept for one that is begun again.

    A rollout that would come out the same needs nothing of the one before. Experts that tokens took are not told before
    the end, so where these are needed nothing is kept.
    """
    if training.config.environment is not None or training.config.actor.replays:
        return False
    return not (training.config.rollout.repeatable and training.session().reproducible)


def origin_of_ended(
    origin: dict[str, Any], policy_version: int | None, prompts: pd.DataFrame, carried: CarriedResponses | None
) -> str:
    """Return what ended responses depend on.

    Args:
        origin: the sampling's part of it.
        policy_version: that sampled all of them; None: several.
        carried: what the rollout goes on with.
    """
    ids = json.dumps([str(name) for name in prompts["prompt_id"]])
    begun_before = b"" if carried is None else carried.tokens.values_T.tobytes() + carried.versions_T.tobytes()
    digest = hashlib.sha256(ids.encode() + begun_before).hexdigest()
    return json.dumps({**origin, "policy_version": policy_version, "prompts": digest}, sort_keys=True)


def other_streams(sampling: Sampling, ended: int) -> Sampling:
    """Return how the rest is sampled where some responses have ended: from streams that none of these came from."""
    seed, iteration, _ = sampling.seed
    return replace(sampling, seed=[seed, iteration, FURTHER_STREAMS + ended])


class EndedFile:
    """The file of a rollout's ended responses.

    Args:
        origin: what they depend on.
    """

    def __init__(self, path: Path, origin: str) -> None:
        self._path, self._origin = path, origin
        self._known: set[tuple[int, int]] = set()
        self._before: EndedResponses | None = None
        self._sink: Any = None
        self._writer: Any = None

    def read(self, newest: int) -> EndedResponses | None:
        """Return what an interrupted attempt has left; None: nothing that is of use.

        Args:
            newest: policy version of the engines. A response with tokens of a later one is of a policy that is lost.
        """
        batches = list(_whole_batches(self._path, self._origin)) if self._path.exists() else []
        table = pa.Table.from_batches(batches, SCHEMA)
        versions = table["versions"].combine_chunks()
        lost = pc.unique(pc.list_parent_indices(versions).filter(pc.greater(pc.list_flatten(versions), newest)))
        table = table.filter(pc.invert(pc.is_in(pa.array(range(len(table)), lost.type), lost)))
        self._before = _responses_in(table) if len(table) else None
        return self._before

    def add(self, ended: EndedResponses) -> None:
        """Write what has ended; a response that is there already is not written again."""
        if self._writer is None:
            self._begin()
        entries = list(zip(ended.positions.tolist(), ended.samples.tolist(), strict=True))
        if new := [place for place, entry in enumerate(entries) if entry not in self._known]:
            self._known.update(entries)
            batch = _batch(ended).take(pa.array(new))
            self._writer.write_batch(batch, custom_metadata={CHECK: str(_checked(batch)).encode()})

    def _begin(self) -> None:
        """Begin the file anew, with what was read of it; until that is written the old one stays."""
        partial = self._path.with_name(f"{self._path.name}.partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        self._sink = pa.OSFile(str(partial), "wb")
        self._writer = pa.ipc.new_stream(self._sink, SCHEMA.with_metadata({ORIGIN: self._origin.encode()}))
        if self._before is not None:
            self.add(self._before)
        partial.replace(self._path)

    def close(self) -> None:
        """Close the file, if it was begun."""
        if self._writer is not None:
            self._writer.close()
            self._sink.close()


def _batch(ended: EndedResponses) -> pa.RecordBatch:
    responses = ended.responses
    columns = {
        "position": ended.positions,
        "sample": ended.samples,
        "tokens": responses.tokens,
        "logprobs": logprobs_of(responses),
        "versions": Ragged(responses.versions_T, responses.tokens.offsets_B1),
        "truncated": responses.truncated_B,
    }
    return pa.RecordBatch.from_arrays([to_arrow(columns[name]) for name in SCHEMA.names], schema=SCHEMA)


def _whole_batches(path: Path, origin: str) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a file with this origin, up to the first that a crash has left half-written."""
    try:
        with pa.OSFile(str(path), "rb") as source, pa.ipc.open_stream(source) as reader:
            if (reader.schema.metadata or {}).get(ORIGIN) != origin.encode():
                return
            while True:
                batch, said = reader.read_next_batch_with_custom_metadata()
                if said is None or said.get(CHECK) != str(_checked(batch)).encode():
                    return
                yield batch
    except (StopIteration, pa.ArrowInvalid, OSError):  # its end, or what was being written
        return


def _checked(batch: pa.RecordBatch) -> int:
    """Return a checksum of all values: after a restart of the machine a file may have holes."""
    check = 0
    for column in batch.columns:
        values = column.flatten() if pa.types.is_large_list(column.type) else column
        check = zlib.crc32(values.to_numpy(zero_copy_only=False).tobytes(), check)
    return zlib.crc32(batch.column("tokens").value_lengths().to_numpy().tobytes(), check)


def _responses_in(table: pa.Table) -> EndedResponses:
    columns = {name: from_arrow(table[name]) for name in SCHEMA.names}
    responses = CarriedResponses(
        tokens=columns["tokens"],
        logprobs_T=columns["logprobs"].values_T,
        versions_T=columns["versions"].values_T,
        ended_B=np.ones(len(table), bool),
        truncated_B=np.asarray(columns["truncated"]),
    )
    return EndedResponses(columns["position"], columns["sample"], responses)

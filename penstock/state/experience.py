"""Experience on disk and in memory: one row per sample, ragged list columns, nothing padded.

A file `experience/000012.parquet` grows by columns: rollout writes the first ones, each later task adds its own as a
part beside the file, because writing all columns anew takes time in which the GPUs wait. So does encoding lists and
texts: rollout puts its own into a part, too. File and parts read as one. Afterwards `consolidate` makes them one file.
So any task can run again from its inputs, and `pandas.read_parquet` shows a sample's way from prompt to advantage.

Left out: several writers of one file at a time, of which one would lose its columns.

In memory a list column is a `Ragged`: flat values plus offsets (B+1). Tasks pass `ExperienceRef`, never tokens.
Suffixes: `_B` rows, `_B1` offsets (B+1 entries), `_T` flat tokens of all rows.
"""

from __future__ import annotations

import functools
import itertools
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.base.files import replacing, sha256
from penstock.base.ragged import Ragged
from penstock.state.deferred import Deferred
from penstock.state.digests import is_whole, marked, remove

IMAGES = "images"  # column with four numbers of each image of a prompt: penstock/engines/batches/images.py
AGENT = "agent"  # column with the number of the agent that a row is for, where there are several
ROUTES = "routes"  # column of the experts that each token of a row took in the rollout, its prompt's too
# Where samples may be of several conversations, one after the other in the response's columns: where each of them ends
# there; the prompts of all but the first, one after the other; and where each of these ends.
PATHS = PATH_ENDS, PATH_PROMPTS, PATH_PROMPT_ENDS = "path_ends", "path_prompt_tokens", "path_prompt_ends"
RESAMPLED = "resample"  # column that says which rollout of the iteration a sample is from, once there are several


@dataclass(frozen=True)
class ExperienceRef:
    """What tasks hand to each other: where the experience is and how much of it there is."""

    path: str
    samples: int
    prompt_tokens: int
    response_tokens: int
    policy_version: int
    prompts: int = 0  # drawn from the data for it, also those that were replaced
    deferred: tuple[Deferred, ...] = ()  # prompts that wait once it is made
    portion: int | None = None  # of the iteration's experience; None: all of it

    def key(self, iteration: int, task: str) -> str:
        """Return the idempotency key of a call about this experience."""
        return f"{iteration}/{task}" if self.portion is None else f"{iteration}/{task}/{self.portion}"


# A part's name holds the identity of the file that it belongs to: drawn whenever a file is written, and kept inside it.
# A reader opens the file first and takes the parts of its identity alone. So the rename that brings a new rollout, or
# the consolidated columns, disowns all older parts in the same step. Killed before the rename, the old file has all its
# parts; killed after it, the parts that are left belong to nothing and go with the next writing. Without identities the
# parts would have to go before the rename, and a reader at that moment would join them with the new file, or miss their
# columns. The name also holds the machine's boot: nobody waits until a part is on the disk, so a part from before a
# restart may be empty, or full of zeros.
#
# A file has a digest (penstock/state/digests.py), and holds the digest of the part that it was written with; a resume
# takes over these two. Later parts have no digest, since hashing them would hold up a step: a resume makes them anew.
IDENTITY = b"penstock.identity"

ORIGIN = b"penstock.origin"  # JSON of what the rows depend on

FIRST_PART = b"penstock.first_part"  # digest of the part that the file was written with; empty: none

BOOT = Path("/proc/sys/kernel/random/boot_id")


def write_columns(path: Path, columns: Mapping[str, Any], origin: Mapping[str, Any] | None = None) -> None:
    """Write a new experience file atomically; values are `Ragged`, arrays (also Arrow's) or lists, an entry per row.

    Args:
        origin: as in `write_columns_apart`.
    """
    _write_file(path, _to_table(columns), _new_identity(), json.dumps(origin or {}).encode())
    drop_parts(path)


def write_columns_apart(path: Path, columns: Mapping[str, Any], origin: Mapping[str, Any] | None = None) -> None:
    """Write a new experience file atomically and fast: its lists and texts are a part, as if they were added.

    The part survives the process. After a restart of the machine it is missing, and the file is of no use without it.

    Args:
        origin: what the rows depend on, in types of JSON; `origin_of` gives it back.
    """
    table, identity = _to_table(columns), _new_identity()
    apart = [field.name for field in table.schema if not pa.types.is_primitive(field.type)]
    first = _part(path, identity, 1)
    _write_part(first, table.select(apart))
    _write_file(path, table.drop_columns(apart), identity, json.dumps(origin or {}).encode(), sha256(first))
    drop_parts(path, but=identity)


def add_columns(path: Path, columns: Mapping[str, Any]) -> None:
    """Add columns to a file, or replace them, without touching the others: they go to a part of their own, atomically.

    A part is an Arrow file: written and read as the arrays lie in memory. It stays hidden, and lasts until the file is
    written anew or consolidated. It survives the process, but not a restart of the machine: columns that have to
    survive that are consolidated.

    Raises:
        ValueError: the columns are not as long as those of the file.
    """
    file, table = _opened(path), _to_table(columns)
    if table.num_rows != file.metadata.num_rows:
        raise ValueError(f"columns of length {table.num_rows} for {path}, which has {file.metadata.num_rows} rows")
    _write_part(_part(path, _identity(file), len(_parts(path, file)) + 1), table)


def consolidate(path: Path) -> None:
    """Make one file of a file and its parts, durably, and drop parts that belong to no file."""
    if path.exists():
        file = _opened(path)
        if added := _added(path, file):
            table = file.read(use_threads=False)  # the processor's cores are for what this runs beside
            whole = pa.table({name: table.column(name) for name in table.column_names} | added)
            _write_file(path, whole, _new_identity(), _origin(file))
    drop_parts(path)


def damaged(path: Path) -> Path | None:
    """Return which of a file and the part that it was written with is damaged, None if neither is.

    A part from before a restart of the machine is no part of the file any more.
    """
    if not is_whole(path):
        return path
    file = _opened(path)
    first = _part(path, _identity(file), 1)
    digest = (file.schema_arrow.metadata or {}).get(FIRST_PART, b"").decode()
    return first if digest and first.exists() and sha256(first) != digest else None


def drop_later_parts(path: Path) -> None:
    """Drop what was added to a whole file after it was written."""
    file = _opened(path)
    digest = (file.schema_arrow.metadata or {}).get(FIRST_PART, b"")
    for part in _parts(path, file)[1 if digest else 0 :]:
        part.unlink()


def drop_experience(path: Path) -> None:
    """Delete a file with all that belongs to it."""
    remove(path)
    drop_parts(path)


def drop_parts(path: Path, but: str | None = None) -> None:
    """Remove the parts beside a file, whichever identity they belong to; those of the identity `but` stay."""
    for part in path.parent.glob(f".{path.name}.*.part"):
        if but is None or not part.name.startswith(f".{path.name}.{but}-"):
            part.unlink(missing_ok=True)


def with_parts(folder: Path) -> list[Path]:
    """Return the files in a folder beside which parts lie, also parts that belong to nothing."""
    return sorted({part.with_name(part.name[1:].rsplit(".", 3)[0]) for part in folder.glob(".*.part")})


def read_columns(path: str | Path, names: Sequence[str]) -> dict[str, Any]:
    """Read columns: list columns as `Ragged`, numbers as numpy arrays, text as lists; of several the newest.

    Raises:
        KeyError: a column is absent (its task has not run).
    """
    file = _opened(path)
    added, present = _added(path, file), set(file.schema_arrow.names)
    if missing := [name for name in names if name not in added and name not in present]:
        raise KeyError(f"{path} has no column {', '.join(missing)}: the task that writes it has not run")
    table = file.read(columns=[name for name in names if name not in added])
    return {name: from_arrow(added[name] if name in added else table.column(name)) for name in names}


def read_rows(path: str | Path, names: Sequence[str], rows_N: np.ndarray) -> dict[str, Any]:
    """Read some rows of columns, in the order of `rows_N`: only the columns and row groups that hold them are decoded.

    Returns:
        What `read_columns` does.

    Raises:
        KeyError: a column is absent.
    """
    file = _opened(path)
    added, present = _added(path, file), set(file.schema_arrow.names)
    if missing := [name for name in names if name not in added and name not in present]:
        raise KeyError(f"{path} has no column {', '.join(missing)}")
    sizes = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
    begins = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    groups, inside = np.unique(np.searchsorted(begins, rows_N, side="right") - 1, return_inverse=True)
    before = np.concatenate([[0], np.cumsum(np.diff(begins)[groups])])[:-1]  # rows read before each group that is read
    table = file.read_row_groups(groups.tolist(), columns=[name for name in names if name not in added])
    local_N = pa.array(rows_N - begins[groups][inside] + before[inside])
    taken = {name: column.take(pa.array(rows_N)) for name, column in added.items() if name in names}
    taken |= {name: table.column(name).take(local_N) for name in table.column_names}
    return {name: from_arrow(taken[name]) for name in names}


def column_names(path: str | Path) -> list[str]:
    """Return the columns present in an experience file and its parts."""
    file = _opened(path)
    return list(dict.fromkeys([*file.schema_arrow.names, *_added(path, file)]))


def origin_of(path: str | Path) -> dict[str, Any]:
    """Return what the rows of an experience file depend on, as its writer said; empty if it said nothing."""
    origin: dict[str, Any] = json.loads(_origin(_opened(path)))
    return origin


def _to_table(columns: Mapping[str, Any]) -> pa.Table:
    return pa.table({name: to_arrow(column) for name, column in columns.items()})


def to_arrow(column: Any) -> pa.Array:
    """Return a column as Arrow has it: lists of a `Ragged`, arrays and lists as they are."""
    if isinstance(column, Ragged):
        return pa.LargeListArray.from_arrays(pa.array(column.offsets_B1, pa.int64()), pa.array(column.values_T))
    return column if isinstance(column, pa.Array) else pa.array(column)


def _new_identity() -> str:
    return secrets.token_hex(8)


def _identity(file: pq.ParquetFile) -> str:
    identity: bytes = (file.schema_arrow.metadata or {}).get(IDENTITY, b"none")  # another program's file has none
    return identity.decode()


def _origin(file: pq.ParquetFile) -> bytes:
    origin: bytes = (file.schema_arrow.metadata or {}).get(ORIGIN, b"{}")
    return origin


def _write_part(place: Path, table: pa.Table) -> None:
    with replacing(place, durable=False) as aside, pa.ipc.new_file(str(aside), table.schema) as writer:
        writer.write_table(table)


def _write_file(path: Path, table: pa.Table, identity: str, origin: bytes = b"{}", first: str = "") -> None:
    identified = table.replace_schema_metadata({IDENTITY: identity, ORIGIN: origin, FIRST_PART: first})
    with marked(path) as aside:
        # Dictionary encoding costs more time than the space it saves on token ids and floats.
        pq.write_table(identified, aside, compression="lz4", use_dictionary=False, write_statistics=False)


def _opened(path: str | Path) -> pq.ParquetFile:
    return pq.ParquetFile(path, memory_map=True)


def _part(path: str | Path, identity: str, number: int) -> Path:
    return Path(path).with_name(f".{Path(path).name}.{identity}-{_boot()}.{number}.part")


@functools.cache
def _boot() -> str:
    if not BOOT.exists():  # in some sandboxes, where a restart goes unnoticed
        return "unknown"
    return BOOT.read_text(encoding="ascii").strip().replace("-", "")


def _parts(path: str | Path, file: pq.ParquetFile) -> list[Path]:
    """Return the parts of an open file, the oldest first."""
    identity = _identity(file)
    return list(itertools.takewhile(Path.exists, (_part(path, identity, number) for number in itertools.count(1))))


def _added(path: str | Path, file: pq.ParquetFile) -> dict[str, pa.ChunkedArray]:
    """Return what the parts of an open file add and replace, as it lies on disk."""
    tables = (pa.ipc.open_file(pa.memory_map(str(part))).read_all() for part in _parts(path, file))
    return {name: table.column(name) for table in tables for name in table.column_names}


def from_arrow(column: pa.ChunkedArray) -> Any:
    """Return a column as `read_columns` does."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    if pa.types.is_large_list(array.type) or pa.types.is_list(array.type):
        offsets = np.asarray(array.offsets, dtype=np.int64)
        values = array.values.to_numpy(zero_copy_only=False)
        return Ragged(values[offsets[0] : offsets[-1]], offsets - offsets[0])
    if pa.types.is_floating(array.type) or pa.types.is_integer(array.type):
        return array.to_numpy(zero_copy_only=False)
    return array.to_pylist()

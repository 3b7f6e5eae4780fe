"""KL over the whole vocabulary: the reference's states beside the experience of an update.

Left out: how the reference computes and keeps them (penstock/engines/ranks/reference.py).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from penstock.base.ragged import Ragged
from penstock.engines.batches.packing import PackedBatch, Rows
from penstock.engines.kernels.lm_head import Head, Reference

STATES = "reference_states"  # the column of hidden states, [tokens, hidden size]


def with_states(rows: Rows, path: str) -> Rows:
    """Add the column of hidden states; they stay on disk until a micro-batch takes its own."""
    column = Ragged(np.load(path, mmap_mode="r"), rows.responses.offsets_B1)
    return replace(rows, columns={**rows.columns, STATES: column})


def reference_of(batch: PackedBatch, head: Head) -> Reference:
    """Return what the reference's distributions of a micro-batch's distinct tokens are made of."""
    return Reference(batch.distinct(batch.columns[STATES]).view(head.weight_VH.dtype), *head)

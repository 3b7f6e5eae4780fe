"""Layers that carry a state from token to token (short convolutions, Mamba 2), over packed sequences: each row alone.

The library's own layer computes them, on rows side by side instead of one run: what comes in is spread to rows, those
of about the same length together (penstock/engines/batches/row_groups.py), and what goes out is gathered again. A state
only goes on to later tokens, so padding on the right needs no mask. Where rows share what they begin with, its tokens
are repeated for each of them and the state at its end is computed once more for each: for these layers alone sharing
spares nothing.

A block is told where sequences lie, and tells its mixer whenever it runs: also when a checkpointed block runs again for
its gradients, maybe after other micro-batches. Both are of a class of their own instead of having hooks, which belong
to one module each: blocks of a class share their compiled code. A mixer is not compiled with its block. The library's
code for gated delta nets loops over the chunks of a row, and would be compiled for every length.

Which functions the library computes with it decides when it is imported: its own in PyTorch, or those of the packages
`fla`, `causal_conv1d` and `mamba_ssm` where they are installed.
Suffixes: `_NH` tokens of a run x hidden size, `_KH` keys of all sequences x hidden size. Left out: runs that several
ranks compute together.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from penstock.engines.batches.packing import PackedLayout
from penstock.engines.families.architecture import STATE_IN_SHARES, unpackable
from penstock.engines.kernels.attention import repeat_prefixes
from penstock.engines.weights.layout import blocks, family_in


def keep_rows_apart(lm: nn.Module) -> None:
    """Let the layers of a Hugging Face model that carry a state compute packed sequences row by row; in place."""
    kinds = family_in(lm).mixers
    for block in blocks(lm).values() if kinds else ():
        for name, mixer in list(block.named_children()):
            if type(mixer).__name__ in kinds:
                block.__class__, mixer.__class__ = _telling(_kind(block), name), _row_by_row(_kind(mixer))


def _kind(module: Any) -> Any:
    return type(module)


@functools.cache
def _telling(kind: Any, mixer: str) -> Any:
    """Return a class of blocks that hand on where the sequences lie of the pass that they are in."""

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        getattr(self, mixer).packing = named.get("packing")
        return kind.forward(self, *args, **named)

    return type(kind.__name__, (kind,), {"forward": forward})


@functools.cache
def _row_by_row(kind: Any) -> Any:
    """Return a class of mixers that get and return the tokens of a run, [1, N, H], and compute rows."""

    @torch.compiler.disable
    def forward(self: Any, hidden_states: torch.Tensor, **named: Any) -> torch.Tensor:
        packing: PackedLayout | None = self.packing
        if packing is None:
            raise unpackable("the model", "does not tell its layers where sequences lie")
        if packing.share is not None:
            raise unpackable("the model", STATE_IN_SHARES)
        run_KH, rows = repeat_prefixes(hidden_states[0], packing.shared), packing.row_groups
        found = [group.in_one_run(kind.forward(self, group.side_by_side(run_KH), **named)) for group in rows.groups]
        out_KH = found[0] if len(found) == 1 else torch.cat(found)
        return in_order(out_KH, packing, rows.order_K).unsqueeze(0)

    return type(kind.__name__, (kind,), {"forward": forward, "packing": None})


def in_order(out_KH: torch.Tensor, packing: PackedLayout, order_K: torch.Tensor | None) -> torch.Tensor:
    """Return of the keys of all groups, one after another, those of the run's own tokens, [N, H]."""
    wanted_N = order_K
    if packing.shared is not None:
        wanted_N = packing.shared.own_N if order_K is None else order_K.index_select(0, packing.shared.own_N)
    return out_KH if wanted_N is None else out_KH.index_select(0, wanted_N)

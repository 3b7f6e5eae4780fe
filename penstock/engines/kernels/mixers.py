"""Layers that carry a state from token to token (short convolutions, Mamba 2), over packed sequences: each row alone.

The library's own layer computes them, on rows side by side instead of one run: what comes in is spread to rows, and
what goes out is gathered again, as attention on the CPU has it (attention.py). A state only goes on to later tokens, so
padding on the right needs no mask. Where rows share what they begin with, its tokens are repeated for each of them and
the state at its end is computed once more for each: for these layers alone sharing spares nothing.

A block is told where sequences lie, and tells its mixer whenever it runs: also when a checkpointed block runs again for
its gradients, maybe after other micro-batches. Suffixes: `_NH` tokens of a run x hidden size, `_SKH` sequences x keys
of the longest x hidden size. Left out: GPUs, and runs that several ranks compute together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from penstock.engines.batches.packing import PackedLayout
from penstock.engines.families.architecture import STATE_IN_SHARES, STATE_ON_GPU, unpackable
from penstock.engines.kernels.attention import in_one_run, repeat_prefixes, side_by_side
from penstock.engines.weights.layout import blocks, family_in


def keep_rows_apart(lm: nn.Module) -> None:
    """Let the layers of a Hugging Face model that carry a state compute packed sequences row by row; in place."""
    kinds = family_in(lm).mixers
    for block in blocks(lm).values() if kinds else ():
        for mixer in [module for module in block.modules() if type(module).__name__ in kinds]:
            rows = _Rows()
            block.register_forward_pre_hook(rows.hear, with_kwargs=True)
            mixer.register_forward_pre_hook(rows.spread, with_kwargs=True)
            mixer.register_forward_hook(rows.gather)


class _Rows:
    """Where the sequences of the pass lie that a block is in."""

    def __init__(self) -> None:
        self.packing: PackedLayout | None = None

    def hear(self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Take it from what the block is called with."""
        self.packing = named.get("packing")

    def spread(
        self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what a mixer is called with, [1, N, H], with its hidden states as rows, [S, K, H].

        Raises:
            UserError: the block does not tell where sequences lie, or there is a GPU.
        """
        if self.packing is None:
            raise unpackable("the model", "does not tell its layers where sequences lie")
        if args:
            return (_spread(args[0][0], self.packing), *args[1:]), named
        return args, {**named, "hidden_states": _spread(named["hidden_states"][0], self.packing)}

    def gather(self, _: nn.Module, args: tuple[Any, ...], out_SKH: torch.Tensor) -> torch.Tensor:
        """Return the tokens of the run, [1, N, H]."""
        assert self.packing is not None and self.packing.slots_K is not None
        return in_one_run(out_SKH, self.packing, self.packing.slots_K).unsqueeze(0)


def _spread(hidden_NH: torch.Tensor, packing: PackedLayout) -> torch.Tensor:
    if packing.share is not None:
        raise unpackable("the model", STATE_IN_SHARES)
    if packing.slots_K is None:
        raise unpackable("the model", STATE_ON_GPU)
    return side_by_side(repeat_prefixes(hidden_NH, packing.shared), packing, packing.slots_K)

"""A rank whose responses are as uneven as a reasoning model's, and short: prompts are too long to go on for a round."""

from __future__ import annotations

from penstock.benchmarks.ranks import uneven_rank


class ShortUnevenWorker(uneven_rank.UnevenWorker):
    """A worker that ends responses after 12 tokens on the mean, by their prompt and number alone."""

    def __init__(self, rank: int, world_size: int, gpu: int | None) -> None:
        uneven_rank.MEAN = 12
        super().__init__(rank, world_size, gpu)

"""How many sequences a rollout engine decodes at a time, and for which batch sizes it captures CUDA graphs.

A response that starts late ends late, so an engine holds its whole share of an iteration at once if it can. What its
KV cache cannot hold waits inside vLLM; responses are seldom as long as they may be, so the cache does not bound the
number in advance.

Left out: which prompts an engine gets (engines/rollout/prompt_queue.py), the size of the KV cache
(engines/rollout/engine.py).
"""

from __future__ import annotations

from configs.sections.rollout import RolloutConfig

LEAST, MOST = 256, 1024  # evaluations ask more prompts than a small share; a larger batch gains little speed
MOST_BY_DEFAULT = 512  # vLLM's largest graph


def max_sequences(config: RolloutConfig, engines: int) -> int:
    """Return `rollout.max_sequences`, or what fits the engine's share of an iteration where it is not given."""
    if config.max_sequences is not None:
        return config.max_sequences
    return min(max(most_at_once(config.prompts_under_way, config.samples, engines), LEAST), MOST)


def most_at_once(prompts: int, samples: int, engines: int) -> int:
    """Return the sequences of the largest share when `engines` divide the prompts evenly."""
    return -(-prompts // engines) * samples


def capture_sizes(sequences: int) -> list[int]:
    """Return the batch sizes for which CUDA graphs are captured, for an engine of up to `sequences`.

    vLLM's own choice is this grid up to 512. A full batch needs a graph of exactly its size: a larger one is not used
    for decoding, since vLLM has no room for the sequences that would fill it up (0.26).
    """
    top = max(sequences, min(2 * sequences, MOST_BY_DEFAULT))
    grid = [1, 2, 4, *range(8, 256, 8), *range(256, MOST_BY_DEFAULT, 16), *range(MOST_BY_DEFAULT, top + 1, 32)]
    return sorted({size for size in grid if size <= top} | {sequences})

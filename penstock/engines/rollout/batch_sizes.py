"""How many sequences a rollout engine decodes at a time, and for which batch sizes it captures CUDA graphs.

A response that starts late ends late, so an engine holds its whole share of an iteration at once if it can. What its
KV cache cannot hold waits inside vLLM; responses are seldom as long as they may be, so the cache does not bound the
number in advance.

Left out: which prompts an engine gets (penstock/engines/rollout/prompt_queue.py), and of the size of the KV cache all
but its limits (penstock/engines/rollout/engine.py).
"""

from __future__ import annotations

from penstock.configs.sections.rollout import RolloutConfig

LEAST, MOST = 256, 1024  # evaluations ask more prompts than a small share; a larger batch gains little speed
MOST_BY_DEFAULT = 512  # vLLM's largest graph
CPU_KV_CACHE_LIMIT = 1 << 30  # bytes of its KV cache on a CPU, where no size is asked for
GPU_KV_CACHE_SHARE = 0.8  # of a GPU's free memory, likewise
PROMPT_TOKENS = 512  # of a step that goes on with prompts or turns beside a full batch


def max_sequences(config: RolloutConfig, engines: int) -> int:
    """Return `rollout.max_sequences`, or what fits the engine's share of an iteration where it is not given."""
    if config.max_sequences is not None:
        return config.max_sequences
    return min(max(most_at_once(config.prompts_under_way, config.samples, engines), LEAST), MOST)


def most_at_once(prompts: int, samples: int, engines: int) -> int:
    """Return the sequences of the largest share when `engines` divide the prompts evenly."""
    return -(-prompts // engines) * samples


def begin_together(sequences: int) -> int:
    """Return how many sequences begin in a step of a GPU engine of up to `sequences`, where they wait for places.

    A sixteenth: half of it is idle on the mean, 3 %. With 512 sequences of 600 tokens, one in 38 steps then computes
    prompts, for two to four times as long as the others. Prompts that several engines pull one by one begin as soon as
    there are places for their samples.
    """
    return max(1, sequences // 16)


def capture_sizes(sequences: int) -> list[int]:
    """Return the numbers of tokens for which CUDA graphs are captured, for an engine of up to `sequences`.

    vLLM's own choice is this grid up to 512. A full batch needs a graph of exactly its size: a larger one is not used
    for decoding, since vLLM has no room for the sequences that would fill it up (0.26). Graphs above a full batch are
    of steps in which a prompt or a turn is read beside it; they leave attention out.
    """
    top = max(sequences, min(2 * sequences, MOST_BY_DEFAULT))
    grid = [1, 2, 4, *range(8, 256, 8), *range(256, MOST_BY_DEFAULT, 16), *range(MOST_BY_DEFAULT, top + 1, 32)]
    with_prompts = range(top + 32, sequences + PROMPT_TOKENS + 1, 32)
    return sorted({size for size in grid if size <= top} | {sequences} | set(with_prompts))

"""A program: samples short responses with drafts in vLLM on the CPU, and compares them with the model itself.

Every step drafts the same three tokens, so most are wrong. It prints as JSON: `accepted` drafts, `gap` between vLLM's
log-probs and the model's at most, `ends` (whether responses end at stop tokens and at their length, and nowhere else),
and `z`, by how many standard deviations the chi-square of second and third tokens, given those before them, is above
its expectation.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

PROMPT, STOP, LENGTH, AT_ONCE = [3, 8, 13, 21, 34], [1, 7], 4, 256


class Same:
    """Drafts the same tokens always."""

    def __init__(self, vllm_config: Any) -> None:
        self.load_model = lambda *_, **__: None

    def propose(self, sampled: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        return [[5, 7, 9] if tokens else [] for tokens in sampled]


def main(folder: Path, count: int, repaired: bool) -> dict[str, Any]:
    import vllm

    from penstock.configs.sections.rollout import RolloutConfig
    from penstock.engines.rollout import vllm as versions
    from penstock.engines.rollout.engine import engine_arguments

    versions.prepare_vllm(False, ["Qwen3ForCausalLM"])
    if repaired:
        versions.sample_drafted_tokens_on_cpu()
    arguments = engine_arguments(RolloutConfig(), AT_ONCE, 48, 64 << 20, gpu=None, sleeps=False, logprobs=True)
    arguments |= {"load_format": "auto", "distributed_executor_backend": "uni"}
    drafts = {"method": "custom_class", "model": "tests.benchmarks.speculation.verified.Same"}
    arguments["speculative_config"] = drafts | {"num_speculative_tokens": 3}
    llm = vllm.LLM(model=str(folder), dtype="float32", **arguments)
    parameters = vllm.SamplingParams(
        temperature=0.8, max_tokens=LENGTH, detokenize=False, logprobs=0, stop_token_ids=STOP, seed=0
    )
    responses, accepted = defaultdict[str, list[int]](list), 0
    logprobs, reasons = defaultdict[str, list[float]](list), {}
    for begin in range(0, count, AT_ONCE):
        numbers = range(begin, min(count, begin + AT_ONCE))
        versions.submit(llm, [str(number) for number in numbers], PROMPT, parameters, [*numbers])
        while len(reasons) < numbers.stop:
            for output in versions.step(llm):
                responses[output.request_id] += output.new_token_ids
                logprobs[output.request_id] += versions.sampled_logprobs(output)
                accepted += len(output.new_token_ids) - 1
                if output.finish_reason is not None:
                    reasons[output.request_id] = str(output.finish_reason)
    conditionals = _Model(folder)
    gaps = [_gap(conditionals, responses[name], logprobs[name]) for name in list(responses)[:300]]
    ends = all(_ends_rightly(responses[name], reason) for name, reason in reasons.items())
    return {"accepted": accepted, "gap": max(gaps), "ends": ends, "z": _z(conditionals, list(responses.values()))}


class _Model:
    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def __call__(self, tokens: list[int]) -> torch.Tensor:
        logits_TV = self.lm(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 :]
        return (logits_TV / 0.8).log_softmax(-1)


def _gap(model: _Model, tokens: list[int], logprobs: list[float]) -> float:
    own_T = model(tokens)[:-1].gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    gap = float((own_T - torch.tensor(logprobs)).abs().max())
    return gap if gap == gap else 1e9


def _ends_rightly(tokens: list[int], reason: str) -> bool:
    stopped = tokens[-1] in STOP
    return not set(tokens[:-1]) & set(STOP) and reason == ("stop" if stopped else "length") and len(tokens) <= LENGTH


def _z(model: _Model, responses: list[list[int]]) -> float:
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for tokens in responses:
        for depth in (1, 2):
            if len(tokens) > depth:
                counts[tuple(tokens[:depth])][tokens[depth]] += 1
    square, freedom = 0.0, 0
    for before, found in counts.items():
        total = sum(found.values())
        expected_V = model(list(before))[-1].exp().numpy() * total
        found_V = np.array([found[token] for token in range(len(expected_V))])
        often_V = expected_V >= 5
        expected, seen = (np.append(x[often_V], x[~often_V].sum()) for x in (expected_V, found_V))
        if total >= 50 and expected[-1] >= 1:
            square, freedom = square + float(((seen - expected) ** 2 / expected).sum()), freedom + len(expected) - 1
    return float((square - freedom) / (2 * freedom) ** 0.5)


if __name__ == "__main__":
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "repaired")))

"""Shows that vLLM reads the trainer's weights in place: log-probs agree before and after updates, nothing is copied.

    python -m penstock.benchmarks.shared_weights MODEL_FOLDER OUT.json [zero_stage [fp8]]

One process, one device: DeepSpeed trains, vLLM generates (CUDA graphs and sleep mode on a GPU), and the log-probs that
vLLM reports for its own tokens are compared with the trainer's. The negative control at the end changes the trainer's
weights after vLLM has answered, and must show as a large difference. With `fp8` both compute in FP8 (`actor.fp8`,
`rollout.weights`), and a reshard makes vLLM's copies.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_PORT="29541")
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING", PENSTOCK_GROUP="main")

from penstock.engines.groups import interface

os.environ.update(interface.variables())

import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ.update(DS_ACCELERATOR="cpu", TORCH_COMPILE_DISABLE="1")

from penstock.base.ragged import Ragged, offsets_of
from penstock.benchmarks.reporting.result import new_result, write_result
from penstock.configs.schema import TrainConfig
from penstock.engines.commands.build import Build
from penstock.engines.commands.forward import Logprobs
from penstock.engines.commands.reshard import Reshard
from penstock.engines.commands.update import ActorLoss, Split, UpdateActor
from penstock.engines.ranks.build import build
from penstock.engines.ranks.forward import logprobs
from penstock.engines.ranks.models import RankModels
from penstock.engines.ranks.reshard import reshard
from penstock.engines.ranks.update import update_actor
from penstock.engines.ranks.worker import Worker
from penstock.state.experience import write_columns

PROMPTS, PROMPT_TOKENS, RESPONSE_TOKENS = 8, 32, 24


def main(folder: str, out: Path, zero_stage: int, fp8: bool) -> None:
    """Measure and write the result."""
    models = Worker(0, 1, 0 if torch.cuda.is_available() else None).models
    config = TrainConfig.model_validate(
        {
            "model": {"path": folder},
            "data": {"max_prompt_tokens": PROMPT_TOKENS},
            "rollout": {
                "prompts": 8,
                "samples": 8,
                "max_response_tokens": RESPONSE_TOKENS,
                "max_sequences": 64,
                "weights": "fp8" if fp8 else "auto",
            },
            "actor": {"zero_stage": zero_stage, "fp8": fp8},
        }
    )
    begin = time.perf_counter()
    built = build(models, Build(config.model_dump(mode="json"), folder, ("actor", "rollout")))
    figures: dict[str, Any] = {"build_s": time.perf_counter() - begin}
    figures |= {name: getattr(built, name) for name in ("parameters", "parameters_shared", "parameters_copied")}
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "experience.parquet"
        figures["difference_before"] = difference(models, path)
        for step in range(1, 4):
            train(models, path, step)
            begin = time.perf_counter()
            moved = reshard(models, Reshard(step))
            figures |= {"reshard_s": time.perf_counter() - begin, "reshard_bytes": moved.bytes}
            figures[f"difference_after_{step}"] = difference(models, path)
        figures["difference_stale"] = difference(models, path, stale=True)
    settings = {"zero_stage": zero_stage, "fp8": fp8}
    result = new_result("shared_weights", " ".join(["python", *sys.argv]), figures, settings=settings)
    write_result(out, result)
    print(result.model_dump_json(indent=2, include={"figures"}))


def difference(models: RankModels, path: Path, stale: bool = False) -> float:
    """Return mean |log-prob of vLLM - log-prob of the trainer| over tokens that vLLM just sampled."""
    from vllm import SamplingParams

    generator = models.generator
    assert generator is not None
    vocabulary = models.lm.config.vocab_size
    prompts = np.random.default_rng(0).integers(0, vocabulary, (PROMPTS, PROMPT_TOKENS)).astype(np.int32)
    generator.wake()
    outputs = generator.llm.generate(
        [{"prompt_token_ids": row.tolist()} for row in prompts],
        SamplingParams(max_tokens=RESPONSE_TOKENS, ignore_eos=True, logprobs=0, detokenize=False),
        use_tqdm=False,
    )
    generator.sleep()
    chosen = [output.outputs[0] for output in outputs]
    theirs = np.concatenate(
        [[item.logprobs[i][token].logprob for i, token in enumerate(item.token_ids)] for item in chosen]
    )
    responses = Ragged.of([item.token_ids for item in chosen], np.int32)
    ones = Ragged(np.ones(len(responses.values_T), np.uint8), responses.offsets_B1)
    advantages = Ragged(np.where(np.arange(len(ones.values_T)) % 2, 1.0, -1.0).astype(np.float32), responses.offsets_B1)
    columns = {"prompt_tokens": Ragged.of(list(prompts), np.int32), "response_tokens": responses}
    write_columns(path, {**columns, "loss_mask": ones, "advantages": advantages})
    if stale:
        for parameter in models.lm.parameters():
            parameter.data += 0.01 * torch.randn_like(parameter.data)
        models.trainers["actor"].renew_fp8()
    reply = logprobs(models, Logprobs(str(path), "actor", 1.0, 4096))
    ours = Ragged(reply.values_T, offsets_of(responses.lengths_B[reply.rows])).take(np.argsort(reply.rows))
    return float(np.abs(theirs - ours.values_T).mean())


def train(models: RankModels, path: Path, step: int) -> None:
    """Take one large optimizer step, so that a stale weight could not hide."""
    split = Split(1, 1, 1, 1, 4096, RESPONSE_TOKENS, "token-mean", seed=step)
    loss = ActorLoss("ppo_clip", {}, 1.0, entropy_coefficient=0.0, kl_estimator=None, kl_coefficient=0.0)
    update_actor(models, UpdateActor(str(path), step - 1, split, loss, 1e-4))


if __name__ == "__main__":
    folder, out, *more = sys.argv[1:]
    main(folder, Path(out), int(more[0]) if more else 2, more[1:] == ["fp8"])

"""TRL's GRPO on the work of configs/bench_grpo.yaml: one GPU, vLLM in the same process; prints a line for every step.

    penstock bench model 1.5 models/random-1.5b && penstock bench prompts prompts.jsonl
    python benchmarks/peers/run_trl.py models/random-1.5b prompts.jsonl > trl.log
    penstock bench peers --trl trl.log --trl-name "TRL 1.16.0" --out peers.json

It runs where TRL and vLLM are installed and imports nothing of Penstock. The clock of a step starts when the GPU has
nothing left to do and stops when TRL logs the step. Tuned: micro-batches of 16 rows, vLLM with a third of the memory;
weights in float32 under bfloat16 autocast, which is TRL's mixed precision. Left out: several GPUs.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import TrainerCallback

WORK = yaml.safe_load((Path(__file__).parents[2] / "configs" / "bench_grpo.yaml").read_text(encoding="utf-8"))


def share_of_digits(completions: list[str], **_: Any) -> list[float]:
    """Return the recipe's reward for each response."""
    return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in completions]


class StepClock(TrainerCallback):
    """Prints what `penstock bench peers` reads: seconds of a step, and torch's peak of memory."""

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        torch.cuda.synchronize()
        self.began = time.perf_counter()

    def on_log(self, *_: Any, **__: Any) -> None:
        """Stop it and print."""
        seconds, peak = time.perf_counter() - self.began, torch.cuda.max_memory_allocated() / 2**30
        print("TRL step", {"wall_s": round(seconds, 2), "peak_gib": round(peak, 1)}, flush=True)


def settings(steps: int, micro_batch: int, output: str) -> dict[str, Any]:
    """Return the fields of TRL's GRPOConfig for the recipe's work.

    Args:
        micro_batch: rows of a forward and backward pass.
        output: folder that TRL wants to have.
    """
    rollout = WORK["rollout"]
    rows, response = rollout["prompts"] * rollout["samples"], rollout["max_response_tokens"]
    return {
        "output_dir": output,
        "max_steps": steps,
        "learning_rate": float(WORK["actor"]["optimizer"]["learning_rate"]),
        "beta": 0.0,  # no reference policy
        "num_generations": rollout["samples"],
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": rows // micro_batch,
        "steps_per_generation": rows // micro_batch,
        "max_completion_length": response,
        "generation_kwargs": {"ignore_eos": rollout["ignore_eos"]},
        "mask_truncated_completions": False,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.35,
        "vllm_max_model_length": WORK["data"]["max_prompt_tokens"] + response + 256,
        "vllm_enable_sleep_mode": False,
        "bf16": True,
        "model_init_kwargs": {"attn_implementation": "sdpa", "dtype": "float32"},
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def main() -> None:
    """Train for a few steps."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    parser = argparse.ArgumentParser(description="Measure TRL's GRPO on the work of configs/bench_grpo.yaml.")
    parser.add_argument("model", help="model folder, as 'penstock bench model' makes it")
    parser.add_argument("prompts", type=Path, help="JSONL file, as 'penstock bench prompts' makes it")
    parser.add_argument("--steps", type=int, default=4, help="the first one is cold")
    parser.add_argument("--micro-batch", type=int, default=16, help="rows")
    parser.add_argument("--output", default="trl-output", help="TRL's folder")
    given = parser.parse_args()
    rows = [json.loads(line) for line in given.prompts.read_text(encoding="utf-8").splitlines()]
    trainer = GRPOTrainer(
        model=given.model,
        reward_funcs=share_of_digits,
        args=GRPOConfig(**settings(given.steps, given.micro_batch, given.output)),
        train_dataset=Dataset.from_list(rows),
        callbacks=[StepClock()],
    )
    trainer.train()


if __name__ == "__main__":
    main()

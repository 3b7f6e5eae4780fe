"""verl's GRPO on the work of configs/bench_grpo.yaml: one GPU; prints verl's own metrics of every step.

    penstock bench model 1.5 models/random-1.5b && penstock bench prompts prompts.jsonl
    python benchmarks/peers/run_verl.py models/random-1.5b prompts.jsonl > verl.log
    penstock bench peers --verl verl.log --verl-name "verl 0.9.1" --out peers.json

It runs where verl, vLLM and flash-attn are installed and imports nothing of Penstock. Tuned: rows packed without
padding, micro-batches as in the recipe (twice that without gradients), gradient checkpointing (verl's activations need
it), all 512 sequences at once, half of the memory for vLLM. Left out: several GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

WORK = yaml.safe_load((Path(__file__).parents[2] / "configs" / "bench_grpo.yaml").read_text(encoding="utf-8"))


def share_of_digits(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Return the recipe's reward; verl finds this function by name and calls it with these arguments."""
    return sum(map(str.isdigit, solution_str)) / max(1, len(solution_str))


def table(prompts: Path) -> pd.DataFrame:
    """Return the prompts in the columns that verl reads."""
    texts = [json.loads(line)["prompt"] for line in prompts.read_text(encoding="utf-8").splitlines()]
    rows = [
        {
            "data_source": "letters",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index, text in enumerate(texts)
    ]
    return pd.DataFrame(rows)


def settings(model: str, table: str, steps: int) -> dict[str, Any]:
    """Return verl's settings for the recipe's work, by their dotted names."""
    rollout, data, actor = WORK["rollout"], WORK["data"], WORK["actor"]
    return {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": table,
        "data.val_files": table,
        "data.train_batch_size": rollout["prompts"],
        "data.max_prompt_length": data["max_prompt_tokens"],
        "data.max_response_length": rollout["max_response_tokens"],
        "data.filter_overlong_prompts": False,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.use_remove_padding": True,
        "+actor_rollout_ref.model.override_config.attn_implementation": "flash_attention_2",
        "actor_rollout_ref.model.enable_gradient_checkpointing": True,
        "actor_rollout_ref.actor.optim.lr": actor["optimizer"]["learning_rate"],
        "actor_rollout_ref.actor.ppo_mini_batch_size": rollout["prompts"],
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": actor["micro_batch_tokens"],
        "actor_rollout_ref.actor.use_kl_loss": False,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.load_format": "dummy",
        "actor_rollout_ref.rollout.n": rollout["samples"],
        "actor_rollout_ref.rollout.ignore_eos": rollout["ignore_eos"],
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.5,
        "actor_rollout_ref.rollout.max_num_seqs": rollout["max_sequences"],
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": True,
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": 2 * actor["micro_batch_tokens"],
        "reward.custom_reward_function.path": str(Path(__file__).resolve()),
        "reward.custom_reward_function.name": "share_of_digits",
        "trainer.logger": "console",
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.val_before_train": False,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.total_training_steps": steps,
    }


def main() -> None:
    """Write verl's table and become verl."""
    parser = argparse.ArgumentParser(description="Measure verl's GRPO on the work of configs/bench_grpo.yaml.")
    parser.add_argument("model", help="model folder, as 'penstock bench model' makes it")
    parser.add_argument("prompts", type=Path, help="JSONL file, as 'penstock bench prompts' makes it")
    parser.add_argument("--steps", type=int, default=4, help="the first one is cold")
    given = parser.parse_args()
    parquet = Path(tempfile.mkdtemp()) / "prompts.parquet"
    table(given.prompts).to_parquet(parquet)
    overrides = [f"{name}={value}" for name, value in settings(given.model, str(parquet), given.steps).items()]
    os.execv(sys.executable, [sys.executable, "-u", "-m", "verl.trainer.main_ppo", *overrides])


if __name__ == "__main__":
    main()

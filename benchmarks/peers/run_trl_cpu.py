"""TRL's GRPO on the work of configs/quickstart.yaml: a CPU, no vLLM, float32; prints a line for every iteration.

    penstock sft configs/quickstart.yaml --run warm-up
    penstock bench prompts train.jsonl --recipe configs/quickstart.yaml --heldout heldout.jsonl
    python benchmarks/peers/run_trl_cpu.py warm-up/models/sft train.jsonl heldout.jsonl > trl.log
    penstock bench peers --trl trl.log --trl-name "TRL 1.16.0" --out peers.json

It runs where TRL is installed and imports nothing of Penstock. configs/careless.yaml is the same work with another
teacher: its model and its prompts do as well. What is the same: prompts in their order, samples, reward, sampling,
advantages and loss, and AdamW with its warm-up, whose first step is not idle as with the schedule of transformers.
Mini-batches are drawn from samples, as `algorithm.mini_batch_of: samples` does; TRL knows no other way. An iteration
reaches from the end of the one before to its own end; its generation is all from text to text.

Tuned: nothing is recomputed, a mini-batch is one micro-batch, transformers' own generation with PyTorch's attention,
the fused AdamW. Left out: GPUs (run_trl.py).
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import TrainerCallback

WORK = yaml.safe_load((Path(__file__).parents[2] / "configs" / "quickstart.yaml").read_text(encoding="utf-8"))
BETAS, EPSILON, MAX_GRAD_NORM = (0.9, 0.95), 1e-8, 1.0  # Penstock's defaults: the recipe does not name them
EVALUATED_AT_ONCE = 500  # rows


def exact_match(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Return the recipe's reward for each response: 1 for the answer and its suffix, else 0."""
    suffix = WORK["reward"]["settings"]["suffix"]
    return [float(text.strip() == right.strip() + suffix) for text, right in zip(completions, answer, strict=True)]


def warm_up(step: int) -> float:
    """Return the factor on the learning rate at an optimizer step, 0 for the first."""
    steps = WORK["actor"]["optimizer"]["warmup_steps"]
    return min(1.0, (step + 1) / steps)


class IterationClock(TrainerCallback):
    """Prints what `penstock bench peers` reads: seconds, the process' peak of memory, and the mean reward."""

    def __init__(self) -> None:
        self.generated_s = 0.0

    def watching(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the trainer that counts as generation."""

        def watched(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return generate(*given, **named)
            finally:
                self.generated_s += time.perf_counter() - began

        return watched

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self.began, self.generated_s = time.perf_counter(), 0.0

    def on_log(self, *_: Any, **named: Any) -> None:
        """Print an iteration, and start the next; the summary at the end of a training is none."""
        if "reward" not in named["logs"]:
            return
        now = time.perf_counter()
        figures = {
            "wall_s": round(now - self.began, 4),
            "generation_s": round(self.generated_s, 4),
            "reward": round(named["logs"]["reward"], 5),
            "host_peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
        }
        print("TRL step", figures, flush=True)
        self.began, self.generated_s = now, 0.0


def settings(iterations: int, micro_batches: int, seed: int, output: str) -> dict[str, Any]:
    """Return the fields of TRL's GRPOConfig for the recipe's work.

    Args:
        micro_batches: of a mini-batch.
        output: folder that TRL wants to have.
    """
    rollout, mini_batches = WORK["rollout"], WORK["algorithm"]["mini_batches"]
    rows = rollout["prompts"] * rollout["samples"] // mini_batches
    return {
        "output_dir": output,
        "seed": seed,
        "max_steps": iterations * mini_batches,
        "beta": 0.0,  # no reference policy
        "loss_type": "dapo",  # every token weighs the same
        "epsilon": 0.2,
        "scale_rewards": "group",
        "num_generations": rollout["samples"],
        "per_device_train_batch_size": rows // micro_batches,
        "gradient_accumulation_steps": micro_batches,
        "steps_per_generation": micro_batches * mini_batches,
        "max_completion_length": rollout["max_response_tokens"],
        "temperature": 1.0,
        "mask_truncated_completions": False,
        "max_grad_norm": MAX_GRAD_NORM,
        "shuffle_dataset": False,  # the file has the order
        "use_vllm": False,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "logging_steps": mini_batches,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def accuracy(model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]], **sampling: Any) -> float:
    """Return the share of right answers, one response each."""
    right = 0.0
    for start in range(0, len(rows), EVALUATED_AT_ONCE):
        some = rows[start : start + EVALUATED_AT_ONCE]
        prompts = tokenizer([row["prompt"] for row in some], padding=True, padding_side="left", return_tensors="pt")
        with torch.no_grad():
            tokens = model.generate(**prompts, max_new_tokens=WORK["rollout"]["max_response_tokens"], **sampling)
        texts = tokenizer.batch_decode(tokens[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(exact_match(texts, [row["answer"] for row in some]))
    return right / len(rows)


def evaluate(model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]], when: str) -> None:
    """Print the accuracies on held-out prompts, drawn as the recipe evaluates and greedy."""
    model.eval()
    drawn = accuracy(model, tokenizer, rows, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    greedy = accuracy(model, tokenizer, rows, do_sample=False)
    print("TRL heldout", {f"accuracy_{when}": round(drawn, 5), f"greedy_{when}": round(greedy, 5)}, flush=True)
    model.train()


def read(path: Path) -> list[dict[str, Any]]:
    """Return the prompts and answers of a file of `penstock bench prompts`."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{"prompt": row["prompt"], "answer": row["answer"]} for row in rows]


def main() -> None:
    """Train, and evaluate before and after."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    parser = argparse.ArgumentParser(description="Measure TRL's GRPO on the work of configs/quickstart.yaml.")
    parser.add_argument("model", help="model folder, as 'penstock sft' makes it")
    parser.add_argument("prompts", type=Path, help="JSONL file, as 'penstock bench prompts --recipe' makes it")
    parser.add_argument("heldout", type=Path, help="JSONL file of its --heldout")
    parser.add_argument("--iterations", type=int, default=WORK["iterations"], help="the first one is cold")
    parser.add_argument("--micro-batches", type=int, default=1, help="of a mini-batch")
    parser.add_argument("--seed", type=int, default=0, help="of the samples")
    parser.add_argument("--output", default="trl-output", help="TRL's folder")
    given = parser.parse_args()
    heldout, tokenizer = read(given.heldout), AutoTokenizer.from_pretrained(given.model, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        given.model, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
    )
    rate = float(WORK["actor"]["optimizer"]["learning_rate"])
    adamw = torch.optim.AdamW(model.parameters(), rate, BETAS, EPSILON, weight_decay=0.0, fused=True)
    clock = IterationClock()
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=exact_match,
        args=GRPOConfig(**settings(given.iterations, given.micro_batches, given.seed, given.output)),
        train_dataset=Dataset.from_list(read(given.prompts)),
        callbacks=[clock],
        optimizers=(adamw, torch.optim.lr_scheduler.LambdaLR(adamw, warm_up)),
    )
    trainer._generate = clock.watching(trainer._generate)
    evaluate(model, tokenizer, heldout, "before")
    trainer.train()
    evaluate(model, tokenizer, heldout, "after")


if __name__ == "__main__":
    main()

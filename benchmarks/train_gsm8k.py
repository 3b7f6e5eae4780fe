"""Trains with the GSM8K recipe on this machine's GPUs and writes the run's figures as a result file.

    python benchmarks/train_gsm8k.py MODEL_FOLDER GSM8K_FOLDER OUT.json [section.key=value ...]

The command that it runs is `penstock train configs/grpo_gsm8k.yaml`, as a user would. Times are medians over the
iterations after the first, which is cold.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import provenance

FIGURES = {
    "step_s": "time/iteration_s",
    "rollout_s": "time/rollout_s",
    "rollout_tokens_per_s": "rollout/tokens_per_s",
    "update_s": "time/update_actor_s",
    "reference_s": "time/logprobs_reference_s",
    "reward_s": "time/reward_s",
    "advantage_s": "time/advantage_s",
    "reshard_s": "time/reshard_s",
    "reshard_bytes": "reshard/bytes",
    "peak_gib": "memory/gpu_gib",
}


def main(model: str, data: str, out: Path, overrides: list[str]) -> None:
    """Run the training and write the result."""
    command = ["train", "configs/grpo_gsm8k.yaml", f"model.path={model}", f"data.train={data}/train.jsonl"]
    command += [f"data.heldout={data}/test.jsonl", *overrides]
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        subprocess.run([sys.executable, "-m", "penstock.cli", *command, "--run", str(run)], check=True)
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        records = [
            json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
    steady = records[2:]
    figures = {
        name: statistics.median(values)
        for name, metric in FIGURES.items()
        if (values := [record[metric] for record in steady if metric in record])
    }
    spent = (
        "rollout",
        "reward",
        "logprobs_reference",
        "logprobs_old",
        "advantage",
        "update_actor",
        "reshard",
        "evaluate",
    )
    figures["overhead_s"] = statistics.median(
        record["time/iteration_s"] - sum(record.get(f"time/{name}_s", 0.0) for name in spent) for record in steady
    )
    result = {
        "bench": "train_gsm8k",
        **provenance(" ".join(["penstock", *command])),
        "figures": figures,
        "summary": summary,
        "iterations": records,
    }
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({**figures, **summary}, indent=2))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:])

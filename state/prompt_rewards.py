"""What each prompt earned in each iteration: the memory of a sampler that chooses prompts by it.

A file `prompts.jsonl` in the run folder, one line per iteration with the mean reward of every prompt drawn, also of
those that dynamic sampling replaced. As `metrics.jsonl` it only grows, each line is durable before the manifest names
its iteration, and a resume drops the lines after its checkpoint. Left out: what is made of it (tasks/draw.py).
"""

from __future__ import annotations

import json
import os

from configs.errors import UserError
from state.files import write_text
from state.run_folder import RunFolder

Rollouts = list[list[tuple[str, float]]]  # of one iteration, in turn: prompt ids and mean rewards, in the order drawn


def append_prompt_rewards(run: RunFolder, iteration: int, rollouts: Rollouts) -> None:
    """Append the line of one iteration and make it durable."""
    with run.prompt_rewards.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({"iteration": iteration, "rollouts": rollouts}) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def restore_prompt_rewards(run: RunFolder, iteration: int) -> dict[int, Rollouts]:
    """Drop what was written after `iteration`, also a line cut by a crash; return the rest by iteration.

    Raises:
        UserError: one of the iterations from 1 on is missing.
    """
    text = run.prompt_rewards.read_text(encoding="utf-8") if run.prompt_rewards.exists() else ""
    lines = [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]
    kept = {line["iteration"]: line["rollouts"] for line in lines if line["iteration"] <= iteration}
    if list(kept) != list(range(1, iteration + 1)):
        raise UserError(
            f"{run.prompt_rewards} does not hold iterations 1 to {iteration}, by which the sampler chooses prompts",
            "resume from a copy of the run folder",
        )
    records = ({"iteration": number, "rollouts": rollouts} for number, rollouts in kept.items())
    write_text(run.prompt_rewards, "".join(json.dumps(record) + "\n" for record in records))
    return kept

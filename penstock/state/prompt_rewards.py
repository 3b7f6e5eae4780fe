"""What each prompt earned in each iteration: the memory of a sampler that chooses prompts by it.

A file `prompts.jsonl` in the run folder, one line per iteration with the mean reward of every prompt drawn, also of
those that dynamic sampling replaced. It only grows; a checkpoint has the copy that a resume goes on with. Left out:
what is made of it (penstock/session/rollout/draw.py).
"""

from __future__ import annotations

import json
from pathlib import Path

from penstock.base.errors import UserError
from penstock.base.files import append_text, write_text
from penstock.state.run_folder import RunFolder

Rollouts = list[list[tuple[str, float]]]  # of one iteration, in turn: prompt ids and mean rewards, in the order drawn


def append_prompt_rewards(run: RunFolder, iteration: int, rollouts: Rollouts) -> None:
    """Append the line of one iteration and make it durable."""
    append_text(run.prompt_rewards, json.dumps({"iteration": iteration, "rollouts": rollouts}) + "\n")


def restore_prompt_rewards(run: RunFolder, checkpoint: Path | None, iteration: int) -> dict[int, Rollouts]:
    """Bring the file to what it was at `iteration`, and return it by iteration.

    Args:
        checkpoint: the folder of that iteration's checkpoint, verified, or the run's own; None before there is any.

    Raises:
        UserError: one of the iterations from 1 on is missing.
    """
    copy = RunFolder(checkpoint).prompt_rewards if checkpoint is not None else None
    text = copy.read_text(encoding="utf-8") if copy is not None and copy.exists() else ""
    lines = [line for line in text.splitlines(keepends=True) if json.loads(line)["iteration"] <= iteration]
    kept = {line["iteration"]: line["rollouts"] for line in map(json.loads, lines)}
    if list(kept) != list(range(1, iteration + 1)):
        raise UserError(
            f"{copy} does not hold iterations 1 to {iteration}, by which the sampler chooses prompts",
            "go on from another checkpoint: --resume RUN --from ITERATION",
        )
    write_text(run.prompt_rewards, "".join(lines))
    return kept

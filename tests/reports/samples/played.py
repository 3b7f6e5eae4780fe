"""A run folder with responses in it as a training leaves them, written by the code that trainings write with.

Two iterations answer prompts 17 and 18 in common, and prompt 19 in the second alone. Prompt 17 loses. What the model
wrote there is hostile, in Greek, masked, cut and refused, each once. The tokenizer is a real one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from penstock.base.ragged import Ragged
from penstock.data.tokenizer import make_byte_tokenizer
from penstock.state.experience import write_columns
from penstock.state.run_folder import RunFolder

EVIL = "<script>alert(1)</script>\x1b]0;owned\x07"
GREEK = "αβ"
CHARACTERS = "0123456789+-*=. abcdefghijklmnopqrstuvwxyz[]/()<>\x1b;\x07" + GREEK


def played_run(folder: Path) -> RunFolder:
    """Make a run of two iterations with experience, and of two evaluations."""
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    run.config.write_text(yaml.safe_dump({"name": "sums", "model": {"tiny": {}}}))
    make_byte_tokenizer(run.model("initial"), CHARACTERS)
    write(run, run.experience(10), 10, {17: [("42.", 1.0), ("41.", 1.0)], 18: [("7.", 0.0), ("8.", 1.0)]})
    later = {17: [("4", 0.0), (EVIL, 0.5)], 18: [("8.", 1.0), ("8.", 1.0)], 19: [(GREEK, 0.25), ("1", 0.75)]}
    write(run, run.experience(12), 12, later, truncated={0}, refused={4, 5}, masked={3})
    write(run, run.evaluation(0), None, {3: [("1.", 1.0)], 4: [("2.", 0.0)]})
    write(run, run.evaluation(12), None, {3: [("9.", 0.0)], 4: [("2.", 1.0)]})
    return run


def write(
    run: RunFolder,
    path: Path,
    iteration: int | None,
    said: dict[int, list[tuple[str, float]]],
    truncated: set[int] = frozenset(),  # type: ignore[assignment]
    refused: set[int] = frozenset(),  # type: ignore[assignment]
    masked: set[int] = frozenset(),  # type: ignore[assignment]
) -> None:
    """Write an experience, or an evaluation where no iteration is given: by prompt what was said and earned.

    A token's advantage is the reward less a half, growing towards the end; the first token of a masked row is masked.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(run.model("initial") / "tokenizer.json"))
    split = "heldout" if iteration is None else "train"
    rows = [(prompt, number, *pair) for prompt, pairs in said.items() for number, pair in enumerate(pairs)]
    ids = [tokenizer.encode(text).ids + ([] if row in truncated else [1]) for row, (*_, text, _) in enumerate(rows)]
    columns: dict[str, Any] = {
        "sample_id": [f"{iteration or 0:06d}/{split}-{prompt:06d}/{number}" for prompt, number, *_ in rows],
        "prompt_id": [f"{split}-{prompt:06d}" for prompt, *_ in rows],
        "prompt": [f"{prompt}+25=" for prompt, *_ in rows],
        "response": [text for *_, text, _ in rows],
        "response_tokens": Ragged.of(ids, np.int32),
        "truncated": [row in truncated for row in range(len(rows))],
        "reward": np.asarray([reward for *_, reward in rows]),
        "reward_failure": [None] * len(rows),
        "reward/format": np.asarray([float(text.endswith(".")) for *_, text, _ in rows]),
        "reward/reward": np.asarray([reward for *_, reward in rows]),
    }
    if iteration is not None:
        advantages = [
            (reward - 0.5) * np.linspace(0.5, 1, len(tokens)) for tokens, (*_, reward) in zip(ids, rows, strict=True)
        ]
        masks = [
            [0 if row in masked and not place else 1 for place in range(len(ids[row]))] for row in range(len(rows))
        ]
        columns |= {
            "policy_version": np.full(len(rows), iteration - 1),
            "advantages": Ragged.of(advantages, np.float32),
            "loss_mask": Ragged.of(masks, np.uint8),
            "refused": np.asarray([row in refused for row in range(len(rows))], np.uint8),
        }
    path.parent.mkdir(exist_ok=True)
    write_columns(path, columns)


def play_episodes(folder: Path) -> None:
    """Make a run with episodes: one of two turns, one that failed, one from another prompt; held out the same."""
    from tokenizers import Tokenizer

    run = RunFolder(folder)
    folder.mkdir(parents=True)
    run.config.write_text(yaml.safe_dump({"name": "played", "model": {"tiny": {}}}))
    make_byte_tokenizer(run.model("initial"), CHARACTERS)
    tokenizer = Tokenizer.from_file(str(run.model("initial") / "tokenizer.json"))
    episodes = [[("[4+4]", 1), ("=8 ", 0), ("8.<eos>", 1)], [("9 ", 0), ("9.<eos>", 1)], [("1.<eos>", 1)]]
    encoded = [[(tokenizer.encode(text).ids, own) for text, own in episode] for episode in episodes]
    tokens = [[token for ids, _ in episode for token in ids] for episode in encoded]
    masks = [[own for ids, own in episode for _ in ids] for episode in encoded]
    columns: dict[str, Any] = {
        "sample_id": [f"000001/{name}" for name in ("train-000017/0", "train-000017/1", "train-000018/0")],
        "prompt_id": ["train-000017", "train-000017", "train-000018"],
        "prompt": ["4+4="] * 3,
        "response": ["".join(text for text, _ in episode) for episode in episodes],
        "response_tokens": Ragged.of(tokens, np.int32),
        "loss_mask": Ragged.of(masks, np.uint8),
        "truncated": [False] * 3,
        "turns": np.asarray([2, 1, 1]),
        "reward": np.asarray([1.0, 0.0, 0.5]),
        "reward_failure": [None, "environment: timed out after 10 s", None],
    }
    for path in (run.experience(1), run.evaluation(1)):
        path.parent.mkdir()
        write_columns(path, columns)

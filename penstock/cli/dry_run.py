"""What `penstock train --dry-run` prints: configuration, placement, memory, prompts and one reward.

Left out: the checks, which have passed before (penstock/checks/training.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from configs.idle import idle_settings
from configs.loading.load import to_yaml
from configs.schema import TrainConfig
from engines.groups.placement import describe_strategy, reshard_strategy
from engines.groups.spec import placed
from penstock.checks.memory import GroupEstimate
from penstock.checks.prompts import describe_prompts
from penstock.checks.trial_call import trial_call


def print_dry_run(config: TrainConfig, estimates: Sequence[GroupEstimate], console: Console) -> None:
    """Print a training that could start, and what each rank would need; no engine starts."""
    console.print(to_yaml(config), highlight=False, markup=False, soft_wrap=True)
    columns = ("group", "roles", "ranks on", "memory per rank", "of which", "recomputed in the backward pass")
    table = Table(*columns, title="placement and memory estimate")
    for item in estimates:
        places = placed(item.devices)
        parts = "\n".join(f"{name} {size / (1 << 30):.2f} GiB" for name, size in item.memory.parts.items())
        size = f"{item.memory.total / (1 << 30):.2f} GiB\n{item.memory.phase}"
        recomputed = "\n".join(f"{name}: {value}" for name, value in item.recomputed.items())
        table.add_row(item.group, ", ".join(item.roles), places, size, parts, recomputed)
    console.print(table)
    strategy = f"{reshard_strategy(config)} ({describe_strategy(config)})"
    for text in (f"reshard: {strategy}", *idle_settings(config), *describe_prompts(config), *trial_call(config)):
        console.print(text, highlight=False, markup=False, soft_wrap=True)

"""Looks tasks of lm-evaluation-harness up and loads their data: `python -m penstock.tasks.evaluation.harness_tasks`.

A process of its own, since a task may run code of its own, and the library takes seconds to import. It reads
{"tasks": [...], "include_path": null} and writes {"unknown": [...], "failed": {task: reason}} as its last line.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def looked_up(tasks: list[str], include_path: str | None) -> dict[str, Any]:
    """Return which tasks there are not, and which cannot be loaded, with the reason."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include_path)
    unknown, failed = [name for name in tasks if name not in manager.all_tasks], {}
    for name in tasks if not unknown else ():
        try:
            manager.load([name])
        except Exception as error:  # whatever a data set's library raises where its data are not there
            failed[name] = f"{type(error).__name__}: {error}"
    return {"unknown": unknown, "failed": failed}


if __name__ == "__main__":
    print(f"\n{json.dumps(looked_up(**json.loads(sys.argv[1])))}")

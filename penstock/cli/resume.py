"""What the command line looks at before a run goes on, so that a mistake is said before a server starts.

It only reads: the run becomes this process's own in the flow, which looks again. Left out: the going on itself
(penstock/session/going_on.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.checks.tokenized import check_tokenized
from penstock.data.source import reading_once
from penstock.session.going_on import Resume, Tree, changed_config
from penstock.state.digests import Damaged
from penstock.state.manifest import check_resumable


@reading_once()
def checked(
    resume: Resume, kind: str, tree: type[Tree], check: Callable[[Tree], Any], how: str
) -> tuple[Tree | None, Any]:
    """Return the configuration with which a run goes on, and what `check` says of it.

    None stands for that of a damaged run, which the flow makes whole first, and for all that `check` would have said.

    Args:
        how: what to do with a run that was never far enough to be resumed.

    Raises:
        UserError: it is being trained, was made by another command, or cannot go on so.
    """
    run = resume.run
    check_resumable(run, kind, how)
    try:
        config = changed_config(run, tree, resume.changes)
        found = check(config)
        check_tokenized(run, config)
    except Damaged:
        return None, None
    return config, found

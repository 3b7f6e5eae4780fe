"""A program: one training of a sweep, as the flow run that the sweep has made for it.

    python -P -m penstock.cli.runs.swept FLOW_RUN

Its parameters are those of the flow run, so that the page of the sweep has the training below it. As the command
`penstock train` it looks at the configuration before the flow begins, and ends with code 2 and a sentence for a user's
mistake. What is looked at includes vLLM's source, which Python 3.11 cannot parse while another thread parses something:
`SystemError: AST constructor recursion depth mismatch`. Before the flow there is no thread of Prefect's that would.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

from penstock.session.flow_runs.failures import told


def main() -> None:
    """Train; end with the exit code that the command line would have."""
    sys.path.append(str(Path.cwd()))  # as in penstock/cli/main.py: functions are named from here
    from prefect.client.orchestration import get_client
    from prefect.flow_engine import run_flow

    from penstock.flows.train import train

    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(UUID(sys.argv[1]))
    try:
        look_at(flow_run.parameters)
        run_flow(train, flow_run=flow_run)
    except Exception as error:
        if (failure := told(error, [])) is None:
            raise
        print(f"error: {failure[0]}", file=sys.stderr)
        raise SystemExit(failure[1]) from None


def look_at(parameters: Mapping[str, Any]) -> None:
    """Check what can be checked before a training begins or goes on.

    Raises:
        UserError: it cannot.
    """
    from penstock.configs.loading.load import config_from_mapping
    from penstock.data.source import reading_once
    from penstock.session.opening import TRAIN, Resume, looked_at

    if "resume" in parameters:
        looked_at(TRAIN, Resume(Path(parameters["resume"])))
        return
    with reading_once():
        TRAIN.check(config_from_mapping(parameters["config"], "the training"))


if __name__ == "__main__":
    main()

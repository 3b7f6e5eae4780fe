"""What libraries read of the environment at their import, set before: by the command, and by a program's call."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.trackers.table import read_at_import


def quiet_libraries() -> None:
    """Set what libraries read at import: no telemetry, no hub, their news below warnings kept to log files."""
    home = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
    defaults = {
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "PREFECT_SERVER_MEMO_STORE_PATH": str(home / "memo_store.toml"),  # Prefect 3.7 looks in ~/.prefect for these
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(home / "storage"),  # two, whatever its home is
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # A server that is started anew finds the leases of GPU slots; with those in memory they would stay taken.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    for name, value in (defaults | read_at_import()).items():
        os.environ.setdefault(name, value)

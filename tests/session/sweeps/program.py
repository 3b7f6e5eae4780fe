"""A program that stands for a training: it ends with a code, or waits until somebody ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time


def main() -> None:
    """Do what the argument says."""
    wanted = sys.argv[1]
    names = ("LANE", "PREFECT_API_URL", "PREFECT__FLOW_RUN_ID", "PREFECT__DEPLOYMENT_ID")
    print("lane {}, server {}, flow run {}, deployment {}".format(*map(os.environ.get, names)), flush=True)
    if wanted != "wait":
        print(f"ends with {wanted}", flush=True)
        raise SystemExit(int(wanted))
    signal.signal(signal.SIGTERM, last_words)
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
    print(f"child {child.pid}, waits", flush=True)
    while True:
        time.sleep(0.1)


def last_words(*_: object) -> None:
    """Say them, and end."""
    print("said its last words", flush=True)
    raise SystemExit(143)


if __name__ == "__main__":
    main()

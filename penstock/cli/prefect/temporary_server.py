"""Prefect's temporary server, mended as `own_server.py` says: else it, too, stands still for a minute now and then.

    python -m penstock.cli.prefect.temporary_server --factory prefect.server.api.server:create_app ...

Prefect starts it as `python -m uvicorn`, with these arguments; `server.py` puts this module in uvicorn's place.
"""

from __future__ import annotations

import uvicorn

from penstock.cli.prefect.own_server import mend

if __name__ == "__main__":
    mend()
    uvicorn.main()

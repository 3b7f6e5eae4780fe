"""Which models may bring code of their own into a run that was asked for by a form: those that the operator lists.

A form is filled in by people who need not own the machine, and a folder that it names may be anybody's, also one with a
`config.yaml` that trusts itself. So in a run of a deployment code is trusted only if it is that of a folder in the
environment variable `PENSTOCK_TRUSTED_MODELS` (folders, with a colon between two), which belongs to whoever starts the
worker. What is compared is content: a model trained from a listed one, its export and its copies bring the same code.

Left out: a person at a terminal, who trusts by the recipe alone; which files are code (penstock/base/model_code.py).
"""

from __future__ import annotations

import os

from penstock.base.errors import UserError
from penstock.base.model_code import Code, code_of

VARIABLE = "PENSTOCK_TRUSTED_MODELS"
# Prefect's worker starts a process with the first two of these, by the third a deployment is pretended. Rooms below the
# session know no Prefect, and what it says by itself it asks its server for.
KEPT = ("PREFECT__DEPLOYMENT_ID", "PREFECT__RUNTIME__DEPLOYMENT__ID")  # also by a sweep's trainings, of its deployment
SIGNS = ("PREFECT__FLOW_RUN_ID", *KEPT)


def of_deployment() -> bool:
    """Whether this process runs what a form of a deployment asked for, and no command of a person."""
    return any(os.environ.get(sign) for sign in SIGNS)


def check_listed(code: Code | None, source: object) -> None:
    """Check that code of a model may be loaded in a run of a deployment.

    Args:
        code: that the run trusts; None: none.
        source: what brings it, for the message.

    Raises:
        UserError: it is the code of no model that the operator lists.
    """
    if not code or not of_deployment():
        return
    folders = [folder for folder in os.environ.get(VARIABLE, "").split(os.pathsep) if folder]
    if not any(code_of(folder) == code for folder in folders):
        raise UserError(
            f"the code that {source} brings may not be loaded in a run of a deployment: it is that of no model which "
            f"{VARIABLE} lists",
            f"read it; whoever trusts it adds the model's folder where the worker is started: {VARIABLE}=FOLDER:FOLDER",
        )

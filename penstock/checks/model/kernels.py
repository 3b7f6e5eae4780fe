"""Checks that the Transformers library computes a model's layers on a GPU with little memory."""

from __future__ import annotations

from importlib.metadata import version

from packaging.version import Version

from penstock.base.errors import UserError
from penstock.engines.families.table import MAMBA, Family

SCAN_BY_PRODUCTS = Version("5.18")  # of the Transformers library


def check_scan(where: str, family: Family) -> None:
    """Check that the library computes Mamba 2 by products: older ones write out each pair of tokens for all of a state.

    Raises:
        UserError: it does not, and a GPU has no memory for that.
    """
    if family.stacked == MAMBA and Version(version("transformers")) < SCAN_BY_PRODUCTS:
        raise UserError(
            f"{where} has layers of Mamba 2, for which transformers {version('transformers')} needs a number of each "
            "state for each pair of tokens in a chunk",
            f"install transformers {SCAN_BY_PRODUCTS} or newer",
        )

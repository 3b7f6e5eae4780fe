"""Checks that a GPU of this machine may compute a model's layers, and that the library does so with little memory."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.version import Version

from penstock.base.errors import UserError
from penstock.engines.families.architecture import unpackable
from penstock.engines.families.attention import FLEX_COMPARED, NOT_COMPARED, needs_flex
from penstock.engines.families.table import MAMBA, Family, family_of
from penstock.engines.groups.machine import visible_gpus

SCAN_BY_PRODUCTS = Version("5.18")  # of the Transformers library


def check_kernel(folder: Path, key: str, settings: Mapping[str, Any], compares: bool = False) -> None:
    """Check that a GPU of this machine, if there is one, may compute the model's layers.

    What needs FlexAttention may not until that is compared there.

    Args:
        compares: trainer and vLLM are about to be compared, so it may.

    Raises:
        UserError: it may not, or the library would need too much memory for it.
    """
    if not visible_gpus():
        return
    family, where = family_of(settings.get("model_type", "")), f"{key}: {folder}"
    if (why := family.flex_alone or needs_flex(settings)) not in FLEX_COMPARED and not compares:
        raise unpackable(where, f"{why}, {NOT_COMPARED}")
    check_scan(where, family)


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

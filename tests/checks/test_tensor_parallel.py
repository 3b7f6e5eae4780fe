"""A model that vLLM cannot cut over the ranks of an engine is refused before anything starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.base.errors import UserError
from penstock.checks.model import check_tensor_parallel
from penstock.configs.sections.model import TinyModel
from penstock.engines.families.tiny import tiny_shape

SHAPE = replace(tiny_shape(TinyModel()), heads=8, kv_heads=2, intermediate_size=96)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_even_shares_pass(ranks: int) -> None:
    """Also more ranks than key/value heads, which several ranks then hold."""
    check_tensor_parallel(ranks, SHAPE)


@pytest.mark.parametrize(
    ("ranks", "sizes", "message"),
    [
        (3, {}, "8 heads, 2 kv_heads"),
        (4, {"intermediate_size": 98}, "98 intermediate_size"),
        (4, {"kv_heads": 6}, "6 kv_heads"),
    ],
)
def test_uneven_shares_are_refused_by_name(ranks: int, sizes: dict[str, int], message: str) -> None:
    """vLLM would fail in the middle of a start."""
    with pytest.raises(UserError, match=message):
        check_tensor_parallel(ranks, replace(SHAPE, **sizes))

"""Addresses that are shown: of stores and servers, which may have a password in them."""

from __future__ import annotations

import pytest

from penstock.base.addresses import public_address


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://alice:s3cret@mlflow.corp:5000/base", "https://mlflow.corp:5000/base"),
        ("postgresql://alice:p%40ss@db/mlflow", "postgresql://db/mlflow"),
        ("https://mlflow.corp/a@b", "https://mlflow.corp/a@b"),
        ("sqlite:////data/a@b/mlflow.db", "sqlite:////data/a@b/mlflow.db"),
    ],
)
def test_an_address_is_shown_without_its_password(address: str, shown: str) -> None:
    """It stands in reports, artifacts and logs. Controls: addresses without one stay as they are."""
    assert public_address(address) == shown

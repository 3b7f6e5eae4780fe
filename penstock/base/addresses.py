"""Addresses of servers and stores, as they may be shown and written down."""

from __future__ import annotations

from urllib.parse import urlsplit


def public_address(address: str) -> str:
    """Return an address without the name and password of who uses it.

    >>> public_address("https://alice:sesame@mlflow.example.org/base")
    'https://mlflow.example.org/base'
    """
    parts = urlsplit(address)
    return address.replace(f"{parts.netloc.rpartition('@')[0]}@", "", 1) if "@" in parts.netloc else address

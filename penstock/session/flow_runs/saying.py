"""A sentence about a flow of several trainings, where people look: on the terminal, and on the flow run's page."""

from __future__ import annotations

from prefect import get_run_logger
from rich.console import Console


def say(text: str) -> None:
    """Say something on the terminal and on the page of the flow run."""
    get_run_logger().info("%s", text)
    Console().print(text, highlight=False, markup=False, soft_wrap=True)

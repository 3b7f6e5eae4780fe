"""Types of work pools for hosts, for the command line, which imports no Prefect to show its help."""

from __future__ import annotations

from enum import StrEnum


class PoolType(StrEnum):
    """What starts a host on a machine of a pool."""

    process = "process"
    docker = "docker"
    kubernetes = "kubernetes"

"""Engine processes are expensive to start (they import torch, DeepSpeed and vLLM), so all engine tests share them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.shared_ranks import Ranks, Shape


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """A group of one rank."""
    ranks = Ranks.start(1, tmp_path_factory.mktemp("one-rank"))
    yield ranks
    ranks.group.close(grace_s=1.0)  # many engines have collected in it; nothing of them is needed any more


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """A group of two ranks."""
    ranks = Ranks.start(2, tmp_path_factory.mktemp("two-ranks"))
    yield ranks
    ranks.group.close(grace_s=1.0)  # many engines have collected in it; nothing of them is needed any more


@pytest.fixture
def ranks_of(request: pytest.FixtureRequest) -> Callable[[int], Ranks]:
    """The shared group with so many ranks."""
    return lambda count: request.getfixturevalue("one_rank" if count == 1 else "two_ranks")


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Shape], Path]:
    """Makes the folder of a tiny model, once per shape."""
    folders: dict[Shape, Path] = {}

    def folder(shape: Shape) -> Path:
        if shape not in folders:
            folders[shape] = tmp_path_factory.mktemp(f"{shape.architecture}-")
            shape.write(folders[shape])
        return folders[shape]

    return folder

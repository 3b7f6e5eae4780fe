"""When the reference becomes a copy of the actor; the copy itself is shown in tests/engines/ranks/test_reference.py."""

from __future__ import annotations

from penstock.configs.schema import TrainConfig
from penstock.tasks.iteration.refresh_reference import refresh_due


def test_it_is_due_every_so_many_iterations_but_the_last() -> None:
    """After the last one nothing would read it. Controls: without the key, and without a reference, never."""

    def due(**algorithm: object) -> list[int]:
        config = TrainConfig.model_validate({"iterations": 6, "algorithm": algorithm})
        return [number for number in range(1, 7) if refresh_due(config, number)]

    assert due(kl={"refresh_every": 2}) == [2, 4]
    assert due(kl={"refresh_every": 5}) == [5]
    assert due(kl={}) == due() == []

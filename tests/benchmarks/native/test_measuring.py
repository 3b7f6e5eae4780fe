"""The update beside plain PyTorch FSDP and plain DeepSpeed: the same steps, to rounding, or no figures at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.benchmarks.native.measuring import SAME_CPU, _check_same, measure
from penstock.benchmarks.workload.experience import lognormal_lengths
from penstock.configs.schema import TrainConfig
from tests.engines.shared_ranks import Shape

ROWS, PROMPT = 8, 6
TINY = {"hidden_size": 96, "layers": 1, "heads": 3, "kv_heads": 3, "intermediate_size": 96, "max_positions": 64}
LENGTHS = lognormal_lengths(ROWS, PROMPT, mean=8, longest=24)


def config_of(folder: Path, **sections: Any) -> TrainConfig:
    """Return a recipe whose update is the plain one."""
    given: dict[str, Any] = {
        "model": {"path": str(folder)},
        "data": {"max_prompt_tokens": PROMPT},
        "rollout": {"prompts": ROWS // 2, "samples": 2, "max_response_tokens": 24, "ignore_eos": True},
        "algorithm": {"name": "grpo", "mini_batches": 1},
        "actor": {"optimizer": {"learning_rate": 1e-3}, "micro_batch_tokens": 64},
        "groups": {"main": {"ranks": 2, "roles": ["actor", "rollout"]}},
    }
    return TrainConfig.model_validate(given | sections)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    folder = tmp_path_factory.mktemp("model")
    Shape("qwen3", tied=True).write(folder)
    return folder


@pytest.mark.slow
@pytest.mark.xdist_group("flows")
@pytest.mark.timeout(600)
def test_three_programs_take_the_same_steps(model: Path) -> None:
    """Over two ranks, rows of uneven length: the norms of every step. Control: the steps differ from each other."""
    result = measure(config_of(model), LENGTHS, "penstock bench native", steps=3, skip=1, rows=3)
    norms: dict[str, list[float]] = {}
    for row in result.details:
        norms.setdefault(row["library"], []).append(row["grad_norm"])
    ours = norms.pop("Penstock")
    assert set(norms) == {"PyTorch FSDP", "DeepSpeed"} == set(result.peers)
    for theirs in norms.values():
        assert theirs == pytest.approx(ours, rel=2e-4)
    assert abs(ours[1] - ours[0]) > 0.01 * ours[0]
    for figures in (result.figures, *result.peers.values()):
        assert figures["samples_per_s"] == pytest.approx(ROWS / figures["update_s"])


def test_other_gradients_give_no_figures() -> None:
    """A norm that is off by more than rounding. Control: one that is not."""
    rows = [
        {"library": "Penstock", "step": 1, "grad_norm": 2.0},
        {"library": "DeepSpeed", "step": 1, "grad_norm": 2.00001},
    ]
    _check_same(rows, SAME_CPU)
    with pytest.raises(UserError, match=r"norm is 2 here and 2\.01 in plain DeepSpeed"):
        _check_same([rows[0], {**rows[1], "grad_norm": 2.01}], SAME_CPU)


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"algorithm": {"name": "grpo", "mini_batches": 2}}, "one optimizer step on its own tokens"),
        ({"algorithm": {"name": "grpo", "mini_batches": 1, "entropy_coefficient": 0.1}}, "no KL, entropy bonus"),
        ({"actor": {"optimizer": {"learning_rate": 1e-3, "warmup_steps": 3}}}, "a learning rate that holds"),
        ({"actor": {"lora": {"rank": 4, "alpha": 8}}}, "every weight trained"),
        ({"groups": {"main": {"ranks": 3, "roles": ["actor", "rollout"]}}}, "8 rows for 3 ranks"),
        ({"model": {"tiny": TINY}}, "need the folder of a model"),
    ],
)
def test_another_update_is_refused_before_anything_starts(sections: dict[str, Any], told: str, model: Path) -> None:
    """What the plain programs do not do."""
    with pytest.raises(UserError, match=told):
        measure(config_of(model, **sections), LENGTHS, "x", steps=2, skip=0, rows=None)

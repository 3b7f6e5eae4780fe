"""Where a GPU's memory does not suffice for a micro-batch, the iteration is done again with smaller ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.configs.loading.load import load_config
from penstock.engines.groups.group import OutOfMemory
from penstock.engines.groups.spec import GroupSpec
from penstock.flows.train import train
from penstock.session import session
from penstock.session.flow_runs.failures import FAILURE, told
from penstock.state.events import read_events
from penstock.state.run_folder import RunFolder, read_metrics
from tests.comparing import numbers, weights
from tests.faults.test_losses import RECIPES, ROOT, SMALL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("faults")]

ROOMY, SMALLER = 64, 32  # tokens of a micro-batch: of three rows or so, and of one or two
SHORT_PROMPTS = "data.max_prompt_tokens=8"
place = session.place


def _in_short_memory(*arguments: object) -> list[GroupSpec]:
    return [replace(spec, worker="tests.faults.short_memory:ShortWorker") for spec in place(*arguments)]  # type: ignore[arg-type]


@contextmanager
def _short_of_memory() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "place", _in_short_memory)
        yield


@pytest.fixture
def trained(prefect_harness: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunFolder]:
    """Trains in this process, in a folder of a name."""
    monkeypatch.chdir(ROOT)

    def run(name: str, recipe: str, changes: Sequence[str]) -> RunFolder:
        config = load_config(ROOT / "configs" / "careless.yaml", [*SMALL, *RECIPES[recipe], SHORT_PROMPTS, *changes])
        train(config, run_folder=str(tmp_path / name))
        return RunFolder(tmp_path / name)

    return run


@pytest.mark.parametrize(
    ("recipe", "role"), [("grpo", "actor"), pytest.param("ppo", "critic", marks=pytest.mark.exhaustive)]
)
def test_a_training_goes_on_with_smaller_micro_batches(
    trained: Callable[..., RunFolder], recipe: str, role: str
) -> None:
    """It ends in the same bits as one whose recipe has them from that iteration on, of weights and of figures.

    Control: with the large ones throughout they are others.
    """
    key = f"{role}.micro_batch_tokens"
    others = [] if role == "actor" else [f"actor.micro_batch_tokens={SMALLER}"]
    with _short_of_memory():
        short = trained("short", recipe, [f"{key}={ROOMY}", *others])
    planned = trained("planned", recipe, [f"{key}={{0: {ROOMY}, 2: {SMALLER}}}", *others])
    roomy = trained("roomy", recipe, [f"{key}={ROOMY}", *others])
    assert weights(short) == weights(planned)
    live = f"live/{key}"
    recorded = [(at, {name: value for name, value in of.items() if name != live}) for at, of in numbers(short)]
    assert recorded == numbers(planned) != numbers(roomy)
    metrics = [record["metrics"] for record in read_metrics(short)]
    assert [figures.get(live) for figures in metrics] == [None, None, *[SMALLER] * 3]
    assert [figures.get("oom/count") for figures in metrics] == [None, 0, 1, 1, 1]
    lost, recovered = read_events(short)
    assert (lost["event"], lost["reason"]) == ("OutOfMemory", f"no memory left on its GPU for 'update_{role}'")
    assert recovered["place"] == "snapshot 000001"


def test_a_training_ends_where_no_micro_batch_can_be_smaller(trained: Callable[..., RunFolder]) -> None:
    """With what needs less, in words; the rank's own last line among them."""
    with _short_of_memory(), pytest.raises(OutOfMemory) as caught:
        trained("hopeless", "grpo", [f"actor.micro_batch_tokens={ROOMY}", "data.max_prompt_tokens=58"])
    message, code = told(caught.value, []) or ("", 0)
    assert "no memory left on its GPU for 'update_actor'\n" in message
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n" in message
    assert "gradient_checkpointing=true" in message
    assert code == FAILURE

"""Where sampling need not be the same again, as on GPUs, no response that had ended before a kill is generated again.

Left out: that a rollout whose sampling has to be the same comes out the same (test_losses.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from penstock.state.events import read_events
from penstock.state.experience import read_columns
from penstock.state.manifest import read_manifest
from penstock.state.run_folder import RunFolder, read_metrics
from tests.processes import alive
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = 4
RECIPE = (
    "configs/quickstart.yaml",
    "iterations=2",
    "sft=null",
    "data.arithmetic={digits: 2, sft: 256, train: 64, heldout: 16}",
    f"rollout={{prompts: 32, samples: {SAMPLES}, max_response_tokens: 50, max_sequences: 8, ignore_eos: true}}",
    "rollout.reproducible=false",
    "evaluate={every: 0, prompts: 1}",
    "checkpoint.every=1",
)


def _told(path: Path) -> dict[int, list[int]]:
    """The responses in a file that is being written, by their number in the rollout."""
    found: dict[int, list[int]] = {}
    if not path.exists():
        return found
    try:
        with pa.OSFile(str(path), "rb") as source:
            for batch in pa.ipc.open_stream(source):
                for row in batch.to_pylist():
                    found[SAMPLES * row["position"] + row["sample"]] = row["tokens"]
    except pa.ArrowInvalid:  # its last batch is not whole yet
        pass
    return found


def _below(process: subprocess.Popen[bytes]) -> Iterator[psutil.Process]:
    yield from psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize("killed", ["rank", "flow"])
def test_what_had_ended_is_in_the_experience(killed: str, tmp_path: Path) -> None:
    """A killed rank costs the flow nothing but the rest, and neither does a killed flow that is resumed."""
    run, said = RunFolder(tmp_path / "run"), tmp_path / "said"
    program = [sys.executable, "-m", "penstock.cli.main", "train"]

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        with said.open("ab") as output:
            return subprocess.Popen([*program, *arguments], cwd=ROOT, stdout=output, stderr=output, env=os.environ)

    training = start(*RECIPE, "--run", str(run.path))

    def in_the_second() -> bool:
        """Whether the first iteration will not be done again, and the second has had some responses."""
        return run.manifest.is_file() and read_manifest(run).progress.iteration == 1 and len(_told(run.ended(2))) >= 16

    until(lambda: in_the_second() or training.poll() is not None, 300, "some responses", 0.01)
    told, started = _told(run.ended(2)), list(_below(training))
    if killed == "flow":
        training.kill()
        until(lambda: not any(map(alive, started)), 20, "all that the flow started is gone")
        training.wait()
        training = start("--resume", str(run.path))
    else:
        (rank,) = [process for process in started if process.cmdline()[-1:] == ["engines.groups.rank"]]
        rank.kill()
    assert training.wait(300) == 0, said.read_text(encoding="utf-8")
    assert 16 <= len(told) < 32 * SAMPLES
    responses = read_columns(run.experience(2), ["response_tokens"])["response_tokens"]
    assert len(responses) == 32 * SAMPLES
    assert {number: responses.row(number).tolist() for number in told} == told
    taken_over = [record["metrics"].get("rollout/taken_over", 0) for record in read_metrics(run)][-2:]
    assert taken_over[0] == 0 and len(told) <= taken_over[1] < 32 * SAMPLES
    assert [event["event"] for event in read_events(run)] == ([] if killed == "flow" else ["RankLost", "recovered"])
    assert not run.ended(1).exists() and not run.ended(2).exists()

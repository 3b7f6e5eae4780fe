"""The rooms: all are in the contracts, none is crowded, and the flow's process imports no library of the engines.

Which room may import which is checked by import-linter (`make lint`); it cannot see whether an import waits inside a
function.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST_FILES = 16
HEAVY = ("deepspeed", "torch", "vllm")
ROOMS = sorted(f"penstock/{path.parent.name}" for path in (ROOT / "penstock").glob("*/__init__.py"))
OF_ENGINES = ("penstock/algorithms", "penstock/benchmarks", "penstock/engines")  # which may import their libraries
LIGHT = (
    *(room for room in ROOMS if room not in OF_ENGINES),
    "penstock/engines/commands",
    "penstock/engines/families",
    "penstock/engines/groups",
    "penstock/engines/sizing",
)
WITH_MLFLOW = ("penstock/reports", "penstock/trackers")  # `penstock compare` compares runs in MLflow, wherever they ran
ROOMS_WITHOUT_MLFLOW = [room for room in ROOMS if room not in WITH_MLFLOW]
KNOW_MLFLOW = {  # files of other rooms, and why
    "penstock/benchmarks/accuracy/side_by_side.py": "gives trainings side by side a database each",
    "penstock/flows/compare.py": "compares runs in MLflow",
    "penstock/tasks/compare.py": "compares runs in MLflow",
    "penstock/doctor/doctor.py": "says how to move MLflow's database off a network disk",
    "penstock/doctor/machine_facts.py": "lists the variables that a report of the machine shows",
}
NOT_IMPORTED = {"vllm_harness", "vllm_load", "vllm_server"}  # programs on vLLM: a harness, its load test and server
NOT_IMPORTED |= {"verifiers_runner"}  # and one for another interpreter
IMPORT = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]; print([*sys.modules])"


def modules(folder: str) -> list[str]:
    """Return the dotted names of a folder's modules."""
    paths = [path for path in sorted((ROOT / folder).rglob("*.py")) if path.stem not in {"__init__", *NOT_IMPORTED}]
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]


def loaded(*names: str) -> set[str]:
    """Return the engines' libraries that a process has which imports modules."""
    done = subprocess.run([sys.executable, "-c", IMPORT, *names], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in HEAVY if repr(name) in done.stdout}


def test_rooms_of_the_flows_process_bring_no_library_of_the_engines() -> None:
    """All modules of all of them, in one process."""
    assert loaded(*(name for folder in LIGHT for name in modules(folder))) == set()


def test_a_library_of_the_engines_is_noticed() -> None:
    """The control."""
    assert loaded("penstock.engines.batches.packing") == {"torch"}


def crowded(root: Path, *rooms: str) -> dict[str, int]:
    """Return the folders of rooms that hold more files of Python than a reader looks over at once."""
    holds = Counter(path.parent for room in rooms for path in (root / room).rglob("*.py"))
    return {str(folder.relative_to(root)): count for folder, count in holds.items() if count > MOST_FILES}


def test_no_folder_holds_more_than_sixteen_files() -> None:
    """The limit counts `__init__.py`, and holds for tests too."""
    assert crowded(ROOT, "penstock", "tests") == {}


def test_a_crowded_folder_is_noticed_however_deep(tmp_path: Path) -> None:
    """The control: one file more than the limit, and beside it a folder that is just full."""
    for folder, count in (("room/full", MOST_FILES), ("room/inner/crowded", MOST_FILES + 1)):
        (tmp_path / folder).mkdir(parents=True)
        for number in range(count):
            (tmp_path / folder / f"file_{number}.py").touch()
    assert crowded(tmp_path, "room") == {"room/inner/crowded": MOST_FILES + 1}


def names_of_mlflow(path: Path) -> list[str]:
    """Return names, and texts with names, which know MLflow: `mlflow_port`, `["mlflow_run_id"]`, `MLFLOW_TRACKING_URI`.

    A sentence that only speaks of MLflow has none; the tracker's name in a recipe is no name of MLflow's either.
    """
    with tokenize.open(path) as stream:
        tokens = list(tokenize.generate_tokens(stream.readline))
    telling = {tokenize.NAME: "(?i)mlflow", tokenize.STRING: "(?i)mlflow_"}
    return [item.string for item in tokens if item.type in telling and re.search(telling[item.type], item.string)]


@pytest.mark.parametrize("room", ROOMS_WITHOUT_MLFLOW)
def test_a_room_knows_a_tracker_and_not_mlflow(room: str) -> None:
    """import-linter sees imports alone. Control: in the room of trackers such names are found."""
    knowing = {str(path.relative_to(ROOT)) for path in (ROOT / room).rglob("*.py") if names_of_mlflow(path)}
    assert knowing == {path for path in KNOW_MLFLOW if Path(path).is_relative_to(room)}
    assert names_of_mlflow(ROOT / "penstock/trackers/table.py")


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("port = mlflow_port", ["mlflow_port"]),
        ("os.environ['MLFLOW_TRACKING_URI']", ["'MLFLOW_TRACKING_URI'"]),
        ("'export MLFLOW_TRACKING_URI=x'", ["'export MLFLOW_TRACKING_URI=x'"]),
        ("tracker = 'mlflow'  # as MLflow does", []),
        ("'MLflow has interactive charts'", []),
    ],
)
def test_what_is_a_name_of_mlflow(tmp_path: Path, line: str, names: list[str]) -> None:
    """Whatever the case of its letters. Controls: the tracker's name in a recipe, and a sentence."""
    (tmp_path / "file.py").write_text(f"{line}\n", encoding="utf-8")
    assert names_of_mlflow(tmp_path / "file.py") == names


def test_every_room_has_its_layer() -> None:
    """A new one would be checked by nothing. Control: the layers name no room that is not there."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    named = {room.strip() for layer in layers for room in layer.split("|")}
    rooms = {room.replace("/", ".") for room in ROOMS}
    engines = {".".join(path.parent.relative_to(ROOT).parts) for path in ROOT.glob("penstock/engines/*/__init__.py")}
    assert named == rooms - {"penstock.engines"} | engines

"""The wheel: one name at its top, with recipes, deployments and templates inside, and usable where no checkout is.

`make wheel` also installs the libraries that it asks for, which takes minutes; here they are those of the checkout.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.configs.tree.recipes import read_tree
from tests.processes import ROOT
from tests.training import SHORTEST

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = "from penstock.cli.main import main; main()"
LIBRARIES = next(entry for entry in sys.path if entry.endswith("site-packages"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The wheel of a copy of this checkout, since a build leaves files."""
    folder = tmp_path_factory.mktemp("wheel")
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in files:
        if name.startswith(("penstock/", "configs/", "deploy/")) or "/" not in name:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    (folder / "deploy" / ".env").write_text("POSTGRES_PASSWORD=secret\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "."]
    subprocess.run([*command, "--wheel-dir", "dist"], cwd=folder, check=True)
    (built,) = (folder / "dist").glob("penstock-*.whl")
    yield built


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A person's folder, with modules of the names that our rooms have."""
    for name in ("algorithms", "benchmarks", "configs", "engines", "flows", "tasks"):
        (tmp_path / f"{name}.py").write_text("def score(response): return float(len(response))\n", encoding="utf-8")
    return tmp_path


def run(wheel: Path, here: Path, *arguments: str, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    """Run a command with what the wheel holds and the libraries, and without this checkout.

    A path entry of an environment does not bring what its own path files name: the editable install is not seen.
    """
    inside = here / "installed"
    with zipfile.ZipFile(wheel) as files:
        files.extractall(inside)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"PYTHONPATH": f"{inside}{os.pathsep}{LIBRARIES}", "PREFECT_HOME": str(here / "prefect")}
    command = [sys.executable, "-S", "-c", program, *arguments]
    return subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)


def test_a_wheel_has_one_name_and_all_that_a_checkout_has(wheel: Path) -> None:
    """No name that a user's package could have, and no passwords. Controls: tests are not in it, each recipe is."""
    names = zipfile.ZipFile(wheel).namelist()
    (information,) = {name.partition("/")[0] for name in names} - {"penstock"}
    assert information.startswith("penstock-") and information.endswith(".dist-info")
    shipped = {name.removeprefix("penstock/shipped/") for name in names if name.startswith("penstock/shipped/")}
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert shipped == {name for name in files if name.startswith(("configs/", "deploy/")) or name == "prefect.yaml"}
    package = {name for name in files if name.startswith("penstock/")}
    assert package <= {*names}


def test_every_recipe_of_a_wheel_is_found_with_what_it_builds_on(wheel: Path, here: Path) -> None:
    """Wherever one works. Control: a recipe of one's own in its place is the one that is read."""
    names = [f"configs/{path.name}" for path in sorted((ROOT / "configs").glob("*.yaml"))]
    code = "import sys; from pathlib import Path; from penstock.configs.tree.recipes import read_tree; "
    code += "print([read_tree(Path(name))['name'] for name in sys.argv[1:]])"
    done = run(wheel, here, *names, program=code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([read_tree(ROOT / name)["name"] for name in names])
    (here / "configs").mkdir()
    (here / "configs" / "quickstart.yaml").write_text("name: mine\n", encoding="utf-8")
    assert run(wheel, here, "configs/quickstart.yaml", program=code).stdout.strip() == "['mine']"


def test_it_trains(wheel: Path, here: Path) -> None:
    """Hosts, ranks and workers are of the wheel as well. Control: the checkout is nowhere on their path."""
    own = ("iterations=1", "evaluate={every: 0}", "checkpoint.every=0", "reward.function=tasks:score")
    smaller = [one for one in SHORTEST if not one.startswith(("iterations", "evaluate", "reward"))]
    done = run(wheel, here, "train", "configs/quickstart.yaml", *smaller, *own, "reward.settings=null", "--run", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (here / "run" / "models" / "final" / "model.safetensors").is_file()
    assert str(ROOT) not in run(wheel, here, program="import sys; print(sys.path)").stdout.replace(LIBRARIES, "")


def test_a_recipe_and_a_reward_of_ones_own_from_a_wheel(wheel: Path, here: Path) -> None:
    """Ours is found by its name, theirs before it; a module of a room's name is the user's."""
    done = run(
        wheel,
        here,
        "train",
        "configs/quickstart.yaml",
        "reward.function=tasks:score",
        "reward.settings=null",
        "--dry-run",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tasks:score" in done.stdout
    (here / "configs").mkdir()
    (here / "configs" / "quickstart.yaml").write_text("itertions: 1\n", encoding="utf-8")
    theirs = run(wheel, here, "train", "configs/quickstart.yaml", "--dry-run")
    assert theirs.returncode == 2 and "itertions" in theirs.stderr
    none = run(wheel, here, "train", "configs/quickstrat.yaml", "--dry-run")
    assert none.returncode == 2 and "does not exist" in none.stderr

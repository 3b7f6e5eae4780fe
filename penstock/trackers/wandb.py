"""Weights & Biases as a tracker: a training is one W&B run, on its server or offline in files beside the run folders.

W&B's library starts a process of its own, which this one talks to over a socket in the file system. It ends with the
training: `close` ends it, and it ends by itself within about a second of a training that was killed. What it had not
written then is missing from its files, is found missing by a resume, and comes once more (wandb_records.py).

Rows have W&B's numbers, which must grow, and the figure `step`, by which its charts are drawn: figures of an iteration
may come after those of the next. An attempt goes on in the same run, offline with a file of its own.

Left out: models; terminal output, code, system metrics and facts about the machine, all of which W&B would take by
itself; uploading what was recorded offline, which is `wandb sync`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from penstock.base.addresses import public_address
from penstock.base.errors import UserError
from penstock.trackers.tracker import ITERATION, Artifact, Figures, Model, NewRun, Status, Table
from penstock.trackers.wandb_records import EXIT_CODES, STEP, Held, held_in_files, held_on_server

if TYPE_CHECKING:
    from wandb import Run

AT_IMPORT = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
WITHHELD = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_SERVICE")  # the last: where its process listens
FINISH_S = 20.0  # for the server to take what is left at the end; it stays in the files

_OURS = "penstock"  # folder of our files, beside those that W&B itself keeps of a run
_OFFLINE = ("offline", "dryrun")


class WandbTracker:
    """A run of W&B.

    Args:
        runs: directory of the run folders, in which W&B keeps its folder `wandb`.
        mode: "online" or "offline".
    """

    label = "W&B"

    def __init__(self, runs: Path, mode: str) -> None:
        self._runs, self._mode = runs.resolve(), mode
        self.run, self.page = "", ""
        self._held: Held | None = None  # None: the files or the server are to be asked
        self._begun: Run | None = None

    @property
    def address(self) -> str:
        if self._mode == "offline":
            return str(self._runs / "wandb")
        return public_address(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))

    @property
    def _id(self) -> str:
        return self.run.rpartition("/")[2]

    @property
    def _folders(self) -> list[Path]:
        """Of all attempts, the oldest first."""
        found = (self._runs / "wandb").glob(f"*run-*-{self._id}")
        return sorted(found, key=lambda folder: folder.name.removeprefix("offline-"))

    def open(self, new: NewRun) -> str:
        """Begin a run in the project of the experiment's name.

        Raises:
            UserError: W&B does not begin it.
        """
        project = re.sub(r"[/\\#?%:]", "-", new.experiment)  # W&B refuses these
        self.run = f"{project}/{secrets.token_hex(6)}"
        self._held = Held(new.name)
        with self._talking() as run:
            run.config.update(dict(new.tags))
        return self.run

    def find(self, run: str) -> bool:
        """Be about a run, unless it is gone; one that was begun offline goes on so.

        Raises:
            UserError: the server does not answer, or wants a key.
        """
        from wandb import Api, errors

        self.run, self._held = run, None
        if self._mode == "offline" or any(folder.name.startswith("offline-") for folder in self._folders):
            self._mode = "offline"
            return bool(self._folders)
        try:
            Api(timeout=20).run(run)
        except (errors.Error, ValueError) as error:
            if "could not find" in str(error).lower():
                return False
            said = " ".join(str(error).split())[:300]
            raise UserError(f"W&B ({self.address}) does not show the run {run}: {said}", "see to that") from error
        return True

    def resume(self) -> None:
        with self._talking():
            pass  # an attempt that has begun is running

    def configure(self, settings: Mapping[str, str]) -> bool:
        """Keep settings as W&B's configuration of the run, numbers as numbers."""
        held = self._state().config
        news = {name: _plain(value) for name, value in settings.items() if held.get(name) != _plain(value)}
        if not news:
            return False
        with self._talking() as run:
            run.config.update(news, allow_val_change=True)
        held |= news
        return True

    def log(self, figures: Sequence[Figures]) -> None:
        for item in figures:
            self._row(item.step, item.values)

    def _row(self, step: int, values: Mapping[str, Any]) -> None:
        with self._talking() as run:
            held, row = self._state(), {**values, STEP: step}
            run.log(row, step=held.rows, commit=True)
            held.add({**row, "_step": held.rows})

    def logged(self, figure: str) -> set[int]:
        return set(self._state().steps.get(figure, ()))

    def logged_through(self) -> int:
        return max(self.logged(ITERATION), default=-1)

    def table(self, table: Table) -> None:
        """Keep a table as one of W&B's, of which its pages show any step, and as a file, unless it is there."""
        from wandb import Table as TheirTable

        if not self.lacking({table.name: table.path}):
            return
        rows = table.rows()
        columns = list(rows[0]) if rows else []
        shown = TheirTable(columns=[*columns], data=[[_told(row[column]) for column in columns] for row in rows])
        name = PurePosixPath(table.name)
        self._row(int(name.stem), {str(name.parent): shown})
        self.artifact(Artifact(table.name, table.path))

    def artifact(self, artifact: Artifact) -> None:
        with self._talking() as run:
            place = Path(run.dir, _OURS, artifact.name)
            place.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(artifact.content, str):
                place.write_text(artifact.content, encoding="utf-8")
            elif artifact.content.is_dir():
                shutil.copytree(artifact.content, place, dirs_exist_ok=True)
            else:
                shutil.copyfile(artifact.content, place)
            for path in [place] if place.is_file() else sorted(place.rglob("*")):
                if path.is_file():
                    run.save(str(path), base_path=run.dir, policy="now")

    def lacking(self, files: Mapping[str, Path]) -> set[str]:
        """Return the names of files that no attempt has kept as they are now, going by their size."""
        return {name for name, path in files.items() if path.stat().st_size not in self._sizes(name)}

    def _sizes(self, name: str) -> set[int]:
        kept = (folder / "files" / _OURS / name for folder in reversed(self._folders))
        newest = next((path for path in kept if path.is_file()), None)
        return set() if newest is None else {newest.stat().st_size}

    def model(self, model: Model) -> str | None:
        return None

    def status(self) -> Status | None:
        return self._state().status

    def close(self, status: Status, at_s: float) -> None:
        """End the run, and W&B's process; the time of its end is W&B's own."""
        import wandb

        with self._talking() as run:
            run.finish(exit_code=EXIT_CODES[status])
            self._state().status = status
        self._begun = None
        wandb.teardown()

    def _state(self) -> Held:
        if self._held is None:
            self._held = self._asked()
        return self._held

    def _asked(self) -> Held:
        if self._mode == "offline":
            return held_in_files([folder / f"run-{self._id}.wandb" for folder in self._folders])
        from wandb import Api

        return held_on_server(Api(timeout=20).run(self.run))

    @contextmanager
    def _talking(self) -> Iterator[Run]:
        """Yield the run; where W&B's process is gone, let the next use begin another, and ask anew what is held."""
        try:
            if self._begun is None:
                self._begun = self._begin()
            yield self._begun
        except OSError as error:
            self._begun, self._held = None, None
            _forget_process()
            said = "W&B's process ended; what it had not written comes with a resume or `penstock sync`"
            raise ConnectionError(said) from error

    def _begin(self) -> Run:
        """Begin an attempt at the run.

        Raises:
            UserError: W&B does not begin it.
        """
        import wandb

        held = self._state()
        while self._folders and time.strftime("%Y%m%d_%H%M%S") in self._folders[-1].name:
            time.sleep(0.05)  # W&B names an attempt's folder after the second, and would write over what is there
        try:
            run = wandb.init(
                project=self.run.rpartition("/")[0],
                id=self._id,
                name=held.name or None,
                dir=str(self._runs),
                resume="allow",
                reinit="create_new",
                mode="offline" if self._mode == "offline" else "online",
                settings=_settings(),
            )
        except wandb.errors.Error as error:
            said = " ".join(str(error).split())[:300]
            raise UserError(f"W&B ({self.address}) begins no run: {said}", "or set WANDB_MODE=offline") from error
        self.page = run.url or ""
        held.rows, held.status = max(held.rows, run.step), None
        run.define_metric("*", step_metric=STEP)
        return run


def _settings() -> Any:
    """Return what keeps W&B to what it is given."""
    import wandb

    return wandb.Settings(
        console="off",
        silent=True,
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        x_disable_stats=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
        finish_timeout=FINISH_S,
        init_timeout=30.0,
    )


def _forget_process() -> None:
    """Have the library forget its process, which is gone: the next run begins another."""
    import wandb

    with contextlib.suppress(OSError):
        wandb.teardown()


def _plain(value: str) -> Any:
    """Return a setting as it was before it became text."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def _told(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def made_for(folder: Path) -> WandbTracker:
    """Return the tracker for the runs in a directory, and import W&B; no server is asked."""
    for name, value in AT_IMPORT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("WANDB_DATA_DIR", str(folder.resolve() / "wandb"))  # tables on their way; else in the home
    import wandb  # noqa: F401

    return WandbTracker(folder, mode())


def mode() -> str:
    """Return the mode of the environment: "online" or "offline".

    Raises:
        UserError: it is another.
    """
    said = os.environ.get("WANDB_MODE", "online")
    if said != "online" and said not in _OFFLINE:
        raise UserError(
            f"WANDB_MODE={said}: the tracker 'wandb' has nothing to do", "set online or offline, or take it out"
        )
    return "online" if said == "online" else "offline"


def ready() -> None:
    """Refuse where W&B is not installed, or has no key for its server; no server is asked.

    Raises:
        UserError: says what is missing.
    """
    if importlib.util.find_spec("wandb") is None:
        raise UserError("the tracker 'wandb' needs Weights & Biases", "pip install 'penstock[trackers]'")
    if mode() == "offline":
        return
    import wandb

    if not wandb.login(prompt=False, verify=False):
        raise UserError("W&B has no API key", "set WANDB_API_KEY, or WANDB_MODE=offline and upload with `wandb sync`")

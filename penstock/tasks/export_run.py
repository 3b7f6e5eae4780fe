"""Export of a run that nobody trains: from models/final or a checkpoint, its newest by default, to a folder to hand on.

The folder is written aside, loaded anew, compared with its source, described by a card, and only then renamed: it is
there as a whole or not at all. Weights that exist as a folder are linked, not copied, where the file system can.

A version of the registry is exported from its folder likewise, with the card that the folder has or its run's.

No engine starts, so a run of many ranks is exported on a machine without a GPU, in memory for the model twice.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from penstock.base.errors import UserError
from penstock.base.files import filling
from penstock.base.model_code import Code
from penstock.configs.schema import TrainConfig
from penstock.reports.model_card import ModelFacts, figures_until, model_card
from penstock.session.registry.registering import deliver_version, new_version, with_registry
from penstock.session.session import read_config
from penstock.state.manifest import ANEW, Manifest, Tracked, read_manifest, verify_checkpoint
from penstock.state.mending import checkpoint_named
from penstock.state.run_folder import RunFolder, locked, open_run_folder, read_metrics
from penstock.tasks.finetuning.checkpoints import copy_tokenizer
from penstock.trackers.registry import Version
from penstock.trackers.table import keeps, make_tracker
from penstock.trackers.tracker import Model, Tracker
from penstock.usercode.trusted_models import check_listed

if TYPE_CHECKING:
    from penstock.engines.models.model_folder import Proof

SHARD_SIZE = "5GB"
PROMPTS = 4
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")  # of a Hugging Face folder, beside the weights


@dataclass(frozen=True)
class Exported:
    """A finished export.

    Attributes:
        source: the folder that its weights come from.
        models: what each tracker that the run was recorded in calls the model, by its label; None: it keeps no models,
            or does not hold the run. Empty where a version was exported.
        version: which version of a registered model it is; None: of none.
    """

    folder: Path
    source: Path
    proof: Proof
    models: dict[str, str | None]
    version: Version | None

    def lines(self) -> list[str]:
        """What was written, compared and registered, for people."""
        proof = self.proof
        unknown = "not registered: its store keeps no models or lacks the run"
        return [
            f"model: {self.folder}",
            f"weights: from {self.source}, {proof.dtype}, all {proof.tensors} tensors equal",
            f"logits: {proof.prompts} prompts, within {proof.logit_difference:.3g} "
            f"(tolerance {proof.logit_tolerance:.3g})",
            *[f"{label}: {f'model {model}' if model else unknown}" for label, model in self.models.items()],
            *([f"registered: {self.version}"] if self.version is not None else []),
        ]


@task(task_run_name="export-run", cache_policy=NO_CACHE)
def export_from_page(run: str, checkpoint: str | None, to: str | None, max_shard_size: str | None) -> str:
    """Export as `penstock export` does; return the folder. What was compared is on the page of the flow run."""
    done = export_run(run_to_export(Path(run)), None if to is None else Path(to), max_shard_size, checkpoint or None)
    lines = [*done.lines(), f"serve it: penstock serve {quote(str(done.folder))}"]
    for line in lines:
        get_run_logger().info("%s", line)
    create_markdown_artifact("\n".join(f"- {line}" for line in lines), key="export")
    return str(done.folder)


def run_to_export(folder: Path) -> RunFolder:
    """Return the run in a folder.

    Raises:
        UserError: there is none, or it ended before it had a model.
    """
    run = open_run_folder(folder)
    if not run.manifest.is_file():
        raise UserError(f"{folder} has no model to export: it ended early", ANEW)
    return run


def export_run(run: RunFolder, target: Path | None, shard_size: str | None, checkpoint: str | None = None) -> Exported:
    """Write the trained model of `run` to `target` (default: models/export of the run), and tell its trackers.

    Args:
        shard_size: most bytes of a weights file, e.g. "2GB"; None keeps the files of models/final as they are.
        checkpoint: name of the one to export, e.g. 000010; None: models/final, or else the newest.

    Raises:
        UserError: the run is being trained, has no such weights, or they are damaged; or `target` is not empty.
    """
    target = (target or run.model("export")).resolve()
    _check_target(target, shard_size)
    with locked(run):
        manifest, source = _source(run, read_manifest(run), checkpoint)
        with filling(target) as aside:
            proof = _write(run, manifest, source, aside, shard_size)
            facts = _facts(run, manifest, source, proof)
            (aside / "README.md").write_text(model_card(facts), encoding="utf-8")
        models = _tell_trackers(run, manifest, target, facts)
        version = _register(run, manifest, target, int(facts.figures["iterations"]))
        return Exported(target, source, proof, models, version)


def export_version(version: Version, target: Path | None, shard_size: str | None) -> Exported:
    """Write the model of a version, whose folder has been checked, to `target`; the registry is told nothing.

    Raises:
        UserError: no target is named, or it is not empty.
    """
    if target is None:
        raise UserError(f"{version} needs a folder to be written to", "name one with --to")
    target = target.resolve()
    _check_target(target, shard_size)
    source, run = Path(str(version.folder)), RunFolder(Path(str(version.run)))
    with filling(target) as aside:
        prompts = _prompts(run) if run.prompts("train").is_file() else [[0]]
        code = read_config(run).model.code if run.config.is_file() else None
        check_listed(code, source)
        proof = _write_folder(source, aside, shard_size, prompts, code)
        if (source / "README.md").is_file():
            shutil.copy2(source / "README.md", aside)
        elif run.manifest.is_file():
            facts = _facts(run, read_manifest(run), source, proof)
            (aside / "README.md").write_text(model_card(facts), encoding="utf-8")
    return Exported(target, source, proof, {}, version)


def _check_target(target: Path, shard_size: str | None) -> None:
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"{target} exists and is not an empty folder", "name another one with --to")
    if shard_size is not None and not re.fullmatch(r"[1-9]\d*(KB|MB|GB)", shard_size):
        raise UserError(f"'{shard_size}' is no size of a file", "write a number and KB, MB or GB, for example 2GB")


@contextmanager
def model_of_checkpoint(run: RunFolder, checkpoint: str, folder: Path) -> Iterator[Path]:
    """Write the model of a checkpoint to a folder that goes with the context.

    Raises:
        UserError: the run is being trained, has no such checkpoint, or it is damaged.
    """
    with locked(run):
        manifest, source = _source(run, read_manifest(run), checkpoint)
        with filling(folder) as aside:
            _write(run, manifest, source, aside, None)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _source(run: RunFolder, manifest: Manifest, checkpoint: str | None) -> tuple[Manifest, Path]:
    """Return the folder that the weights are in, and the run's manifest with the progress of those weights."""
    if not run.prompts("train").is_file() and any(run.model("final").parent.glob("*/config.json")):
        raise UserError(
            f"{run.path} holds no iterations of reinforcement learning, and `penstock export` is for those",
            f"what else was trained is a whole model folder already, in {run.model('final').parent}",
        )
    if checkpoint is None and (final := run.model("final")).is_dir():
        return manifest, final
    if manifest.checkpoint is None:
        raise UserError(
            f"{run.path} has no checkpoint yet, so there are no trained weights",
            f"train on with 'penstock train --resume {run.path}'; checkpoint.every says how often one is written",
        )
    folder = run.checkpoints / checkpoint_named(run, checkpoint or manifest.checkpoint)
    remedy = f"'penstock train --resume {run.path}' sets it aside and goes on from the one before"
    saved = verify_checkpoint(folder, remedy)
    return replace(manifest, progress=saved.progress), folder


def _write(run: RunFolder, manifest: Manifest, source: Path, aside: Path, shard_size: str | None) -> Proof:
    config = read_config(run)
    code = config.model.code
    check_listed(code, run.path)
    if source == run.model("final"):
        return _write_folder(source, aside, shard_size, _prompts(run), code)
    from transformers.utils.logging import disable_progress_bar

    from penstock.engines.models.model_folder import prove_same, with_adapters, with_weights, write_folder
    from penstock.engines.models.peft import ADAPTER_FOLDER
    from penstock.engines.training.state_images import read_causal_lm_weights, saved_actor

    disable_progress_bar()
    tokenizer, state = _starting_model(manifest), saved_actor(source)
    trained = read_causal_lm_weights(state)
    if (lora := config.actor.lora) is None:
        lm = with_weights(tokenizer, trained, code)
    else:
        lm = with_adapters(tokenizer, trained, lora, state.frozen_sum, aside / ADAPTER_FOLDER, code)
    write_folder(lm, aside, shard_size or SHARD_SIZE)
    copy_tokenizer(tokenizer, aside, code)
    return prove_same(lm, aside, _prompts(run), code)


def _write_folder(
    source: Path, aside: Path, shard_size: str | None, prompts: Sequence[Sequence[int]], code: Code | None
) -> Proof:
    """Write a model that is a folder already."""
    from transformers.utils.logging import disable_progress_bar

    from penstock.engines.models.model_folder import load_folder, prove_same, write_folder
    from penstock.engines.models.peft import ADAPTER_FOLDER

    disable_progress_bar()
    lm = load_folder(source, code)
    if (source / ADAPTER_FOLDER).is_dir():
        shutil.copytree(source / ADAPTER_FOLDER, aside / ADAPTER_FOLDER)
    if shard_size is None:
        _link(source, aside)
    else:
        write_folder(lm, aside, shard_size)
    copy_tokenizer(source, aside, code)
    return prove_same(lm, aside, prompts, code)


def _starting_model(manifest: Manifest) -> Path:
    folder = Path(str(manifest.model))
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{folder}, from which the run started, is gone: the architecture and the tokenizer are in it",
            "put it back",
        )
    return folder


def _link(source: Path, target: Path) -> None:
    """Link the weights, or copy them where a link cannot be (another file system), and copy what is small."""
    for path in source.glob("*.safetensors"):
        try:
            os.link(path, target / path.name)
        except OSError:
            shutil.copy2(path, target / path.name)
    for path in (path for pattern in SMALL_FILES for path in source.glob(pattern)):
        shutil.copy2(path, target / path.name)


def _prompts(run: RunFolder) -> Sequence[Sequence[int]]:
    """The first prompts that the run learned from, as token ids."""
    from penstock.state.experience import read_columns

    tokens = read_columns(run.prompts("train"), ["prompt_tokens"])["prompt_tokens"]
    return [tokens.row(index).tolist() for index in range(min(PROMPTS, len(tokens)))]


def _facts(run: RunFolder, manifest: Manifest, source: Path, proof: Proof) -> ModelFacts:
    from penstock.base.provenance import commit, versions

    config, records = read_config(run), read_metrics(run)
    through = records[-1]["iteration"] if source == run.model("final") and records else manifest.progress.iteration
    # Names and ids alone: paths and addresses of stores are not for whoever the folder is handed to.
    links = {
        "run": run.name,
        "weights": str(source.relative_to(run.path)),
        **{f"{_tracker(run, tracked).label} run": tracked.run for tracked in _keeping(manifest)},
        "Prefect flow run": manifest.prefect_flow_run_id,
    }
    return ModelFacts(
        name=run.name,
        base_model=_base_model(config),
        algorithm=config.algorithm.name,
        seed=config.seed,
        figures=figures_until(records, through),
        check=(
            f"{proof.dtype}; {proof.tensors} tensors equal to the source's, logits of {proof.prompts} prompts "
            f"within {proof.logit_difference:.2g}"
        ),
        versions=versions(),
        commit=commit(),
        own_code=config.model.code is not None,
        links={label: str(value) for label, value in links.items() if value},
    )


def _base_model(config: TrainConfig) -> str:
    if config.model.path is None:
        return "a tiny model with random weights"
    return config.model.revision or Path(config.model.path).name


def _tracker(run: RunFolder, tracked: Tracked) -> Tracker:
    return make_tracker(tracked.tracker, run.path.parent)


def _tell_trackers(run: RunFolder, manifest: Manifest, folder: Path, facts: ModelFacts) -> dict[str, str | None]:
    """Tell the run's trackers of its model; return what each calls it, by its label."""
    params = {"base_model": facts.base_model, "algorithm": facts.algorithm, "seed": str(facts.seed)}
    params |= {name: str(value) for name, value in facts.figures.items() if value is not None}
    model, called = Model(run.name, folder, params), {}
    for tracked in _keeping(manifest):
        tracker = _tracker(run, tracked)
        found = tracker.find(tracked.run)  # not where the run folder is a copy
        called[tracker.label] = tracker.model(model) if found else None
    return called


def _keeping(manifest: Manifest) -> list[Tracked]:
    return [tracked for tracked in manifest.tracked if keeps(tracked.tracker)]


def _register(run: RunFolder, manifest: Manifest, folder: Path, iteration: int) -> Version | None:
    """Add the exported model to the registry, if the run's models go there; it is told once of the same weights."""
    config, tracked = read_config(run), with_registry(manifest.tracked)
    if config.record.registered_model is None or tracked is None:
        return None
    return deliver_version(new_version(run, config, tracked, folder, iteration), run.path.parent)

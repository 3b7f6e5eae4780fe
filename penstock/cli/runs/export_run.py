"""Export of a run that nobody trains: from models/final, or from its newest checkpoint, to a folder to hand on.

The folder is written aside, loaded anew, compared with its source, described by a card, and only then renamed: it is
there as a whole or not at all. Weights that exist as a folder are linked, not copied, where the file system can.

No engine starts, so a run of many ranks is exported on a machine without a GPU, in memory for the model twice.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from configs.schema import TrainConfig
from penstock.base.errors import UserError
from penstock.base.files import filling
from penstock.reports.model_card import ModelFacts, figures_until, model_card
from penstock.session.session import read_config
from penstock.state.manifest import Manifest, Tracked, read_manifest, verify_checkpoint
from penstock.state.run_folder import RunFolder, locked, read_metrics
from penstock.trackers.table import make_tracker
from penstock.trackers.tracker import Model, Tracker
from tasks.finetuning.checkpoints import copy_tokenizer

if TYPE_CHECKING:
    from engines.models.model_folder import Proof

SHARD_SIZE = "5GB"
PROMPTS = 4
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")  # of a Hugging Face folder, beside the weights


@dataclass(frozen=True)
class Exported:
    """A finished export.

    Attributes:
        source: the folder that its weights come from.
        tracker: label of the tracker that the run was recorded in; empty: it was in none.
        model: what the tracker calls the model; None: it keeps no models, or does not hold the run.
    """

    folder: Path
    source: Path
    proof: Proof
    tracker: str
    model: str | None


def export_run(run: RunFolder, target: Path | None, shard_size: str | None) -> Exported:
    """Write the trained model of `run` to `target` (default: models/export of the run), and tell its tracker.

    Args:
        shard_size: most bytes of a weights file, e.g. "2GB"; None keeps the files of models/final as they are.

    Raises:
        UserError: the run is being trained, has no trained weights, or they are damaged; or `target` is not empty.
    """
    target = (target or run.model("export")).resolve()
    _check_target(target, shard_size)
    with locked(run):
        manifest = read_manifest(run)
        source = _source(run, manifest)
        with filling(target) as aside:
            proof = _write(run, manifest, source, aside, shard_size)
            facts = _facts(run, manifest, source, proof)
            (aside / "README.md").write_text(model_card(facts), encoding="utf-8")
        return Exported(target, source, proof, *_register(run, manifest, target, facts))


def _check_target(target: Path, shard_size: str | None) -> None:
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"{target} exists and is not an empty folder", "name another one with --to")
    if shard_size is not None and not re.fullmatch(r"[1-9]\d*(KB|MB|GB)", shard_size):
        raise UserError(f"'{shard_size}' is no size of a file", "write a number and KB, MB or GB, for example 2GB")


def _source(run: RunFolder, manifest: Manifest) -> Path:
    if not run.prompts("train").is_file() and any(run.model("final").parent.glob("*/config.json")):
        raise UserError(
            f"{run.path} holds no iterations of reinforcement learning, and `penstock export` is for those",
            f"what else was trained is a whole model folder already, in {run.model('final').parent}",
        )
    if (final := run.model("final")).is_dir():
        return final
    if manifest.checkpoint is None:
        raise UserError(
            f"{run.path} has no checkpoint yet, so there are no trained weights",
            f"train on with 'penstock train --resume {run.path}'; checkpoint.every says how often one is written",
        )
    folder = run.checkpoints / manifest.checkpoint
    verify_checkpoint(folder, f"'penstock train --resume {run.path}' sets it aside and goes on from the one before")
    return folder


def _write(run: RunFolder, manifest: Manifest, source: Path, aside: Path, shard_size: str | None) -> Proof:
    from transformers.utils.logging import disable_progress_bar

    from engines.models.model_folder import load_folder, prove_same, with_adapters, with_weights, write_folder
    from engines.training.state_images import read_causal_lm_weights, saved_actor
    from engines.weights.lora import ADAPTER_FOLDER

    disable_progress_bar()
    if source == run.model("final"):
        lm, tokenizer = load_folder(source), source
        if (source / ADAPTER_FOLDER).is_dir():
            shutil.copytree(source / ADAPTER_FOLDER, aside / ADAPTER_FOLDER)
    else:
        tokenizer, state = _starting_model(manifest), saved_actor(source)
        trained = read_causal_lm_weights(state)
        if (lora := read_config(run).actor.lora) is None:
            lm = with_weights(tokenizer, trained)
        else:
            lm = with_adapters(tokenizer, trained, lora, state.frozen_sum, aside / ADAPTER_FOLDER)
    if source == tokenizer and shard_size is None:
        _link(source, aside)
    else:
        write_folder(lm, aside, shard_size or SHARD_SIZE)
    copy_tokenizer(tokenizer, aside)
    return prove_same(lm, aside, _prompts(run))


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
    tracked = manifest.tracked
    # Names and ids alone: paths and addresses of stores are not for whoever the folder is handed to.
    links = {
        "run": run.name,
        "weights": str(source.relative_to(run.path)),
        **({f"{_tracker(run, tracked).label} run": tracked.run} if tracked else {}),
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
        links={label: str(value) for label, value in links.items() if value},
    )


def _base_model(config: TrainConfig) -> str:
    return Path(config.model.path).name if config.model.path else "a tiny model with random weights"


def _tracker(run: RunFolder, tracked: Tracked) -> Tracker:
    return make_tracker(tracked.tracker, run.path.parent)


def _register(run: RunFolder, manifest: Manifest, folder: Path, facts: ModelFacts) -> tuple[str, str | None]:
    """Tell the run's tracker of its model; return the tracker's label, and what it calls the model."""
    if manifest.tracked is None:
        return "", None
    tracker = _tracker(run, manifest.tracked)
    if not tracker.find(manifest.tracked.run):  # the run folder is a copy
        return tracker.label, None
    params = {"base_model": facts.base_model, "algorithm": facts.algorithm, "seed": str(facts.seed)}
    params |= {name: str(value) for name, value in facts.figures.items() if value is not None}
    return tracker.label, tracker.model(Model(run.name, folder, params))

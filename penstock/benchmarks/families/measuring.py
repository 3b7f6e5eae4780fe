"""Families of models through real engines: what packed training computes, and what vLLM serves of what was trained.

Each model is built as an actor with its rollout engine, takes an update, and is written as a folder. Compared is the
mean difference of log-probs:

- `before`: vLLM's while it samples with the actor's, before any update;
- `packed`: the actor's with the Transformers library's, of a whole row at a time; `gradient`, likewise, as a share;
- `rollout`: vLLM's while it samples with the actor's, after the update and a reshard; `lora` the same with adapters,
  `lora_experts` with adapters on a mixture's experts as well;
- `exported`: vLLM's with those that the library has of the folder that was written;
- `stale`: the control, vLLM's before the update with the actor's after it.

A model that sees images has one in each prompt.

Anyone can run it on a folder of a model of their own, small enough for one device. Left out: speed, and how well a
model learns.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.benchmarks.families.pictures import pictures_for
from penstock.benchmarks.reporting.result import BenchResult, new_result
from penstock.benchmarks.workload.experience import lognormal_lengths, write_experience
from penstock.benchmarks.workload.families import FAMILIES, write_family
from penstock.checks.model.folder import check_model_folder
from penstock.configs.schema import TrainConfig
from penstock.engines.commands.build import Build, Built
from penstock.engines.commands.checkpoint import Export
from penstock.engines.commands.forward import TokenValues
from penstock.engines.commands.logprob_gap import LogprobsToCompare, SampledTokens, SampleToCompare
from penstock.engines.commands.message import Command, decode_reply, encode, name_of
from penstock.engines.commands.reshard import Reshard
from penstock.engines.commands.update import ActorLoss, Split, UpdateActor
from penstock.engines.families.served import check_served, has_own_class
from penstock.engines.families.shape import read_settings, read_shape, weight_shapes
from penstock.engines.families.table import family_of
from penstock.engines.groups.group import EngineError, EngineGroup, RankLost
from penstock.engines.groups.machine import visible_gpus
from penstock.engines.groups.spec import GroupSpec, RankDevice
from penstock.engines.sizing.memory import weight_width
from penstock.reports.progress import TrainingProgress
from penstock.tasks.iteration.compare_logprobs import EXPLAINED
from penstock.tasks.iteration.forward_passes import from_ranks

PROMPT, RESPONSE, ROWS, SAMPLES, TOKENS = 8, 16, 12, 2, 8
CORES = 2  # of a model that is measured: as many are at a time as the machine has cores for
KV_CACHE = {"kv_cache_gib": 0.25, "sleep": False}  # several models share a GPU; vLLM's sleep wants one for itself
LEARNING_RATE = 1e-2
LORA = {"rank": 4, "alpha": 8}
LORA_ON_EXPERTS = {"rank": 8, "alpha": 16, "experts": True}
SPLIT = Split(
    mini_batches=2,
    epochs=1,
    samples=SAMPLES,
    together=SAMPLES,
    micro_batch_tokens=64,
    max_response_tokens=RESPONSE,
    aggregation="token-mean",
    seed=0,
)
LOSS = ActorLoss("ppo_clip", {"clip_low": 0.2, "clip_high": 0.3}, 1.0, 0.0, None, 0.0)
FIGURES = ("packed", "gradient", "rollout", "lora", "lora_experts", "exported", "stale")
TOLD = {"before": "before the update", "rollout": "after it", "exported": "written", "stale": "stale weights"}
COLUMNS = ("family", "served_by", *FIGURES, "refused")
MODELS = itertools.count(1)  # that this process has measured, also where a rank measures several


@dataclass(frozen=True)
class LibraryLogprobs(Command[TokenValues]):
    """Log-probs of responses, as the library computes them of the model in `folder`, NaN where it cannot.

    `images`: numbers of each prompt's images, kept in the folder `pictures`.
    """

    folder: str
    prompts: Ragged
    responses: Ragged
    images: Ragged | None = None
    pictures: str | None = None


@dataclass(frozen=True)
class GradientGap:
    """The norm of the difference of two gradients of a model, as a share of the library's."""

    share: float


@dataclass(frozen=True)
class CompareGradients(Command[GradientGap]):
    """Compare the gradient of packed rows with that of the library: of the mean log-prob of the file's responses."""

    folder: str
    path: str
    pictures: str | None = None


def measure(command: str, names: Sequence[str], keep: Callable[[BenchResult], None] = lambda _: None) -> BenchResult:
    """Measure models: each the tiny one of the family of that name, or the one in the folder of that name.

    Args:
        keep: takes the result as far as it goes after each model, in case the others are cut off.

    Raises:
        UserError: a name is neither a known family's nor a model's folder.
    """
    for name in names:
        if name not in FAMILIES and not (Path(name) / "config.json").is_file():
            raise UserError(
                f"{name} is no known family, and as a folder has no config.json",
                f"name the folder of a Hugging Face model, or one of {', '.join(FAMILIES)}",
            )
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as made, TrainingProgress() as progress:
        models = {
            name: write_family(name, Path(made) / f"model-{number}") if name in FAMILIES else Path(name)
            for number, name in enumerate(names)
        }
        rows: dict[str, dict[str, Any]] = {}
        with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // CORES)) as pool:
            asked = {
                pool.submit(measure_folder, folder, Path(made) / f"work-{number}"): name
                for number, (name, folder) in enumerate(models.items())
            }
            for ended in as_completed(asked):
                name, figures = asked[ended], ended.result()
                rows[name] = {"family": name, **figures}
                progress.phase(name, figures.get("refused") or f"measured, vLLM {figures['rollout']:.2g} off")
                result = _result(command, [rows[name] for name in models if name in rows])
                keep(result)
    return result


def _result(command: str, details: list[dict[str, Any]]) -> BenchResult:
    settings = {"rows": ROWS, "prompt_tokens": PROMPT, "response_tokens": RESPONSE, "learning_rate": LEARNING_RATE}
    return new_result("families", command, _figures(details), settings=settings, details=details)


def with_rows_of(before: BenchResult, result: BenchResult) -> BenchResult:
    """Return a result with the rows of an earlier one for what it has not measured itself."""
    rows = {row["family"]: row for row in (*before.details, *result.details)}
    known = [name for name in FAMILIES if name in rows]
    details = [rows[name] for name in (*known, *(name for name in rows if name not in FAMILIES))]
    return result.model_copy(update={"details": details, "figures": _figures(details)})


def _figures(details: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    taken = [row for row in details if "refused" not in row]
    figures = {"families": float(len(taken)), "refused": float(len(details) - len(taken))}
    for figure in FIGURES[:-1]:
        found = [row[figure] for row in taken if figure in row]
        figures |= {f"{figure}_max": max(found)} if found else {}
    return figures


@contextmanager
def new_rank(work: Path) -> Iterator[EngineGroup]:
    """Start one rank, on a GPU if there is one."""
    work.mkdir(parents=True, exist_ok=True)
    spec = GroupSpec(
        name="main",
        roles=("actor", "rollout"),
        devices=(RankDevice(0 if visible_gpus() else None),),
        log_dir=work,
        start_timeout_s=600.0,
        command_timeout_s=600.0,
        heartbeat_timeout_s=120.0,
        worker="penstock.benchmarks.ranks.family_rank:FamilyRank",
    )
    with EngineGroup(spec) as group:
        group.wait_ready()
        yield group


def measure_folder(
    folder: Path, work: Path, rank: Callable[[Path], AbstractContextManager[EngineGroup]] = new_rank
) -> dict[str, Any]:
    """Return the figures of a model, or `refused`, why it is.

    Args:
        work: folder for its ranks' logs and what they write.
        rank: gives a rank that holds no model, once for each set of adapters and once without.
    """
    settings = read_settings(folder)
    by = "vLLM" if has_own_class(settings) else "Transformers in vLLM"
    described = {"model_type": settings["model_type"], "served_by": by}
    try:
        check_model_folder(folder, "it")
        check_served(settings, weight_shapes(folder), "it")
        with rank(work) as group:
            figures = _Model(group, folder, work).measured()
        with rank(work) as group:
            figures["lora"] = _Model(group, folder, work, LORA).gap_after_an_update()
        if family_of(described["model_type"]).experts:
            with rank(work) as group:
                figures["lora_experts"] = _Model(group, folder, work, LORA_ON_EXPERTS).gap_after_an_update()
    except UserError as error:
        return {**described, "refused": error.problem.replace(str(folder), "it").removeprefix("it: ")}
    except EngineError as error:  # of a library
        return {**described, "refused": error.remote_traceback.strip().splitlines()[-1]}
    except RankLost as lost:  # in a library
        return {**described, "refused": f"its rank is lost: {(lost.log_tail.strip() or lost.reason).splitlines()[-1]}"}
    if not figures["rollout"] <= _explained():
        off = ", ".join(f"{words} {figures[name]:.2g}" for name, words in TOLD.items())
        return {**described, "refused": f"vLLM gives tokens other log-probs ({off})"}
    return described | figures


class _Model:
    """A model in a rank, and the experience that it learns from."""

    def __init__(self, group: EngineGroup, folder: Path, work: Path, lora: Mapping[str, Any] | None = None) -> None:
        self._group, self._folder, self._work = group, folder, work
        self._number, self._sent = next(MODELS), 0
        sections: dict[str, Any] = {
            "model": {"path": str(folder)},
            "data": {"max_prompt_tokens": PROMPT},
            "rollout": {
                "prompts": ROWS // SAMPLES,
                "samples": SAMPLES,
                "max_response_tokens": RESPONSE,
                **KV_CACHE,
            },
            "actor": {"lora": lora},
        }
        self._seen = pictures_for(folder, read_settings(folder), work)
        self._place = None if self._seen is None else str(self._seen.place)
        if self._seen is not None:
            sections["data"]["images"] = "images"
        config = TrainConfig.model_validate(sections).model_dump(mode="json")
        self._built: Built = self._ask(Build(config, str(folder), ("actor", "rollout"), images=self._place))
        self._ask(Reshard(0))
        vocabulary = read_shape(folder).vocabulary if self._seen is None else self._seen.words
        generator = np.random.default_rng(0)
        self._prompts = Ragged.of([generator.integers(2, vocabulary, PROMPT) for _ in range(4)], np.int32)
        self._images: Ragged | None = None
        lengths = lognormal_lengths(ROWS, PROMPT, mean=8, longest=RESPONSE)
        self._experience = write_experience(work / "experience.parquet", lengths, vocabulary, 0, SAMPLES)
        if self._seen is not None:
            self._prompts, self._images = self._seen.put(self._prompts)
            self._seen.put_into(Path(self._experience.path))

    def measured(self) -> dict[str, Any]:
        """Return the figures."""
        before = self._sampled()
        ours = self._logprobs(before.responses, before.positions_P)
        library = self._library(self._folder, before)
        gradient = self._ask(CompareGradients(str(self._folder), self._experience.path, self._place)).share
        rollout = self.gap_after_an_update()
        stale = self._logprobs(before.responses, before.positions_P) - before.logprobs_T
        after, exported = self._sampled(), self._work / "exported"
        self._ask(Export(str(exported)))
        if self._seen is not None:
            shutil.copy(self._folder / "preprocessor_config.json", exported)
        written = self._library(exported, after)
        return {
            "strategy": self._built.strategy,
            "parameters_shared": self._built.parameters_shared,
            "parameters_copied": self._built.parameters_copied,
            "before": _mean(ours - before.logprobs_T),
            "packed": _mean(ours - library),
            "gradient": gradient,
            "rollout": rollout,
            "exported": _mean(written - after.logprobs_T),
            "stale": _mean(stale),
        }

    def gap_after_an_update(self) -> float:
        """Learn from the experience, reshard, and return the difference between vLLM and the actor."""
        self._ask(UpdateActor(self._experience.path, 0, SPLIT, LOSS, LEARNING_RATE))
        self._ask(Reshard(1))
        sampled = self._sampled()
        return _mean(self._logprobs(sampled.responses, sampled.positions_P) - sampled.logprobs_T)

    def _sampled(self) -> SampledTokens:
        self._sent += 1
        asked = SampleToCompare(self._sent, self._prompts, TOKENS, [0, self._sent], images=self._images)
        sampled: SampledTokens = self._ask(asked)
        return sampled

    def _library(self, folder: Path, sampled: SampledTokens) -> np.ndarray:
        prompts, images = self._asked(sampled.positions_P)
        reply: TokenValues = self._ask(
            LibraryLogprobs(str(folder), prompts, sampled.responses, images, None if images is None else self._place)
        )
        return reply.values_T

    def _logprobs(self, responses: Ragged, positions_P: np.ndarray) -> np.ndarray:
        prompts, images = self._asked(positions_P)
        reply: TokenValues = self._ask(LogprobsToCompare(prompts, responses, budget=1024, images=images))
        return from_ranks([reply], responses.lengths_B).values_T

    def _asked(self, positions_P: np.ndarray) -> tuple[Ragged, Ragged | None]:
        """Return the prompts that responses are to, and their images."""
        return self._prompts.take(positions_P), None if self._images is None else self._images.take(positions_P)

    def _ask(self, command: Command[Any]) -> Any:
        self._sent += 1
        key = f"{self._number}-{self._sent}"
        (answer,) = self._group.call(name_of(type(command)), key=key, **encode(command))
        return decode_reply(type(command), answer["reply"])


def _explained() -> float:
    """Return the mean difference with which a training goes on, in the dtype that it would have here."""
    return EXPLAINED[weight_width(TrainConfig(), "cuda" if visible_gpus() else "cpu")]


def _mean(difference_T: np.ndarray) -> float:
    return float(np.nanmean(np.abs(difference_T)))

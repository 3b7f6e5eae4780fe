"""The page of samples beside a run's report: the last iteration and a few earlier ones, to look through by reward.

It is one file without scripts, with small images of prompts inside (thumbnails.py): filters are styles that follow the
state of its buttons, so a response with a script in it has nothing to run in. It is bounded: a few prompts of a few
iterations, long texts without their middle.

Left out: everything else of an experience, which `penstock samples` shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from penstock.base.files import write_text
from penstock.reports.samples.fallen import Comparison, compared
from penstock.reports.samples.reading import Response, Samples, iterations_of, samples_of
from penstock.reports.samples.thumbnails import Thumbnails
from penstock.reports.samples.tokens import Piece, joined, load_tokenizer, pieces, scale_of
from penstock.state.run_folder import RunFolder

SAMPLES_PAGE = "samples.html"
EARLIER = 4  # iterations before the last
LAST, BEFORE = (12, 8), (6, 4)  # prompts of the last iteration and of an earlier one, and responses to each
TOKENS, CHARACTERS = 400, 3_000  # of a response; of a prompt, or of a response whose tokens are not known
FALLEN = 8
BINS = 4  # of rewards and of lengths, where there are more different ones than that


@dataclass(frozen=True)
class Turn:
    """A turn of an episode; without a number what the policy was told between two, or what the page leaves out.

    Attributes:
        path: the number of the path that begins after this, where it is not the first.
    """

    number: int | None
    pieces: list[Piece]
    path: int | None = None


@dataclass(frozen=True)
class Shown:
    """A response as the page has it: its text in pieces, and the classes of the buttons that it is there with.

    Attributes:
        turns: the pieces by turn; a response without an environment has none.
    """

    response: Response
    pieces: list[Piece]
    scale: float
    classes: list[str]
    turns: list[Turn]


@dataclass(frozen=True)
class Prompt:
    """A prompt with responses to it, the lowest reward first.

    Attributes:
        answered: responses of it that there are; the page may have fewer.
        images: where those of the prompt lie in the run folder.
    """

    prompt_id: str
    text: str
    mean: float
    answered: int
    responses: list[Shown]
    images: tuple[str, ...] = ()


@dataclass(frozen=True)
class Iteration:
    """What the page has of one iteration.

    Attributes:
        scale: the strongest shade's advantage, 0 without advantages.
        told_apart: whether tokens are coloured.
    """

    number: int
    responses: int
    prompts_answered: int
    reward: float
    prompts: list[Prompt]
    scale: float
    told_apart: bool


@dataclass(frozen=True)
class Bin:
    """Rewards, or lengths, that one button is about."""

    number: int
    label: str


@dataclass(frozen=True)
class Buttons:
    """What a person may choose by, beside the iteration.

    Attributes:
        has_cut: whether a response is; likewise `has_failed`.
    """

    rewards: list[Bin]
    lengths: list[Bin]
    has_cut: bool
    has_failed: bool

    @property
    def combinations(self) -> list[list[str]]:
        """The classes of the buttons that may be down together, of each kind one at most."""
        kinds = [
            [f"r{item.number}" for item in self.rewards],
            [f"l{item.number}" for item in self.lengths],
            ["cut"] * self.has_cut,
            ["failed"] * self.has_failed,
        ]
        chosen = product(*([None, *kind] for kind in kinds))
        return [[name for name in names if name is not None] for names in chosen if any(names)]


def write_page(run: RunFolder, every: int) -> Path | None:
    """Write `report/samples.html`; return its path, None if the run has no responses to show.

    Args:
        every: `record.samples_every`: the earlier iterations are such ones; 0: any.
    """
    from jinja2 import Environment, PackageLoader

    chosen = chosen_iterations(iterations_of(run), every)
    if not chosen:
        return None
    there = [samples_of(run, number) for number in chosen]
    rows = [_rows(samples, *(LAST if samples is there[-1] else BEFORE)) for samples in there]
    read = [samples.at(list(chain(*by.values())), tokens=True) for samples, by in zip(there, rows, strict=True)]
    shown = list(chain(*read))
    rewards, reward_buttons = binned(np.asarray([response.reward for response in shown]))
    lengths, length_buttons = quartered(np.asarray([response.length or 0 for response in shown]))
    has_failed, has_cut = any(item.failure for item in shown), any(item.truncated for item in shown)
    buttons = Buttons(reward_buttons, length_buttons, has_cut, has_failed)
    tokenizer, edges = load_tokenizer(run), (rewards, lengths)
    iterations = [_iteration(*parts, edges, tokenizer) for parts in zip(there, rows, read, strict=True)]
    templates = Environment(
        loader=PackageLoader("penstock.reports"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters["clipped"], templates.filters["thumbnails"] = clipped, Thumbnails(run)
    values = {"name": run.name, "iterations": iterations[::-1], "buttons": buttons, "comparison": _fallen(run)}
    page = run.report.parent / SAMPLES_PAGE
    page.parent.mkdir(parents=True, exist_ok=True)
    write_text(page, templates.get_template("samples.html.j2").render(values))
    return page


def chosen_iterations(there: Sequence[int], every: int) -> list[int]:
    """Return the last iteration and up to four before it, spread evenly over those of which tables were kept."""
    if not there:
        return []
    earlier = [number for number in there[:-1] if not every or number % every == 0 or number == there[0]]
    return [*(earlier[place] for place in _spread(len(earlier), EARLIER)), there[-1]]


def binned(rewards: np.ndarray) -> tuple[np.ndarray, list[Bin]]:
    """Return the upper edges of the bins of rewards, and their labels: a bin for each reward if they are few."""
    different = np.unique(rewards.round(6))
    if len(different) <= BINS:
        return different, [Bin(place, f"{value:g}") for place, value in enumerate(different)]
    edges = np.linspace(different[0], different[-1], BINS + 1)
    labels = [f"{low:.3g} to {high:.3g}" for low, high in zip(edges[:-1], edges[1:], strict=True)]
    return edges[1:], [Bin(place, label) for place, label in enumerate(labels)]


def quartered(lengths: np.ndarray) -> tuple[np.ndarray, list[Bin]]:
    """Return the upper edges of the bins of lengths, and their labels: each has a quarter of the different ones."""
    different = np.unique(lengths)
    if len(different) <= BINS:
        return different, [Bin(place, f"{value:,}") for place, value in enumerate(different.tolist())]
    quarters = [part.tolist() for part in np.array_split(different, BINS)]
    bins = [Bin(place, f"{part[0]:,} to {part[-1]:,}") for place, part in enumerate(quarters)]
    return np.asarray([part[-1] for part in quarters]), bins


def _rows(samples: Samples, prompts: int, responses: int) -> dict[str, list[int]]:
    """Return rows by prompt: of prompts from the one that earns least to the one that earns most, spread evenly."""
    frame = pd.DataFrame({"prompt_id": samples.prompt_ids(), "reward": samples.values("reward")})
    order = frame.groupby("prompt_id")["reward"].mean().sort_values(kind="stable").index
    found = {}
    for name in order[_spread(len(order), prompts)]:
        of_prompt = frame[frame["prompt_id"] == name].sort_values("reward", kind="stable").index
        found[str(name)] = [int(row) for row in of_prompt[_spread(len(of_prompt), responses)]]
    return found


def _spread(total: int, wanted: int) -> np.ndarray:
    """Return places from the first to the last of `total`, evenly, each once."""
    return np.unique(np.linspace(0, total - 1, min(wanted, total)).round().astype(int))


def _iteration(
    samples: Samples,
    rows: Mapping[str, Sequence[int]],
    responses: Sequence[Response],
    edges: tuple[np.ndarray, np.ndarray],
    tokenizer: Any,
) -> Iteration:
    rewards = pd.Series(samples.values("reward")).groupby(pd.Series(samples.prompt_ids())).agg(["mean", "size"])
    by_row, scale = {response.row: response for response in responses}, scale_of(responses)
    prompts = []
    for name, numbers in rows.items():
        shown = [_shown(by_row[row], edges, tokenizer, scale) for row in numbers]
        text = clipped(shown[0].response.prompt)
        images = shown[0].response.images
        prompts.append(Prompt(name, text, float(rewards["mean"][name]), int(rewards["size"][name]), shown, images))
    told_apart = tokenizer is not None and bool(scale)
    whole = samples.values("reward")
    return Iteration(samples.iteration, len(whole), len(rewards), float(whole.mean()), prompts, scale, told_apart)


def _shown(response: Response, edges: tuple[np.ndarray, np.ndarray], tokenizer: Any, scale: float) -> Shown:
    rewards, lengths = edges
    classes = [f"r{_bin(rewards, response.reward)}", f"l{_bin(lengths, response.length or 0)}"]
    classes += ["cut"] * response.truncated + ["failed"] * (response.failure is not None)
    if tokenizer is None or response.tokens is None:
        return Shown(response, [Piece(clipped(response.response), 0.0, 0.0)], 0.0, classes, [])
    found = joined(pieces(tokenizer, response, TOKENS), lambda piece: piece.level(scale))
    turns = [] if response.turns is None else by_turn(found, response.turns)
    if response.path_prompts:
        turns = _by_path(response, tokenizer, scale)
    return Shown(response, found, scale, classes, turns)


def _by_path(response: Response, tokenizer: Any, scale: float) -> list[Turn]:
    """Return the turns of each path, and before all but the first what it begins after."""
    turns, paths, before = list[Turn](), response.paths, 0
    for number, path in enumerate(paths, 1):
        if number > 1:
            text = tokenizer.decode(response.path_prompts[number - 2], skip_special_tokens=False)
            turns.append(Turn(None, [Piece(clipped(text, CHARACTERS // len(paths)), None, None)], number))
        assert path.mask is not None
        count = int((np.diff(path.mask, prepend=0).astype(np.int8) == 1).sum())
        found = joined(pieces(tokenizer, path, TOKENS // len(paths)), lambda piece: piece.level(scale))
        turns += [Turn(turn.number and turn.number + before, turn.pieces, turn.path) for turn in by_turn(found, count)]
        before += count
    return turns


def _bin(edges: np.ndarray, figure: float) -> int:
    return min(int(np.searchsorted(edges, figure - 1e-6)), len(edges) - 1)


def by_turn(found: Sequence[Piece], count: int) -> list[Turn]:
    """Return an episode's pieces by turn; behind a gap turns are counted from the end.

    Args:
        count: turns of the whole episode.
    """
    runs = [(kind, list(run)) for kind, run in groupby(found, _kind)]
    gap = next((place for place, (kind, _) in enumerate(runs) if kind == "gap"), len(runs))
    behind = sum(kind == "said" for kind, _ in runs[gap:])
    turns, number = list[Turn](), 0
    for place, (kind, run) in enumerate(runs):
        if place == gap:
            number = count - behind
        number += kind == "said"
        turns.append(Turn(number if kind == "said" else None, run))
    return turns


def _kind(piece: Piece) -> str:
    if piece.left_out:
        return "gap"
    return "told" if piece.low is None else "said"


def clipped(text: str, most: int = CHARACTERS) -> str:
    """Return a text without its middle where it is too long for the page."""
    if len(text) <= most:
        return text
    head, tail = text[: most * 2 // 3], text[-most // 3 :]
    return f"{head}\n[... {len(text) - most:,} characters ...]\n{tail}"


def _fallen(run: RunFolder) -> Comparison | None:
    """Compare the last evaluation with the first; None if there are not two."""
    evaluations = iterations_of(run, heldout=True)
    if len(evaluations) < 2:
        return None
    first, last = (samples_of(run, number, heldout=True) for number in (evaluations[0], evaluations[-1]))
    return compared(run, first, last, FALLEN)

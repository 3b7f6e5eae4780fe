"""An update on preferences is the plain loop over whole rows, whatever the micro-batches and the ranks.

The oracle computes every row alone and writes the losses out again; two steps, the second from what the first left.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from penstock.base.ragged import Ragged
from penstock.engines.batches.micro_batches import plan_micro_batches
from penstock.engines.batches.packing import Rows
from penstock.state.experience import write_columns
from penstock.state.measured import is_measured
from tests.engines.rows import gathered
from tests.engines.shared_ranks import VOCABULARY, Ranks, Shape
from tests.engines.unpacked import STEADY, UNCLIPPED, load_unpacked, plain_steps, row_logprobs, row_tokens

SHAPE = Shape("qwen2", tied=True)
RATE, UNITS = 0.02, 5
FolderOf = Callable[[Shape], Path]
DPO = {"name": "dpo", "settings": {"beta": 0.5, "label_smoothing": 0.1}}
IPO = {"name": "ipo", "settings": {"beta": 0.5}}  # a far aim: its distance is what rounding is small beside
OWN = {"name": "tests.own_algorithm:pull", "settings": {"strength": 2.0}}  # of a user, in no package
ORPO = {"name": "orpo", "settings": {"odds_weight": 0.5}}
KTO = {"name": "kto", "settings": {"beta": 0.5, "desirable_weight": 1.0, "undesirable_weight": 0.7}}
SCORES = {"name": "bradley_terry", "settings": {}}
LABELS = np.asarray([1, 0, 0, 1, 1], np.float32)
MARGINS = np.asarray([0.0, 0.3, 1.0, 0.0, 0.2], np.float32)


def pairs() -> Rows:
    """Ragged pairs; the first and the fourth have one prompt, so that planning brings them together."""
    random = np.random.default_rng(3)
    prompts = [random.integers(3, VOCABULARY, random.integers(1, 9)) for _ in range(UNITS)]
    prompts[3] = prompts[0]
    responses = [random.integers(3, VOCABULARY, length) for length in random.integers(1, 16, 2 * UNITS)]
    return rows_of([prompts[row // 2] for row in range(2 * UNITS)], responses)


def labelled() -> Rows:
    """Rows, then each prompt with the response of the next."""
    bare = pairs()
    prompts = [bare.prompts.row(2 * unit) for unit in range(UNITS)]
    responses = [bare.responses.row(2 * unit) for unit in range(UNITS)]
    return rows_of(prompts * 2, [*responses, *responses[1:], responses[0]])


def rows_of(prompts: list[np.ndarray], responses: list[np.ndarray]) -> Rows:
    ragged = Ragged.of(responses, np.int32)
    return Rows(
        Ragged.of(prompts, np.int32), ragged, Ragged(np.ones(len(ragged.values_T), np.uint8), ragged.offsets_B1), {}
    )


def write(path: Path, rows: Rows, **columns: Any) -> str:
    every = {"prompt_tokens": rows.prompts, "response_tokens": rows.responses, "loss_mask": rows.mask}
    write_columns(path, {**every, **columns})
    return str(path)


def begin(ranks: Ranks, folder: Path, scores: bool = False, stage: int = 1) -> None:
    ranks.ask("discard")
    config = {"zero_stage": stage, "steps": 2, "optimizer": {**STEADY, "max_grad_norm": UNCLIPPED}}
    model = {"trainer": config, "folder": str(folder), "dtype": "auto", "seed": 0}
    ranks.ask("preference_begin", model=model, scores=scores)


def two_steps(ranks: Ranks, path: str, budget: int, loss: dict[str, Any]) -> list[dict[str, float]]:
    batches = np.asarray([np.arange(UNITS)] * 2)
    replies = ranks.ask("preference_steps", path=path, batches=batches, budget=budget, loss=loss, learning_rate=RATE)
    computed = [
        [{name: value for name, value in step.items() if not is_measured(name)} for step in reply.steps]
        for reply in replies
    ]
    assert all(steps == computed[0] for steps in computed)
    return computed[0]


def with_reference(ranks: Ranks, path: Path, rows: Rows, **columns: Any) -> torch.Tensor:
    """Write the file with the column of the starting model's log-probs; return that column."""
    write(path, rows, **columns)
    asked = {"path": str(path), "role": "preference", "temperature": 1.0, "budget": 64}
    values_T = gathered(rows, ranks.ask("logprobs", **asked))
    write(path, rows, **columns, logprobs_reference=Ragged(values_T, rows.responses.offsets_B1))
    return torch.from_numpy(values_T)


def assert_same(
    ranks: Ranks, steps: list[dict[str, float]], module: torch.nn.Module, plain: list[Any], prefix: str
) -> None:
    for step, expected in zip(steps, plain, strict=True):
        assert step["loss"] == pytest.approx(expected.loss, rel=1e-5, abs=1e-5)
        assert step["grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-4)
    after, expected_after = ranks.parameters("preference"), dict(module.named_parameters())
    assert {name.removeprefix(prefix) for name in after} == expected_after.keys()
    for name, value in after.items():
        torch.testing.assert_close(value, expected_after[name.removeprefix(prefix)].detach(), rtol=0, atol=2e-5)


def test_a_unit_that_only_fills_a_place_counts_nothing_not_even_a_nan(
    two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """One pair on two ranks: the first of the file fills the other's place. Control: where it counts, it shows."""
    path, rows = tmp_path / "pairs.parquet", pairs()
    begin(two_ranks, folder_of(SHAPE))
    values_T = with_reference(two_ranks, path, rows).numpy().copy()
    values_T[: rows.responses.offsets_B1[2]] = np.nan
    write(path, rows, logprobs_reference=Ragged(values_T, rows.responses.offsets_B1))
    asked = {"path": str(path), "budget": 64, "loss": DPO, "learning_rate": RATE}
    (good,), (odd,) = (
        two_ranks.ask("preference_steps", batches=np.asarray([[unit]]), **asked)[0].steps for unit in (1, 0)
    )
    assert np.isfinite([good["loss"], good["grad_norm"]]).all()
    assert np.isnan(odd["loss"])


def test_query_key_and_value_lie_side_by_side(one_rank: Ranks, folder_of: FolderOf) -> None:
    """Also with biases, which follow each matrix in the model: as one matrix they are one product."""
    for scores in (False, True):
        begin(one_rank, folder_of(Shape("qwen2", tied=False)), scores)
        assert one_rank.ask("adjacent", role="preference") == [{"all": 2, "joint": 2}]


@pytest.mark.parametrize(
    ("count", "stage", "budget", "loss"),
    [(1, 1, 10_000, DPO), (2, 2, 1, DPO), (1, 1, 40, IPO), (2, 1, 40, ORPO), (1, 1, 40, OWN)],
)
def test_an_update_on_pairs_is_the_plain_loop(
    count: int,
    stage: int,
    budget: int,
    loss: dict[str, Any],
    ranks_of: Callable[[int], Ranks],
    folder_of: FolderOf,
    tmp_path: Path,
) -> None:
    """Five pairs on two ranks leave places empty; one pair per micro-batch at the smallest budget."""
    ranks, rows = ranks_of(count), pairs()
    begin(ranks, folder_of(SHAPE), stage=stage)
    reference_T = with_reference(ranks, tmp_path / "pairs.parquet", rows)
    steps = two_steps(ranks, str(tmp_path / "pairs.parquet"), budget, loss)

    lm = load_unpacked(folder_of(SHAPE))
    begins = rows.responses.offsets_B1

    def plain() -> torch.Tensor:
        logprobs = [row_logprobs(lm, rows, row)[0] for row in range(len(rows))]
        losses = []
        for unit in range(UNITS):
            good, bad = logprobs[2 * unit], logprobs[2 * unit + 1]
            old = [reference_T[begins[row] : begins[row + 1]].sum() for row in (2 * unit, 2 * unit + 1)]
            difference = (good.sum() - old[0]) - (bad.sum() - old[1])
            if loss["name"] == "dpo":
                margin = 0.5 * difference
                losses.append(-0.9 * margin.sigmoid().log() - 0.1 * (-margin).sigmoid().log())
            elif loss["name"] == "ipo":
                losses.append((difference - 1 / (2 * loss["settings"]["beta"])) ** 2)
            elif loss is OWN:
                losses.append((difference - 2.0) ** 2)
            else:
                p, q = good.mean().exp(), bad.mean().exp()
                losses.append(-p.log() - 0.5 * ((p / (1 - p)).log() - (q / (1 - q)).log()).sigmoid().log())
        return torch.stack(losses).mean()

    expected = plain_steps(list(lm.parameters()), [plain, plain], [RATE, RATE], UNCLIPPED)
    assert_same(ranks, steps, lm, expected, "lm.")
    if loss["name"] != "orpo":
        assert steps[0]["margin"] == pytest.approx(0, abs=1e-5)
        assert steps[1]["margin"] > 1e-3


@pytest.mark.parametrize(("count", "budget"), [(1, 10_000), (2, 1)])
def test_an_update_on_labels_is_the_plain_loop(
    count: int, budget: int, ranks_of: Callable[[int], Ranks], folder_of: FolderOf, tmp_path: Path
) -> None:
    """KTO's z0 is that of the whole batch; it is above 0 in the second step, and no gradient goes through it."""
    ranks, rows = ranks_of(count), labelled()
    begin(ranks, folder_of(SHAPE))
    label = np.concatenate([LABELS, LABELS])
    reference_T = with_reference(ranks, tmp_path / "rows.parquet", rows, label=label)
    steps = two_steps(ranks, str(tmp_path / "rows.parquet"), budget, KTO)

    lm, begins, kls = load_unpacked(folder_of(SHAPE)), rows.responses.offsets_B1, []

    def plain() -> torch.Tensor:
        ratios = [
            row_logprobs(lm, rows, row)[0].sum() - reference_T[begins[row] : begins[row + 1]].sum()
            for row in range(len(rows))
        ]
        kls.append(torch.stack(ratios[UNITS:]).mean().detach().clamp(min=0))
        losses = [
            1.0 - (0.5 * (ratio - kls[-1])).sigmoid() if good else 0.7 - 0.7 * (0.5 * (kls[-1] - ratio)).sigmoid()
            for ratio, good in zip(ratios[:UNITS], LABELS, strict=True)
        ]
        return torch.stack(losses).mean()

    expected = plain_steps(list(lm.parameters()), [plain, plain], [RATE, RATE], UNCLIPPED)
    assert_same(ranks, steps, lm, expected, "lm.")
    assert [step["kl"] for step in steps] == pytest.approx([float(kl) for kl in kls], abs=1e-4)


@pytest.mark.parametrize(("count", "budget"), [(2, 1)])
def test_a_reward_model_is_the_plain_loop_and_can_be_loaded(
    count: int, budget: int, ranks_of: Callable[[int], Ranks], folder_of: FolderOf, tmp_path: Path
) -> None:
    """It starts with score 0 for all: loss -log sigmoid(-margin). What is written scores as what was trained."""
    ranks, rows = ranks_of(count), pairs()
    begin(ranks, folder_of(SHAPE), scores=True)
    margin = np.concatenate([MARGINS, MARGINS])
    path = write(tmp_path / "pairs.parquet", rows, margin=margin)
    steps = two_steps(ranks, path, budget, SCORES)
    assert steps[0]["loss"] == pytest.approx(float(np.log1p(np.exp(MARGINS)).mean()), abs=1e-5)

    model = load_unpacked(folder_of(SHAPE), one_label())
    torch.nn.init.zeros_(model.score.weight)

    def scores() -> torch.Tensor:
        wholes = [row_tokens(rows, row)[0] for row in range(len(rows))]
        return torch.stack([model.score(model.base_model(input_ids=w).last_hidden_state[0, -1])[0] for w in wholes])

    def plain() -> torch.Tensor:
        now = scores()
        return torch.nn.functional.softplus(torch.from_numpy(MARGINS) - now[0::2] + now[1::2]).mean()

    expected = plain_steps(list(model.parameters()), [plain, plain], [RATE, RATE], UNCLIPPED)
    assert_same(ranks, steps, model, expected, "classifier.")
    measured = ranks.ask("preference_measure", path=path, budget=budget, loss=SCORES)[0]
    ranks.ask("preference_end", folder=str(tmp_path / "model"))
    loaded = load_unpacked(tmp_path / "model", AutoModelForSequenceClassification)
    model.load_state_dict(loaded.state_dict())
    with torch.no_grad():
        now = scores()
    assert loaded.config.num_labels == 1
    assert measured["accuracy"] == pytest.approx(float((now[0::2] > now[1::2]).float().mean()))
    assert measured["margin"] == pytest.approx(float((now[0::2] - now[1::2]).mean()), abs=1e-5)


def one_label() -> Any:
    """The classifier class, with one label for a folder that says nothing of labels."""

    class OneLabel:
        @staticmethod
        def from_pretrained(folder: Path, **settings: Any) -> Any:
            return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, **settings)

    return OneLabel


def test_the_rows_of_a_pair_are_never_cut_apart() -> None:
    """At any budget and number of ranks. Control: planned row by row they are."""
    rows = pairs()

    def apart(together: int) -> int:
        plans = [
            plan_micro_batches(rows, ranks, budget, None, together) for ranks in (1, 2, 3) for budget in (1, 30, 99)
        ]
        micros = [set(micro) for plan in plans for rank in plan for micro in rank]
        assert all(sorted(row for rank in plan for micro in rank for row in micro) == list(range(10)) for plan in plans)
        return sum((row ^ 1) not in micro for micro in micros for row in micro)

    assert apart(2) == 0
    assert apart(1) > 0

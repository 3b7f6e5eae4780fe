"""The reference: its KL over the whole vocabulary in an update, and its renewal, on real ranks.

The oracle of the KL is float64: all rows padded to the longest, the library's own attention, full logits of two models,
plain autograd and AdamW. That of a renewal are bits: the same log-probs, a KL of exactly 0, the same next update.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.configs.schema import TrainConfig
from penstock.engines.batches.packing import Rows
from penstock.engines.commands.forward import TokenValues
from penstock.engines.training.state_images import SavedStates, image_paths
from penstock.evaluators.kl import KL
from penstock.session import session as module
from penstock.session.rollout.generation import Responses
from penstock.session.session import Session, Stage, Training
from penstock.session.settings import settings_at
from penstock.state.experience import ExperienceRef, add_columns, read_columns, write_columns
from penstock.state.manifest import Progress
from penstock.state.run_folder import RunFolder
from penstock.tasks.iteration.advantage import advantage
from penstock.tasks.iteration.evaluate import with_logprobs
from penstock.tasks.iteration.forward_passes import old_logprobs, reference_logprobs
from penstock.tasks.iteration.refresh_reference import refresh_reference
from penstock.tasks.iteration.update import update_actor
from tests.engines.rows import LOSS, SPLIT, gathered, random_rows, write_rows
from tests.engines.shared_ranks import PAD, SMALL, Ranks, Shape
from tests.engines.unpacked import STEADY, UNCLIPPED, plain_steps
from tests.evaluators.responses import heldout

SHAPE = Shape("qwen2", tied=True)
UNTIED = Shape("llama", tied=False)
BIASED = Shape("phi", tied=False)  # its language head has a bias
ROLES = ("actor", "reference")
RATE, TEMPERATURE, COEFFICIENT = 0.02, 0.9, 0.5
ROUNDING = 1e-7  # of a sum over the vocabulary, where two equal models' logits differ in a last bit
FULL = {"kl": {"estimator": "full"}}
FULL_LOSS = {
    **LOSS,
    "temperature": TEMPERATURE,
    "entropy_coefficient": 0.01,
    "kl_estimator": "full",
    "kl_coefficient": COEFFICIENT,
}
FolderOf = Callable[[Shape], Path]


def _trainer(stage: int) -> dict[str, Any]:
    return {"zero_stage": stage, "optimizer": {**STEADY, "max_grad_norm": UNCLIPPED}}


def _states(ranks: Ranks, path: str, budget: int) -> dict[str, str]:
    output = str(Path(path).with_suffix(".npy"))
    ranks.ask("reference_states", path=path, budget=budget, output=output)
    return {"states": output}


def _update(path: str, budget: int = 64, epochs: int = 1, loss: dict[str, Any] = FULL_LOSS) -> dict[str, Any]:
    split = {**SPLIT, "epochs": epochs, "micro_batch_tokens": budget}
    return {"path": path, "version": -1, "split": split, "loss": loss, "learning_rate": RATE}


def _training(folder: Path, tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **groups: Ranks) -> Training:
    """A training whose roles are in groups that run; its commands have keys of their own."""
    training = Training(str(folder))
    session = Session(TrainConfig.model_validate(tree), RunFolder(folder))
    for group in {id(ranks): ranks.group for ranks in groups.values()}.values():
        call = partial(_call, group.call, str(folder))
        monkeypatch.setattr(group, "call", call)
    session.groups = {role: ranks.group for role, ranks in groups.items()}  # type: ignore[misc]
    monkeypatch.setitem(module._SESSIONS, training.folder, session)
    return training


def _call(call: Callable[..., Any], prefix: str, command: str, key: str, **arguments: Any) -> list[dict[str, Any]]:
    replies: list[dict[str, Any]] = call(command, key=f"{prefix}/{key}", **arguments)
    return replies


def _move(ranks: Ranks, path: str) -> None:
    """One step without a KL."""
    ranks.ask("update_actor", **_update(path, loss=LOSS))


def _logprobs(ranks: Ranks, rows: Rows, path: str, role: str, budget: int = 64) -> np.ndarray:
    return gathered(rows, ranks.ask("logprobs", path=path, role=role, temperature=1.0, budget=budget))


# ---- the KL over the vocabulary ------------------------------------------------------------------------------------


class Padded:
    """All rows in one rectangle, in float64."""

    def __init__(self, folder: Path, rows: Rows) -> None:
        self.lm, self.start = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
            for _ in range(2)
        )
        prompt_B, response_B = rows.prompts.lengths_B, rows.responses.lengths_B
        shape = len(rows), int((prompt_B + response_B).max())
        self.tokens, self.seen = torch.full(shape, PAD), torch.zeros(shape, dtype=torch.int64)
        self.advantages, self.counted = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.bool)
        for row, (prompt, response) in enumerate(zip(prompt_B, response_B, strict=True)):
            own = slice(prompt, prompt + response)
            self.tokens[row, :prompt] = torch.from_numpy(rows.prompts.row(row).astype(np.int64))
            self.tokens[row, own] = torch.from_numpy(rows.responses.row(row).astype(np.int64))
            self.seen[row, : prompt + response] = 1
            self.advantages[row, own] = torch.from_numpy(rows.columns["advantages"].row(row).astype(np.float64))
            self.counted[row, own] = torch.from_numpy(rows.mask.row(row) > 0)
        self.kl: list[float] = []
        self.sampled: list[float] = []

    def distributions(self, lm: Any) -> torch.Tensor:
        logits = lm(input_ids=self.tokens, attention_mask=self.seen).logits[:, :-1]
        log_softmax: torch.Tensor = (logits / TEMPERATURE).log_softmax(-1)
        return log_softmax

    def loss(self) -> torch.Tensor:
        """REINFORCE (the ratio is 1), entropy and KL, a mean over counted tokens; KL and k3 are noted."""
        with torch.no_grad():
            q = self.distributions(self.start)
        p, counted = self.distributions(self.lm), self.counted[:, 1:]
        chosen = p.gather(-1, self.tokens[:, 1:, None])[..., 0]
        kl = (p.exp() * (p - q)).sum(-1)
        self.kl.append(kl[counted].mean().item())
        x = (q - p).gather(-1, self.tokens[:, 1:, None])[..., 0]
        self.sampled.append((x.exp() - 1 - x)[counted].mean().item())
        tokens = -(chosen - chosen.detach()).exp() * self.advantages[:, 1:] + 0.01 * (p.exp() * p).sum(-1)
        return (tokens + COEFFICIENT * kl)[counted].mean()


@pytest.mark.parametrize(
    ("count", "stage", "budget", "shape"),
    [
        (1, 2, 10_000, SHAPE),
        (1, 0, 32, SHAPE),
        (2, 1, 24, SHAPE),
        (2, 3, 32, UNTIED),
        (2, 2, 1, SHAPE),
        (2, 3, 32, BIASED),
    ],
    ids=["one micro-batch", "several", "two ranks", "sharded weights", "a row each", "a head with a bias"],
)
def test_an_update_with_the_full_kl_is_the_padded_loop(
    count: int,
    stage: int,
    budget: int,
    shape: Shape,
    ranks_of: Callable[[int], Ranks],
    folder_of: FolderOf,
    tmp_path: Path,
) -> None:
    """Two steps, prompts shared by two rows each: at the first the KL is 0, its gradient acts at the second.

    Control: what the given tokens alone say of the KL is another number by far.
    """
    ranks, rows, folder = ranks_of(count), random_rows(12, samples=2), folder_of(shape)
    path = write_rows(tmp_path / "rows.parquet", rows)
    ranks.build(folder, ROLES, algorithm=FULL, actor=_trainer(stage))
    states, padded = _states(ranks, path, budget), Padded(folder, rows)
    metrics = [ranks.ask("update_actor", **_update(path, budget), **states)[0] for _ in range(2)]
    steps = plain_steps(list(padded.lm.parameters()), [padded.loss] * 2, [RATE] * 2, UNCLIPPED)
    assert padded.kl[1] > 10 * abs(padded.kl[0])
    assert abs(metrics[0]["kl"]) < ROUNDING
    assert metrics[1]["kl"] == pytest.approx(padded.kl[1], rel=1e-4)
    assert metrics[1]["kl"] != pytest.approx(padded.sampled[1], rel=0.05)
    for found, step in zip(metrics, steps, strict=True):
        assert found["loss"] == pytest.approx(step.loss, abs=1e-5)
        assert found["grad_norm"] == pytest.approx(step.grad_norm, rel=1e-4)
    after = ranks.parameters()
    for name, value in padded.lm.named_parameters():
        torch.testing.assert_close(after[f"lm.{name}"].double(), value.detach(), rtol=0, atol=1e-5)


def test_a_pass_gives_log_probs_and_kl_to_a_reference_in_another_group(
    one_rank: Ranks, two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """For a KL in the reward: the reference's states come from two ranks, the actor keeps the reference's head."""
    rows = random_rows(12, samples=2)
    path = write_rows(tmp_path / "rows.parquet", rows)
    one_rank.build(folder_of(SHAPE), algorithm=FULL, actor=_trainer(2))
    two_ranks.build(folder_of(SHAPE), ("reference",), algorithm=FULL)
    states = _states(two_ranks, path, 32)
    one_rank.ask("update_actor", **_update(path), **states)
    asked = {"path": path, "temperature": TEMPERATURE, "budget": 40}
    replies = one_rank.ask("logprobs_and_kl", **asked, **states)
    padded = Padded(folder_of(SHAPE), rows)
    plain_steps(list(padded.lm.parameters()), [padded.loss], [RATE], UNCLIPPED)
    padded.loss()
    kl_T = gathered(rows, [TokenValues(reply.rows, reply.kl_T) for reply in replies])
    assert kl_T[rows.mask.values_T > 0].mean() == pytest.approx(padded.kl[1], rel=1e-4)
    assert kl_T.min() >= -1e-6
    alone_T = gathered(rows, one_rank.ask("logprobs", role="actor", **asked))
    np.testing.assert_allclose(gathered(rows, replies), alone_T, rtol=0, atol=1e-6)


def test_beside_an_actor_with_adapters_the_reference_is_that_one_without_them(
    one_rank: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """No second model: its states are the base model's before and after an update, while the KL leaves 0."""
    path = write_rows(tmp_path / "rows.parquet", random_rows(12, samples=2))
    one_rank.build(folder_of(SHAPE), ROLES, algorithm=FULL, actor={**_trainer(2), "lora": {"rank": 4}})
    states = _states(one_rank, path, 64)
    before_TH = np.load(states["states"])
    kl = [one_rank.ask("update_actor", **_update(path), **states)[0]["kl"] for _ in range(3)]
    assert abs(kl[0]) < ROUNDING < 1e-5 < kl[1] < kl[2]
    np.testing.assert_array_equal(np.load(_states(one_rank, path, 64)["states"]), before_TH)


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_the_tasks_hand_the_states_on_and_delete_them(
    place: str, one_rank: Ranks, folder_of: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the reward the KL is a column beside the log-probs; in the loss the update reads the file of states."""
    rows = random_rows(12, samples=2)
    path = tmp_path / "000001.parquet"
    write_rows(path, rows)
    kl = {"estimator": "full", "place": place, "coefficient": 0.5}
    config = {**SMALL, "algorithm": {"name": "reinforce", "kl": kl}}
    one_rank.build(folder_of(SHAPE), ROLES, algorithm=config["algorithm"], actor=_trainer(2))
    _move(one_rank, str(path))
    training = _training(tmp_path, config, monkeypatch, actor=one_rank, reference=one_rank)
    settings = settings_at(training.config, 1, Progress())
    experience = ExperienceRef(str(path), 12, 0, 0, -1)
    if place == "loss":
        states = reference_logprobs.fn(training, settings, experience)
        assert (Path(states.path).exists(), states.columns) == (True, ())
        metrics = update_actor.fn(training, settings, Stage(experience, {}))
        assert metrics["actor/kl"] > 1e-3
    else:
        passed = old_logprobs.fn(training, settings, experience)
        assert passed.columns == ("logprobs_old", "kl")
        add_columns(path, {"reward": np.zeros(12), "group": np.arange(12)})
        metrics = advantage.fn(training, settings, Stage(experience, {}), [passed]).metrics
        kl, gained = read_columns(path, ["kl", "advantages"]).values()
        for row in range(12):
            lost_T = 0.5 * kl.row(row) * rows.mask.row(row)
            expected_T = -lost_T[::-1].cumsum()[::-1] * rows.mask.row(row)
            np.testing.assert_allclose(gained.row(row), expected_T, rtol=1e-4, atol=1e-7)
        assert metrics["actor/kl"] == pytest.approx(kl.values_T[rows.mask.values_T > 0].mean(), rel=1e-6)
        assert metrics["actor/kl"] > 1e-3
    assert not list(tmp_path.glob("*.npy"))


# ---- the reference renewed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "stage"), [(1, 1), (2, 3)])
def test_after_a_refresh_the_divergence_is_zero_exactly(
    count: int, stage: int, ranks_of: Callable[[int], Ranks], folder_of: FolderOf, tmp_path: Path
) -> None:
    """Weights and log-probs are the actor's bit for bit; then both part again. Control: before, they were not."""
    ranks, rows = ranks_of(count), random_rows(12, samples=2)
    path = write_rows(tmp_path / "rows.parquet", rows)
    ranks.build(folder_of(UNTIED), ROLES, algorithm=FULL, actor=_trainer(stage))
    start_T = _logprobs(ranks, rows, path, "reference")
    _move(ranks, path)
    assert np.abs(_logprobs(ranks, rows, path, "actor") - _logprobs(ranks, rows, path, "reference")).mean() > 1e-3
    digests = [digest for reply in ranks.ask("refresh_reference") for digest in reply.digests]
    assert len(digests) == 2 * count
    assert len(set(digests)) == 1
    np.testing.assert_array_equal(
        _logprobs(ranks, rows, path, "reference"), moved_T := _logprobs(ranks, rows, path, "actor")
    )
    assert np.abs(moved_T - start_T).mean() > 1e-3
    states = _states(ranks, path, 64)
    kl = [ranks.ask("update_actor", **_update(path), **states)[0]["kl"] for _ in range(2)]
    assert abs(kl[0]) < ROUNDING < 1e-4 < kl[1]


def test_a_refresh_reaches_another_group_through_a_file(
    one_rank: Ranks, two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """From the shards of two ranks to a reference on one. Control: a file that was damaged is another model."""
    rows, file = random_rows(12, samples=2), str(tmp_path / "reference.safetensors")
    path = write_rows(tmp_path / "rows.parquet", rows)
    two_ranks.build(folder_of(UNTIED), algorithm=FULL, actor=_trainer(3))
    one_rank.build(folder_of(UNTIED), ("reference",), algorithm=FULL)
    _move(two_ranks, path)
    sent = two_ranks.ask("write_actor", path=file)
    received = one_rank.ask("read_reference", path=file)
    assert {digest for reply in sent + received for digest in reply.digests} == set(sent[0].digests)
    actor_T, reference_T = _logprobs(two_ranks, rows, path, "actor"), _logprobs(one_rank, rows, path, "reference")
    np.testing.assert_allclose(actor_T, reference_T, rtol=0, atol=1e-5)
    replies = two_ranks.ask("logprobs_and_kl", path=path, temperature=1.0, budget=64, **_states(one_rank, path, 64))
    assert max(np.abs(reply.kl_T).max() for reply in replies) < 1e-6
    content = bytearray(Path(file).read_bytes())
    content[-5] ^= 1
    Path(file).write_bytes(content)
    assert one_rank.ask("read_reference", path=file)[0].digests != sent[0].digests


def test_the_task_refuses_a_reference_that_is_no_copy(
    one_rank: Ranks, two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compares what the ranks of both groups report. Control: of a true copy it leaves nothing but its seconds."""
    path = write_rows(tmp_path / "rows.parquet", random_rows(12, samples=2))
    one_rank.build(folder_of(SHAPE), actor=_trainer(1))
    two_ranks.build(folder_of(SHAPE), ("reference",))
    _move(one_rank, path)
    tree = {**SMALL, "algorithm": {"kl": {}}}
    training = _training(tmp_path / "run", tree, monkeypatch, actor=one_rank, reference=two_ranks)
    assert refresh_reference.fn(training, 1).keys() == {"time/refresh_reference_s"}
    assert not list((tmp_path / "run").iterdir())
    call = two_ranks.group.call

    def stale(command: str, key: str, **arguments: Any) -> list[dict[str, Any]]:
        replies: list[dict[str, Any]] = call(command, key, **arguments)
        return [*replies[:-1], replies[-1] | {"reply": {"digests": ["of other weights"]}}]

    monkeypatch.setattr(two_ranks.group, "call", stale)
    with pytest.raises(RuntimeError, match="after iteration 2 the reference is not a copy"):
        refresh_reference.fn(training, 2)


@pytest.mark.parametrize(("count", "stage"), [(1, 2), (2, 3)])
def test_a_restored_training_goes_on_with_the_refreshed_reference_bit_for_bit(
    count: int, stage: int, ranks_of: Callable[[int], Ranks], folder_of: FolderOf, tmp_path: Path
) -> None:
    """Saved between two refreshes. Control: a checkpoint of before the first one holds no reference at all."""
    ranks, rows = ranks_of(count), random_rows(12, samples=2)
    path, build = write_rows(tmp_path / "rows.parquet", rows), {"algorithm": FULL, "actor": _trainer(stage)}
    ranks.build(folder_of(UNTIED), ROLES, **build)
    (tmp_path / "before").mkdir()
    (tmp_path / "after").mkdir()
    _move(ranks, path)
    ranks.ask("save", folder=str(tmp_path / "before"))
    ranks.ask("refresh_reference")
    _move(ranks, path)
    ranks.ask("save", folder=str(tmp_path / "after"))
    saved = {name: SavedStates(image_paths(tmp_path / name)).tensors("reference/") for name in ("before", "after")}
    assert [bool(tensors) for tensors in saved.values()] == [False, True]

    def go_on() -> tuple[dict[str, Any], np.ndarray, dict[str, torch.Tensor]]:
        reference_T = _logprobs(ranks, rows, path, "reference")
        metrics = ranks.ask("update_actor", **_update(path), **_states(ranks, path, 64))[0]
        return metrics, reference_T, ranks.parameters()

    metrics, reference_T, parameters = go_on()
    ranks.build(folder_of(UNTIED), ROLES, **build)
    assert np.abs(_logprobs(ranks, rows, path, "reference") - reference_T).mean() > 1e-3
    ranks.ask("load", folder=str(tmp_path / "after"), version=0)
    again, same_T, same = go_on()
    np.testing.assert_array_equal(same_T, reference_T)
    assert again == metrics
    assert metrics["kl"] > 1e-4
    assert all(torch.equal(value, parameters[name]) for name, value in same.items())


@pytest.mark.parametrize("shape", [SHAPE, BIASED], ids=["a head", "one with a bias"])
def test_the_head_that_an_actor_keeps_of_a_reference_elsewhere_is_restored(
    shape: Shape, one_rank: Ranks, two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """The reference's group writes it into the checkpoint. Control: without loading, the KL is another."""
    rows, file = random_rows(12, samples=2), str(tmp_path / "reference.safetensors")
    path = write_rows(tmp_path / "rows.parquet", rows)
    one_rank.build(folder_of(shape), algorithm=FULL, actor=_trainer(1))
    two_ranks.build(folder_of(shape), ("reference",), algorithm=FULL)
    _move(one_rank, path)
    one_rank.ask("write_actor", path=file)
    two_ranks.ask("read_reference", path=file)
    (tmp_path / "theirs").mkdir()
    two_ranks.ask("save", folder=str(tmp_path / "theirs"))
    for image in image_paths(tmp_path / "theirs"):  # groups of one name here, of two in a training
        image.rename(tmp_path / image.name.replace("main", "reference"))
    one_rank.ask("save", folder=str(tmp_path))

    def kl() -> float:
        states = _states(two_ranks, path, 64)
        reply = one_rank.ask("logprobs_and_kl", path=path, temperature=1.0, budget=64, **states)[0]
        return float(np.abs(reply.kl_T).mean())

    assert kl() < 1e-6
    one_rank.build(folder_of(shape), algorithm=FULL, actor=_trainer(1))
    assert kl() > 1e-3
    one_rank.ask("load", folder=str(tmp_path), version=0)
    assert kl() < 1e-6


# ---- the KL on held-out responses ----------------------------------------------------------------------------------


def test_the_held_out_kl_is_zero_before_training_and_grows_with_it(
    one_rank: Ranks, folder_of: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the evaluation asks of the engines and makes of it; the responses' file holds both models' log-probs."""
    rows = random_rows(12, samples=2)
    path = write_rows(tmp_path / "rows.parquet", rows)
    one_rank.build(folder_of(SHAPE), ROLES, algorithm={"kl": {}}, actor=_trainer(2))
    sections = {**SMALL, "algorithm": {"kl": {}}, "evaluate": {"samples": 2, "temperature": 0.7}}
    training = _training(tmp_path, sections, monkeypatch, actor=one_rank, reference=one_rank)
    tokens = [rows.prompts.row(row).tolist() for row in range(0, 12, 2)]
    prompts = pd.DataFrame({"prompt_text": ["-"] * 6, "prompt_tokens": tokens})
    responses = Responses(np.arange(6), rows.responses, [""] * 12, np.zeros(12, bool), 0, {}, rows.mask, {})

    def measured(iteration: int) -> dict[str, float]:
        write_columns(training.run.evaluation(iteration), {"response_tokens": rows.responses})
        bare = heldout([0.0] * 12, 2)
        return KL().evaluate(with_logprobs(training, iteration, 16_384, prompts, responses, bare))

    assert set(measured(0).values()) == {0.0}
    _move(one_rank, path)
    after = measured(1)
    assert 1e-4 < after["kl/low"] < after["kl"] < after["kl/high"]
    shown = [path.name for path in training.run.evaluation(0).parent.iterdir() if not path.name.startswith(".")]
    assert sorted(shown) == ["000000.parquet", "000001.parquet"]  # and the digests beside them
    read = read_columns(training.run.evaluation(1), ["logprobs", "logprobs_reference"])
    x_T = (read["logprobs_reference"].values_T - read["logprobs"].values_T).astype(np.float64)
    counted = [rows.mask.row(row) > 0 for row in range(12)]
    x_B = [part[own] for part, own in zip(np.split(x_T, rows.responses.offsets_B1[1:-1]), counted, strict=True)]
    prompts_P = [np.concatenate(pair) for pair in zip(x_B[::2], x_B[1::2], strict=True)]
    assert after["kl"] == pytest.approx(np.mean([(np.exp(x) - 1 - x).mean() for x in prompts_P]), rel=1e-6)
    assert after["kl_k1"] == pytest.approx(np.mean([-x.mean() for x in prompts_P]), rel=1e-6)

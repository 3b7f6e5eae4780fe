"""What lives in host memory, of DeepSpeed's states or of activations, leaves every number as it is.

On CPU ranks device and host are one memory: what is shown is that DeepSpeed's other code for it sums, clips, steps,
saves and reshards the same numbers. Left out: copies between a GPU and its host.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.configs.sections.trainer import SftConfig
from tests.engines.rows import LOSS, SPLIT, gathered, random_rows, with_columns, write_rows
from tests.engines.shared_ranks import Ranks, Shape
from tests.engines.training.test_portions import _in_portions
from tests.engines.unpacked import STEADY, UNCLIPPED

SHAPE = Shape("qwen3", tied=True, intermediate=1024)  # DeepSpeed shards nothing below 100,000 elements at stage 3
CLIP, RATE, LAYERS = 0.5, 0.2, 2
KL_LOSS = {**LOSS, "kl_estimator": "k3", "kl_coefficient": 0.1}
FolderOf = Callable[[Shape], Path]
Parameters = dict[str, torch.Tensor]
BOTH = (pytest.mark.slow, pytest.mark.exhaustive)


def _same(one: Parameters, other: Parameters) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def _apart(one: Parameters, other: Parameters) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def _actor(offload: str, clip: float = UNCLIPPED, **more: Any) -> dict[str, Any]:
    optimizer = {**STEADY, "max_grad_norm": clip}
    return {"zero_stage": 3, "offload": offload, "optimizer": optimizer, **more}


def _update(ranks: Ranks, path: str, version: int = -1, loss: dict[str, Any] = LOSS) -> dict[str, float]:
    split = {**SPLIT, "micro_batch_tokens": 40}
    update = {"path": path, "version": version, "split": split, "loss": loss, "learning_rate": RATE}
    figures: dict[str, float] = ranks.ask("update_actor", **update)[0]
    return figures


@pytest.mark.parametrize(
    ("count", "offload", "clip"),
    [
        (1, "all", UNCLIPPED),
        pytest.param(2, "all", UNCLIPPED, marks=BOTH),
        pytest.param(2, "optimizer", UNCLIPPED, marks=BOTH),
        pytest.param(2, "all", CLIP, marks=BOTH),
        pytest.param(2, "optimizer", CLIP, marks=BOTH),
    ],
)
def test_updates_are_the_same_wherever_states_live(
    count: int, offload: str, clip: float, ranks_of: Callable[[int], Ranks], folder_of: FolderOf, tmp_path: Path
) -> None:
    """Two updates of several micro-batches: to the last bit, clipped ones to rounding, since DeepSpeed takes the norm
    in double precision in one case alone. Controls: the weights move; changed masters end elsewhere.
    """
    ranks, path = ranks_of(count), write_rows(tmp_path / "rows.parquet", random_rows(8))
    ranks.build(folder_of(SHAPE), actor=_actor("nothing", clip))
    begin = ranks.parameters()
    assert ranks.ask("living_on_host", role="actor")[0] == {"optimizer": False, "weights": False}
    plain, trained = [_update(ranks, path) for _ in range(2)], ranks.parameters()

    ranks.build(folder_of(SHAPE), actor=_actor(offload, clip))
    assert ranks.ask("living_on_host", role="actor")[0] == {"optimizer": True, "weights": offload == "all"}
    figures = [_update(ranks, path) for _ in range(2)]
    found = ranks.parameters()
    assert plain[0]["micro_batches"] > 1 and plain[0]["grad_norm"] > CLIP
    assert [one["grad_norm"] for one in figures] == pytest.approx([one["grad_norm"] for one in plain], rel=1e-6)
    assert [one["loss"] for one in figures] == pytest.approx([one["loss"] for one in plain], abs=1e-6)
    assert _apart(begin, trained) > 1e-3
    assert _same(found, trained) if clip == UNCLIPPED else _apart(found, trained) < 1e-6

    ranks.build(folder_of(SHAPE), actor=_actor(offload, clip))
    _update(ranks, path)
    ranks.ask("spoil_masters", role="actor")
    _update(ranks, path)
    assert _apart(ranks.parameters(), trained) > 1e-4


@pytest.mark.parametrize(
    ("count", "offload", "clip"),
    [
        (1, "all", CLIP),
        pytest.param(2, "all", UNCLIPPED, marks=BOTH),
        pytest.param(2, "all", CLIP, marks=BOTH),
        pytest.param(2, "optimizer", CLIP, marks=BOTH),
    ],
)
def test_states_in_files_train_and_are_saved_as_those_in_memory(
    count: int, offload: str, clip: float, ranks_of: Callable[[int], Ranks], folder_of: FolderOf, tmp_path: Path
) -> None:
    """To the last bit, with every page driven out to the disk between updates and before a checkpoint, which either way
    of keeping them goes on from. Files have no name, and are gone with their trainer.

    Controls: with states in memory there are none; after an update more a load is what brings the weights back; changed
    masters end elsewhere.
    """
    ranks, path = ranks_of(count), write_rows(tmp_path / "rows.parquet", random_rows(8))
    folder = tmp_path / "disk"
    folder.mkdir()
    in_memory, in_files = _actor(offload, clip), _actor(offload, clip, offload_folder=str(folder))
    ends = []
    for actor in (in_memory, in_files):
        saved = tmp_path / f"saved {len(ends)}"
        saved.mkdir()
        ranks.build(folder_of(SHAPE), actor=actor)
        figures = []
        for _ in range(2):
            figures.append(_update(ranks, path))
            driven_out = ranks.ask("driven_out", folder=str(folder))
            assert all((held["files"] > 0) == (actor is in_files) for held in driven_out)
        for held in ranks.ask("living_in_files", role="actor", folder=str(folder)):
            assert held["states"][0] == 2 * held["masters"][0] > 0
            for name, (numbers, filed) in held.items():
                assert filed == (numbers if actor is in_files and (name != "weights" or offload == "all") else 0)
        ranks.ask("save", folder=str(saved))
        ends.append((ranks.parameters(), [(one["loss"], one["grad_norm"]) for one in figures]))
        assert list(folder.iterdir()) == []
    (plain, told), (found, said) = ends
    assert _same(plain, found) and told == said and told[0][1] > CLIP

    _update(ranks, path)
    further = ranks.parameters()
    assert not _same(further, found)
    ranks.ask("load", folder=str(tmp_path / "saved 0"), version=1)
    assert _same(ranks.parameters(), found)
    _update(ranks, path)
    assert _same(ranks.parameters(), further)
    ranks.build(folder_of(SHAPE), actor=in_memory)
    assert ranks.ask("driven_out", folder=str(folder)) == [{"files": 0}] * count  # gone with their trainer
    ranks.ask("load", folder=str(tmp_path / "saved 1"), version=1)
    assert _same(ranks.parameters(), found)
    _update(ranks, path)
    assert _same(ranks.parameters(), further)
    ranks.ask("load", folder=str(tmp_path / "saved 1"), version=1)
    ranks.ask("spoil_masters", role="actor")
    _update(ranks, path)
    assert not _same(ranks.parameters(), further)


@pytest.mark.slow
def test_with_all_in_host_memory_a_run_is_saved_resumed_and_resharded(
    two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """Old log-probs, a KL to the reference, a critic's values and updates, reshards, a checkpoint that another way of
    keeping states goes on from: as without, bit for bit. Control: without the checkpoint's load it ends elsewhere.
    """
    rows = random_rows(8)
    path = write_rows(tmp_path / "rows.parquet", rows)
    roles, budget = ("actor", "critic", "reference", "rollout"), 40
    ends = {}
    for offload in ("nothing", "all"):
        actor, saved = _actor(offload), tmp_path / offload
        sections = {"actor": actor, "critic": actor, "algorithm": {"name": "ppo", "kl": {"estimator": "k3"}}}
        saved.mkdir()
        two_ranks.build(folder_of(SHAPE), roles, **sections)
        spoken = {
            role: gathered(rows, two_ranks.ask("logprobs", path=path, role=role, temperature=1.0, budget=budget))
            for role in ("actor", "reference")
        }
        spoken["values"] = gathered(rows, two_ranks.ask("values", path=path, budget=budget))
        columns = {"logprobs_old": spoken["actor"], "logprobs_reference": spoken["reference"] - 0.1}
        full = write_rows(
            tmp_path / f"{offload}.parquet", with_columns(rows, {**columns, "values": spoken["values"] + 0.05})
        )
        _update(two_ranks, full, 0, KL_LOSS)
        split = {**SPLIT, "micro_batch_tokens": budget}
        two_ranks.ask("update_critic", path=full, split=split, clip=0.2, learning_rate=RATE)
        two_ranks.ask("reshard", version=1)
        assert all(reply["names"] == [] for reply in two_ranks.ask("mismatches"))
        two_ranks.ask("save", folder=str(saved))
        _update(two_ranks, full, 1, KL_LOSS)
        wanted = two_ranks.parameters()
        _update(two_ranks, full, 1, KL_LOSS)
        assert not _same(two_ranks.parameters(), wanted)
        two_ranks.ask("load", folder=str(saved), version=1)
        _update(two_ranks, full, 1, KL_LOSS)
        assert _same(two_ranks.parameters(), wanted)
        ends[offload] = spoken, wanted, two_ranks.parameters("critic")
    for name, values_T in ends["nothing"][0].items():
        assert (values_T == ends["all"][0][name]).all()
    assert _same(ends["nothing"][1], ends["all"][1])
    assert _same(ends["nothing"][2], ends["all"][2])
    two_ranks.ask("load", folder=str(tmp_path / "nothing"), version=1)
    _update(two_ranks, full, 1, KL_LOSS)
    assert _same(two_ranks.parameters(), wanted)


def test_inputs_of_blocks_that_wait_in_host_memory_train_alike(
    one_rank: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """Two updates, bit for bit; every block's input of every micro-batch was there. Control: it comes back changed."""
    path = write_rows(tmp_path / "rows.parquet", random_rows(8))
    ends = []
    for on_host, spoil in ((False, False), (True, False), (True, True)):
        actor = {"zero_stage": 1, "gradient_checkpointing": True, "offload_activations": on_host}
        one_rank.build(folder_of(SHAPE), actor=actor)
        one_rank.ask("kept_on_host", spoil=spoil)
        batches = sum(_update(one_rank, path)["micro_batches"] for _ in range(2))
        assert one_rank.ask("kept_on_host")[0]["inputs"] == (LAYERS * batches if on_host else 0)
        ends.append(one_rank.parameters())
    assert _same(ends[0], ends[1])
    assert not _same(ends[0], ends[2])


@pytest.mark.slow
@pytest.mark.exhaustive
def test_offline_steps_are_the_same_wherever_states_live(two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path) -> None:
    """Supervised steps, and those of a reward model, with all in host memory. Control: another order ends elsewhere."""
    ends: dict[str, list[Parameters]] = {"sft": [], "preference": []}
    path = write_rows(tmp_path / "rows.parquet", random_rows(8))
    at_home = {"offload": "nothing", "offload_activations": False}
    away = {"offload": "all", "offload_activations": True}
    unclipped = {**STEADY, "max_grad_norm": UNCLIPPED}
    for places, order in ((at_home, 1), (away, 1), (at_home, -1)):
        settings = {"zero_stage": 3, "gradient_checkpointing": True, **places, "optimizer": unclipped}
        trainer = SftConfig.model_validate(settings).model_dump(mode="json")
        model = {"trainer": trainer, "folder": str(folder_of(SHAPE)), "dtype": "float32", "seed": 0}
        batches = np.array([[0, 1], [2, 3]])[::order]
        two_ranks.ask("discard")
        two_ranks.ask("sft_begin", model=model, rows=path)
        two_ranks.ask("sft_steps", batches=batches, budget=40, learning_rate=RATE)
        ends["sft"].append(two_ranks.parameters("sft"))
        two_ranks.ask("discard")
        two_ranks.ask("preference_begin", model=model, scores=True)
        loss = {"name": "bradley_terry", "settings": {}}
        two_ranks.ask("preference_steps", path=path, batches=batches, budget=400, loss=loss, learning_rate=RATE)
        ends["preference"].append(two_ranks.parameters("preference"))
    for plain, moved, other in ends.values():
        assert _same(plain, moved)
        assert not _same(plain, other)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("clip", [UNCLIPPED, CLIP])
def test_portions_and_ranks_together_train_alike_wherever_states_live(
    clip: float, two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """A sum of portions is weighed in host memory as on the device, and so is the norm by which it is clipped.

    Control: the whole batch at another weight (the mean over rows) ends elsewhere.
    """
    bare = random_rows(12, samples=2)
    old = -np.random.default_rng(1).exponential(size=len(bare.mask.values_T))
    path = write_rows(tmp_path / "rows.parquet", with_columns(bare, {"logprobs_rollout": old}))
    ends, figures = [], []
    for offload, together, aggregation in (
        ("nothing", 1, "token-mean"),
        ("all", 1, "token-mean"),
        ("all", 2, "token-mean"),
        ("all", 1, "seq-mean-token-mean"),
    ):
        two_ranks.build(folder_of(SHAPE), actor=_actor(offload, clip, sequence_parallel=together))
        figures.append([_in_portions(two_ranks, path, aggregation) for _ in range(2)])
        ends.append(two_ranks.parameters())
    assert figures[0][0]["grad_norm"] > CLIP
    for other in figures[1:3]:
        norms = [[one["grad_norm"] for one in steps] for steps in (figures[0], other)]
        assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    assert _same(ends[0], ends[1]) if clip == UNCLIPPED else _apart(ends[0], ends[1]) < 1e-6
    assert _apart(ends[0], ends[2]) < 1e-4
    assert _apart(ends[0], ends[3]) > 1e-3

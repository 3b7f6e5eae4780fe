"""Each optimizer steps as its library's own does, and what it keeps is saved and brought back to the last bit.

The oracle is that class of torch's or bitsandbytes', set up here by hand. AdamW's own tests: test_trainer.py,
test_other_layouts.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes import optim

from penstock.configs.sections.optimizer import LEAST_8BIT, OPTIMIZERS, OptimizerConfig
from penstock.configs.sections.trainer import TrainerConfig
from penstock.engines.families.shape import read_shape
from penstock.engines.models.loading import load_causal_lm
from penstock.engines.sizing.optimizer_states import state_bytes, state_numbers
from penstock.engines.training.optimizers import STEP, make_optimizer
from penstock.engines.training.state_images import SavedState, saved_actor
from penstock.engines.training.trained_state import MASTER, ParameterSlice, optimizer_state, shares_of
from tests.engines.rows import LOSS, SPLIT, random_rows, write_rows
from tests.engines.shared_ranks import Ranks, Shape

SHAPE = Shape("qwen3", tied=True, intermediate=1024)  # at stage 3 some parameters are whole on each rank, others cut
FolderOf = Callable[[Shape], Path]
Parameters = dict[str, torch.Tensor]
RATE = 1e-2
DECAY = 0.1


@dataclass(frozen=True)
class Case:
    """An optimizer, and where it is tried."""

    name: str
    count: int
    stage: int
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def actor(self) -> dict[str, Any]:
        """The actor's section."""
        return {
            "zero_stage": self.stage,
            "optimizer": {"name": self.name, "weight_decay": DECAY, **dict(self.settings)},
        }

    def __str__(self) -> str:
        return "-".join(str(part) for part in (self.name, *dict(self.settings), self.count, self.stage))


PLAIN = (("momentum", 0.0),)
CASES = [
    Case("sgd", 1, 0),
    Case("sgd", 2, 1),
    Case("sgd", 2, 2),
    Case("sgd", 2, 3),
    Case("sgd", 2, 1, PLAIN),
    Case("muon", 1, 0),
    Case("muon", 2, 0),
    Case("adafactor", 1, 0),
    Case("adafactor", 2, 0),
    Case("adamw8bit", 1, 0),
    Case("adamw8bit", 2, 0),
]


def _by_hand(name: str, named: dict[str, torch.nn.Parameter], momentum: float | None) -> list[torch.optim.Optimizer]:
    """The libraries' own optimizers with the settings of the cases."""
    every = list(named.values())
    blocks = [one for key, one in named.items() if ".layers." in key and one.ndim == 2]
    rest = [one for one in every if all(one is not matrix for matrix in blocks)]
    if name == "sgd":
        return [torch.optim.SGD(every, lr=RATE, momentum=momentum or 0.0, weight_decay=DECAY)]
    if name == "adamw8bit":
        return [optim.AdamW8bit(every, lr=RATE, betas=(0.9, 0.95), weight_decay=DECAY)]
    if name == "adafactor":
        return [torch.optim.Adafactor(every, lr=RATE, weight_decay=DECAY)]
    muon = torch.optim.Muon(blocks, lr=RATE, momentum=0.95, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, lr=RATE, betas=(0.9, 0.95), weight_decay=DECAY)]


def _named(folder: Path) -> dict[str, torch.nn.Parameter]:
    return dict(load_causal_lm(folder, torch.float32, False).named_parameters())


def _difference(one: Parameters, other: Parameters) -> float:
    return sum(float((value - other[name]).norm() ** 2) for name, value in one.items()) ** 0.5


@pytest.mark.parametrize(
    ("name", "momentum"),
    [("sgd", None), ("sgd", 0.8), ("muon", None), ("adafactor", None), ("adamw8bit", None)],
)
def test_the_same_gradients_give_the_weights_that_the_librarys_optimizer_gives_by_hand(
    name: str, momentum: float | None, folder_of: FolderOf
) -> None:
    """Bit for bit, over three steps. Control: AdamW on the same gradients ends elsewhere, but where it is AdamW."""
    settings = {"name": name, "weight_decay": DECAY} | ({} if momentum is None else {"momentum": momentum})
    ours, theirs, others = (_named(folder_of(SHAPE)) for _ in range(3))
    optimizer = make_optimizer(ours, OptimizerConfig.model_validate(settings))
    adamw = make_optimizer(others, OptimizerConfig(weight_decay=DECAY))
    hand = _by_hand(name, theirs, 0.9 if momentum is None else momentum)
    for group in (*optimizer.param_groups, *adamw.param_groups):
        group["lr"] = RATE
    for step in range(3):
        for number, key in enumerate(ours):
            gradient = torch.randn(ours[key].shape, generator=torch.Generator().manual_seed(100 * step + number))
            ours[key].grad, theirs[key].grad, others[key].grad = (gradient.clone() for _ in range(3))
        for one in (optimizer, adamw, *hand):
            one.step()
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
    matrices = {key for key, value in ours.items() if ".layers." in key and value.ndim == 2}
    apart = {key for key, value in ours.items() if not torch.equal(value, others[key])}
    quantised = {key for key, value in ours.items() if value.numel() >= LEAST_8BIT}
    if name == "adamw8bit":  # the others are stepped as AdamW's, and rounded otherwise
        assert quantised <= apart
        assert all(torch.allclose(ours[key], others[key], atol=1e-6) for key in ours.keys() - quantised)
    else:
        assert apart == (matrices if name == "muon" else ours.keys())


def _update(ranks: Ranks, path: str, rate: float = RATE) -> None:
    split = {**SPLIT, "micro_batch_tokens": 64}
    ranks.ask("update_actor", path=path, version=-1, split=split, loss=LOSS, learning_rate=rate)


def _same(a: Parameters, b: Parameters) -> bool:
    return all(torch.equal(value, b[name]) for name, value in a.items())


@pytest.mark.parametrize("case", [case for case in CASES if (case.count, case.stage) != (1, 0)], ids=str)
def test_ranks_and_zero_stages_step_as_one_rank_without_zero(
    case: Case, ranks_of: Callable[[int], Ranks], folder_of: FolderOf, tmp_path: Path
) -> None:
    """Two updates end alike but for the rounding of sums of gradients. Control: another optimizer ends elsewhere."""
    path, ends = write_rows(tmp_path / "rows.parquet", random_rows(8)), []
    alone, another = Case(case.name, 1, 0, case.settings), "sgd" if case.name == "adamw8bit" else "adamw"
    for one in (alone, case, Case(another, 1, 0)):
        ranks = ranks_of(one.count)
        ranks.build(folder_of(SHAPE), actor=one.actor)
        start = ranks.parameters()
        for _ in range(2):
            _update(ranks, path)
        ends.append(ranks.parameters())
    moved = _difference(ends[0], start)
    assert _difference(ends[0], ends[1]) < 0.02 * moved
    assert _difference(ends[0], ends[2]) > 0.2 * moved


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_restored_optimizer_takes_the_same_next_step_bit_for_bit(
    case: Case, ranks_of: Callable[[int], Ranks], folder_of: FolderOf, tmp_path: Path
) -> None:
    """In this process and in a new model; and what is saved before the first step changes nothing about it.

    Controls: without the restore the same experience leads elsewhere, and, with a state to keep, so it does with the
    weights alone.
    """
    ranks, folder = ranks_of(case.count), folder_of(SHAPE)
    path = write_rows(tmp_path / "rows.parquet", random_rows(8))
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    ranks.build(folder, actor=case.actor)
    _update(ranks, path)
    once = ranks.parameters()

    ranks.build(folder, actor=case.actor)
    ranks.ask("save", folder=str(tmp_path / "first"))
    _update(ranks, path)
    assert _same(ranks.parameters(), once)
    ranks.ask("save", folder=str(tmp_path / "second"))
    _update(ranks, path)
    wanted = ranks.parameters()
    _update(ranks, path)
    assert not _same(ranks.parameters(), wanted)
    for _ in ("the same model", "a new one"):
        ranks.ask("load", folder=str(tmp_path / "second"), version=0)
        assert _same(ranks.parameters(), once)
        _update(ranks, path)
        assert _same(ranks.parameters(), wanted)
        ranks.build(folder, actor=case.actor)

    ranks.ask("load", folder=str(tmp_path / "second"), version=0)
    ranks.ask("export", folder=str(tmp_path / "weights-alone"))
    ranks.build(tmp_path / "weights-alone", actor=case.actor)
    assert _same(ranks.parameters(), once)
    _update(ranks, path)
    assert _same(ranks.parameters(), wanted) == (case.settings == PLAIN)


def _kept(state: SavedState) -> Parameters:
    """All that was saved of each parameter, whole."""
    found = {}
    for name, (source, *_) in state.sources.items():
        kinds = [
            place.rpartition("/")[2] for place in source.image.header.places if place.startswith(f"{source.share}/")
        ]
        flat = source.image.tensor(f"{source.share}/{MASTER}").numel()
        for kind in kinds:
            tensor = source.image.tensor(f"{source.share}/{kind}")
            if tensor.numel() == flat and kind != STEP:
                count = torch.Size(state.parameters[name]).numel()
                tensor = torch.full((count,), torch.nan)
                state.copy(kind, [ParameterSlice(name, 0, count, 0)], tensor)
            found[f"{name}/{kind}"] = tensor.clone()
    return found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Case("sgd", 2, 1), Case("sgd", 1, 0)),
        (Case("sgd", 1, 2), Case("sgd", 2, 3)),
        (Case("muon", 1, 0), Case("muon", 2, 0)),
        (Case("adafactor", 2, 0), Case("adafactor", 1, 0)),
        (Case("adamw8bit", 1, 0), Case("adamw8bit", 2, 0)),
    ],
    ids=str,
)
def test_what_it_keeps_is_the_same_on_another_number_of_ranks_and_at_another_stage(
    before: Case, after: Case, ranks_of: Callable[[int], Ranks], folder_of: FolderOf, tmp_path: Path
) -> None:
    """Saved anew from the other layout it is the same bit for bit. Control: after one more step it is not."""
    path = write_rows(tmp_path / "rows.parquet", random_rows(8))
    for name in ("before", "after", "later"):
        (tmp_path / name).mkdir()
    ranks_of(before.count).build(folder_of(SHAPE), actor=before.actor)
    _update(ranks_of(before.count), path)
    ranks_of(before.count).ask("save", folder=str(tmp_path / "before"))
    ranks = ranks_of(after.count)
    ranks.build(folder_of(SHAPE), actor=after.actor)
    ranks.ask("load", folder=str(tmp_path / "before"), version=0)
    ranks.ask("save", folder=str(tmp_path / "after"))
    _update(ranks, path)
    ranks.ask("save", folder=str(tmp_path / "later"))
    kept, again, later = (_kept(saved_actor(tmp_path / name)) for name in ("before", "after", "later"))
    assert kept.keys() == again.keys()
    assert any(not name.endswith((MASTER, STEP)) for name in kept)
    assert _same(kept, again)
    assert not any(torch.equal(value, later[name]) for name, value in kept.items())


def test_sgd_steps_bfloat16_weights_by_their_float32_masters(
    one_rank: Ranks, folder_of: FolderOf, tmp_path: Path
) -> None:
    """As GPUs train: at stage 1 DeepSpeed takes another optimizer of its own than at stage 2; both step alike.

    What is restored goes on bit for bit. Control: without the restore it leads elsewhere.
    """
    path, ends = write_rows(tmp_path / "rows.parquet", random_rows(8, samples=2)), []
    for stage in (2, 1):
        one_rank.build(folder_of(SHAPE), actor=Case("sgd", 1, stage).actor, model={"dtype": "bfloat16"})
        start = one_rank.parameters()
        _update(one_rank, path, rate=1.0)
        ends.append(one_rank.parameters())
    assert _difference(ends[0], ends[1]) < 0.05 * _difference(ends[0], start)
    (tmp_path / "saved").mkdir()
    one_rank.ask("save", folder=str(tmp_path / "saved"))
    _update(one_rank, path, rate=1.0)
    wanted = one_rank.parameters()
    _update(one_rank, path, rate=1.0)
    assert not _same(one_rank.parameters(), wanted)
    one_rank.ask("load", folder=str(tmp_path / "saved"), version=0)
    _update(one_rank, path, rate=1.0)
    assert _same(one_rank.parameters(), wanted)


def test_its_state_may_rest_in_host_memory(two_ranks: Ranks, folder_of: FolderOf, tmp_path: Path) -> None:
    """Two updates end as without. Control: a change to the masters' resting copy changes the result."""
    path, ends = write_rows(tmp_path / "rows.parquet", random_rows(8)), []
    for offload, spoil in ((False, False), (True, False), (True, True)):
        two_ranks.build(folder_of(SHAPE), actor=Case("sgd", 2, 2).actor | {"offload_optimizer": offload})
        _update(two_ranks, path)
        if spoil:
            two_ranks.ask("spoil_offloaded", role="actor")
        _update(two_ranks, path)
        moved = ["hp_params", "optim_states"] if offload else []
        assert two_ranks.ask("offloaded", role="actor")[0]["states"] == moved
        ends.append(two_ranks.parameters())
    assert _same(ends[0], ends[1])
    assert not _same(ends[0], ends[2])


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"adamw8bit"}))
@pytest.mark.parametrize("shape", [SHAPE, Shape("qwen2", tied=False)], ids=lambda shape: shape.architecture)
def test_the_memory_estimate_counts_what_an_optimizer_keeps(name: str, shape: Shape, folder_of: FolderOf) -> None:
    """Of sizes alone, to the number. Control: the optimizers differ."""
    trainer = TrainerConfig.model_validate({"zero_stage": 0, "optimizer": {"name": name}})
    lm = load_causal_lm(folder_of(shape), torch.float32, False)
    optimizer = make_optimizer(dict(lm.named_parameters()), trainer.optimizer)
    states = [optimizer_state(optimizer, share) for share in shares_of(lm, optimizer)]
    kept = sum(value.numel() for state in states for key, value in state.items() if key != STEP)
    assert state_numbers(trainer, read_shape(folder_of(shape))) == kept
    low, high = {"adamw": (2, 2), "sgd": (1, 1), "muon": (1.01, 1.9), "adafactor": (0.001, 0.1)}[name]
    assert low <= kept / sum(one.numel() for one in lm.parameters()) <= high


def test_the_memory_estimate_counts_eight_bits(folder_of: FolderOf) -> None:
    """Within the norms' few numbers, which stay float32. Control: AdamW's states are four times as many bytes."""
    lm, shape = load_causal_lm(folder_of(SHAPE), torch.float32, False), read_shape(folder_of(SHAPE))
    bytes_of = {}
    for name in ("adamw8bit", "adamw"):
        trainer = TrainerConfig.model_validate({"zero_stage": 0, "optimizer": {"name": name}})
        optimizer = make_optimizer(dict(lm.named_parameters()), trainer.optimizer)
        states = [optimizer_state(optimizer, share) for share in shares_of(lm, optimizer)]
        kept = sum(value.nbytes for state in states for key, value in state.items() if key != STEP)
        bytes_of[name] = state_bytes(trainer, shape)
        assert 0.98 * kept < bytes_of[name] <= kept
    assert 3.8 < bytes_of["adamw"] / bytes_of["adamw8bit"] < 4

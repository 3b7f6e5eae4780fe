"""A refusal for memory names the key that helps: the budget of a micro-batch, or the length of rows that exceed it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.checks import memory
from penstock.configs.preference import PreferenceConfig
from penstock.configs.schema import TrainConfig
from penstock.engines.families.shape import ExpertSizes
from penstock.engines.groups.spec import RankDevice

TINY: dict[str, Any] = {"tiny": {"max_positions": 1 << 20}}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with room for nothing."""
    monkeypatch.setattr(memory, "visible_gpus", lambda: [])
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 1 << 20)


@pytest.mark.parametrize(
    ("budget", "advice"),
    [
        (1 << 19, "a smaller actor.micro_batch_tokens, "),
        (64, "a smaller data.max_prompt_tokens or rollout.max_response_tokens, "),
    ],
)
def test_of_a_training(budget: int, advice: str) -> None:
    """The longest row is 500 tokens."""
    lengths = {"data": {"max_prompt_tokens": 100}, "rollout": {"max_response_tokens": 400}}
    config = TrainConfig.model_validate({"model": TINY, "actor": {"micro_batch_tokens": budget}, **lengths})
    with pytest.raises(UserError, match="GiB free") as refused:
        memory.check_memory(config)
    assert advice in refused.value.remedy


def test_more_ranks_are_no_advice_for_an_optimizer_that_needs_all_on_each() -> None:
    """Another optimizer is. Control: AdamW is advised to be shared out."""
    for name, advice in (
        ("adafactor", "use actor.optimizer.name=adamw or sgd, more ranks and a higher"),
        ("adamw", "use more ranks or a higher"),
    ):
        actor = {"micro_batch_tokens": 1 << 19, "zero_stage": 0, "optimizer": {"name": name}}
        config = TrainConfig.model_validate({"model": {**TINY, "dtype": "float32"}, "actor": actor})
        with pytest.raises(UserError, match="GiB free") as refused:
            memory.check_memory(config)
        assert refused.value.remedy.startswith(f"{advice} actor.zero_stage, ")


@pytest.mark.parametrize(("budget", "key"), [(1 << 19, "micro_batch_tokens"), (64, "max_tokens")])
def test_of_training_without_rollout(budget: int, key: str) -> None:
    """Under the name of the section that the user gave: also where the warm-up is the fullest phase of a training."""
    settings = {"micro_batch_tokens": budget, "max_tokens": 1 << 16}
    supervised = TrainConfig.model_validate({"model": TINY, "sft": settings})
    preference = PreferenceConfig.model_validate({"model": TINY, "trainer": settings})
    for section, config, checked in (
        ("sft", supervised, lambda config: memory.check_finetuning_memory(config, "sft")),
        ("sft", supervised, memory.check_memory),
        ("trainer", preference.engines(), lambda config: memory.check_finetuning_memory(config, "trainer")),
    ):
        with pytest.raises(UserError, match="GiB free") as refused:
            checked(config)
        assert f"a smaller {section}.{key}, " in refused.value.remedy
        assert f"{section}.zero_stage" in refused.value.remedy


def test_snapshots_are_off_where_the_host_has_no_room_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside all that its ranks need, and with a tenth to spare; it is said. Control: with that room they are on."""
    config = TrainConfig.model_validate(
        {"model": TINY, "groups": {"main": {"ranks": 2, "roles": ["actor", "rollout"]}}}
    )
    (group,) = memory.estimate_groups(config)
    assert group.slots == pytest.approx(2 * 12 * memory.shape_of(config).parameters / 2, rel=1e-6)
    needed = 2 * (group.memory.total + group.slots)
    for free, fits in ((needed / memory.SPARED + 4, True), (needed / memory.SPARED - 4, False)):
        monkeypatch.setattr(memory, "free_host_bytes", lambda free=free: int(free))
        assert memory.snapshots_fit([group]) == fits
        assert ("snapshots: off" in memory.describe_snapshots([group])) != fits


def test_a_rank_on_a_gpu_needs_its_hosts_memory_for_snapshots_and_what_is_offloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own memory is elsewhere. Control: of a host that has not joined nothing is known."""
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 1 << 30)
    config = TrainConfig.model_validate({"model": TINY})
    (group,) = memory.estimate_groups(config)
    on_gpu = replace(group, devices=(RankDevice(0),), slots=1 << 29)
    assert memory.snapshots_fit([on_gpu])
    assert not memory.snapshots_fit([replace(on_gpu, offloaded=1 << 29)])
    assert memory.snapshots_fit([replace(on_gpu, devices=(RankDevice(0, "h200/0"),), slots=1 << 50)])


def test_a_group_that_may_be_absent_spares_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines that stay must hold all sequences. Control: beside one that stays each needs a smaller KV cache."""
    monkeypatch.setattr(memory, "visible_gpus", lambda: [0, 1, 2])
    monkeypatch.setattr(memory, "free_gpu_bytes", lambda index: 1 << 36)
    monkeypatch.setattr(memory, "has_gated_mlp", lambda index: False)

    def needs(**more: Any) -> int:
        groups = {"learning": {"gpus": [0], "roles": ["actor"]}, "staying": {"gpus": [1], "roles": ["rollout"]}, **more}
        tree = {"model": TINY, "groups": groups, "rollout": {"prompts": 400, "samples": 2, "sleep": False}}
        return memory.estimate_groups(TrainConfig.model_validate(tree))[1].memory.total

    spare = {"gpus": [2], "roles": ["rollout"]}
    assert needs(spare={**spare, "elastic": True}) == needs()
    assert needs(spare=spare) < needs()


def test_experts_of_a_rollout_are_those_of_a_cache_that_a_gpu_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate knows its free memory. Control: there is room for a cache of all sequences, however much more."""
    experts = ExpertSizes(count=8, chosen=2, inner=32)
    shape = replace(memory.shape_of(TrainConfig.model_validate({"model": TINY})), experts=experts)
    monkeypatch.setattr(memory, "shape_of", lambda *_: shape)
    monkeypatch.setattr(memory, "visible_gpus", lambda: [0])
    monkeypatch.setattr(memory, "has_gated_mlp", lambda index: False)
    tree = {"model": TINY, "actor": {"routing": "replay"}, "rollout": {"max_response_tokens": 1 << 16}}

    def kept(free: int) -> int:
        monkeypatch.setattr(memory, "free_gpu_bytes", lambda index: free)
        (group,) = memory.estimate_groups(TrainConfig.model_validate(tree), "rollout")
        return group.memory.parts["experts of the rollout"]

    assert kept(1 << 30) < kept(1 << 50) == kept(1 << 51)


def within_machines(**devices: Any) -> TrainConfig:
    """A recipe whose actor is sharded over the ranks of a machine, and over all."""
    main = {**devices, "roles": ["actor", "rollout"]}
    tree = {"model": TINY, "actor": {"zero_stage": 3, "hpz": True}, "groups": {"main": main}}
    return TrainConfig.model_validate(tree)


def test_sharding_within_machines_is_for_several_of_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has its part of the weights once more. Controls: one machine, one rank a machine, another stage."""
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 1 << 50)
    (group,) = memory.check_memory(within_machines(hosts=2, ranks=2))
    parts = group.memory.parts
    assert parts["actor weights of the host"] == pytest.approx(2 * parts["actor weights"], rel=0.01)
    with pytest.raises(UserError, match=r"actor\.hpz has no effect: group 'main' is on one machine"):
        memory.check_memory(within_machines(ranks=4))
    with pytest.raises(UserError, match="has one rank on each machine"):
        memory.check_memory(within_machines(hosts=2, ranks=1))
    with pytest.raises(ValueError, match="'hpz' needs 'zero_stage' 3, not 1"):
        TrainConfig.model_validate({"actor": {"hpz": True}})


def test_the_ranks_of_a_group_are_whole_sets_that_compute_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each trained model's own group. Controls: numbers that divide them."""
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 1 << 50)
    model = {"tiny": {"max_positions": 4096, "heads": 4, "kv_heads": 2}}

    def check(ranks: int, **sections: Any) -> None:
        groups = {"main": {"ranks": ranks, "roles": ["actor", "critic", "rollout"]}}
        tree = {"model": model, "algorithm": {"name": "ppo"}, "groups": groups, **sections}
        memory.check_memory(TrainConfig.model_validate(tree))

    check(4, actor={"sequence_parallel": 2}, critic={"sequence_parallel": 4})
    with pytest.raises(UserError, match=r"actor\.sequence_parallel=2 does not divide the 3 ranks of group 'main'"):
        check(3, actor={"sequence_parallel": 2})
    with pytest.raises(UserError, match=r"critic\.sequence_parallel=4 does not divide the 2 ranks"):
        check(2, actor={"sequence_parallel": 2}, critic={"sequence_parallel": 4})
    with pytest.raises(UserError, match=r"sequence_parallel=3: the model's 4 heads"):
        check(3, actor={"sequence_parallel": 3})


def test_a_row_too_long_for_a_rank_is_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal names the key, and with it the row fits."""
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 9 << 30)
    sizes = {"data": {"max_prompt_tokens": 100}, "rollout": {"max_response_tokens": 200_000, "kv_cache_gib": 0.1}}

    def check(together: int) -> None:
        groups = {"learning": {"ranks": 2, "roles": ["actor"]}, "generating": {"ranks": 1, "roles": ["rollout"]}}
        tree = {"model": {"tiny": {"max_positions": 1 << 20, "heads": 4, "kv_heads": 2}}, "groups": groups, **sizes}
        memory.check_memory(TrainConfig.model_validate(tree | {"actor": {"sequence_parallel": together}}))

    with pytest.raises(UserError, match=r"a higher actor\.sequence_parallel"):
        check(1)
    check(2)

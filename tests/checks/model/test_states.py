"""A model whose layers carry a state is refused with what nobody has compared, and by vLLM's own server."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.benchmarks.workload.families import FAMILIES, write_family
from penstock.checks.model import served, states
from penstock.checks.model.folder import check_model_folder
from penstock.checks.model.served import check_served_alone
from penstock.checks.model.starting_model import check_model
from penstock.checks.model.states import check_states
from penstock.checks.preferences import check_preferences
from penstock.configs.preference import PairConfig, PreferenceConfig, RewardModelConfig
from penstock.configs.schema import TrainConfig
from penstock.engines.families.served import check_served
from penstock.engines.families.table import family_of

ROLLOUT_ELSEWHERE = {"a": {"roles": ["actor"], "gpus": [0]}, "b": {"roles": ["rollout"], "gpus": [1]}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with such layers, and one without."""
    made = tmp_path_factory.mktemp("models")
    return write_family("LFM2", made / "state"), write_family("Qwen 3", made / "none")


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"rollout": {"carry": {"keep_kv_cache": True}}}, "keep_kv_cache"),
        ({"rollout": {"tensor_parallel": 2}}, "rollout.tensor_parallel above 1"),
        ({"actor": {"zero_stage": 3}}, "zero_stage 3"),
        ({"actor": {"sequence_parallel": 2}}, "sequence_parallel"),
        ({"actor": {"expert_parallel": 2, "zero_stage": 1}}, "expert_parallel"),
    ],
)
def test_what_nobody_has_compared_is_refused(sections: dict[str, Any], named: str, folders: tuple[Path, Path]) -> None:
    """Controls: a model without a state, and one with a state and nothing of all that."""
    with_state, without = (
        TrainConfig.model_validate({**sections, "model": {"path": str(folder)}}) for folder in folders
    )
    check_states(without)
    for compared in (
        {},
        {"groups": ROLLOUT_ELSEWHERE, "rollout": {"stream": {"staleness": 2}}},
        {"rollout": {"tail": {}}},
    ):
        check_states(TrainConfig.model_validate({**compared, "model": {"path": str(folders[0])}}))
    with pytest.raises(UserError, match=f"carry a state .* does not go with {named}"):
        check_states(with_state)


@pytest.mark.parametrize(("tree", "named"), [(PreferenceConfig, "preferences"), (RewardModelConfig, "a reward model")])
def test_pairs_are_refused_in_the_users_words(tree: type[PairConfig], named: str, folders: tuple[Path, Path]) -> None:
    """Not by the groups that the flow makes. Control: of a model without a state the rows are asked for next."""
    with_state, without = (tree.model_validate({"model": {"path": str(folder)}}) for folder in folders)
    with pytest.raises(UserError, match=f"carry a state .* does not go with {named}: .*\\n +use another model"):
        check_preferences(with_state)
    with pytest.raises(UserError, match="nothing to train on"):
        check_preferences(without)


def test_scores_of_one_are_refused(folders: tuple[Path, Path]) -> None:
    """Of a reward model, and of a critic with what nobody has compared, whatever the actor's model is.

    Controls: a critic, of the actor's folder or one of its own, and a model without a state.
    """
    with_state, without = (str(folder) for folder in folders)
    ppo: dict[str, Any] = {"algorithm": {"name": "ppo"}}

    def checked(model: str, **sections: Any) -> None:
        check_states(TrainConfig.model_validate({"model": {"path": model}, **sections}))

    checked(without, **ppo, critic={"path": without}, reward={"model": without})
    checked(with_state, **ppo)
    checked(without, **ppo, critic={"path": with_state})
    checked(with_state, **ppo, critic={"path": without, "zero_stage": 3})
    checked(without, rollout={"tensor_parallel": 2}, **ppo, critic={"path": with_state})
    for parallel, named in (({"zero_stage": 3}, "zero_stage 3"), ({"sequence_parallel": 2}, "sequence_parallel")):
        with pytest.raises(UserError, match=f"{with_state} .* carry a state .* does not go with {named}"):
            checked(without, **ppo, critic={"path": with_state, **parallel})
    with pytest.raises(UserError, match="reward.model: the model in .* carry a state"):
        checked(without, reward={"model": with_state})
    tiny: dict[str, Any] = {"model": {"tiny": {}}, "data": {"arithmetic": {}}}
    with pytest.raises(UserError, match="reward.model: the model in .* carry a state"):
        check_model(TrainConfig.model_validate({**tiny, "reward": {"model": with_state}}))
    check_model(TrainConfig.model_validate({**tiny, "reward": {"model": without}}))


@pytest.mark.parametrize("name", ["Moonlight", "MiniMax M2"])
def test_what_vllm_alone_computes_wrongly_on_a_cpu_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latent attention, and corrections without groups. Controls: a GPU, and a router with groups."""
    folder = write_family(name, tmp_path / "model")
    with pytest.raises(UserError, match="not what vLLM's own server would compute on a CPU"):
        check_served_alone(folder)
    check_served_alone(write_family("GLM-4.5", tmp_path / "other"))
    monkeypatch.setattr(served, "visible_gpus", lambda: ["0"])
    check_served_alone(folder)


def test_vllm_alone_is_refused(folders: tuple[Path, Path]) -> None:
    """Control: the model without a state."""
    with_state, without = folders
    check_served_alone(without)
    with pytest.raises(UserError, match="nobody has compared vLLM's own server"):
        check_served_alone(with_state)


def test_an_older_library_is_refused_where_there_is_a_gpu(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Controls: a CPU, and a model with a state of another kind."""
    mamba = write_family("Falcon-H1", tmp_path / "model")
    monkeypatch.setattr(states, "version", lambda _: "5.17.0")
    monkeypatch.setattr("penstock.checks.model.folder.visible_gpus", list)
    check_model_folder(mamba, "model.path")
    monkeypatch.setattr("penstock.checks.model.folder.visible_gpus", lambda: ["0"])
    check_model_folder(folders[0], "model.path")
    with pytest.raises(UserError, match=r"transformers 5\.17\.0 needs"):
        check_model_folder(mamba, "model.path")


@pytest.mark.parametrize(("name", "refused"), [("Falcon-H1", True), ("LFM2", False), ("Qwen 3.5", False)])
def test_a_library_that_writes_out_pairs_of_tokens_is_refused_for_mamba_2(
    name: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Controls: a newer one, and layers of other kinds."""
    family = family_of(FAMILIES[name][0])
    monkeypatch.setattr(states, "version", lambda _: "5.18.0")
    states.check_scan("it", family)
    monkeypatch.setattr(states, "version", lambda _: "5.17.0")
    with pytest.raises(UserError, match=r"transformers 5\.17\.0 needs") if refused else nullcontext():
        states.check_scan("it", family)


@pytest.mark.parametrize(
    ("model_type", "name", "heeded", "unheeded"),
    [
        ("granitemoehybrid", "mamba_n_groups", 1, 2),
        ("falcon_h1", "mamba_norm_before_gate", False, True),
        ("granitemoehybrid", "time_step_limit", (0.0, float("inf")), [0.001, 0.1]),
        ("falcon_h1", "time_step_limit", [0.0, {"__float__": "Infinity"}], [0.0, 1.0]),
    ],
)
def test_settings_that_vllm_does_not_heed_are_refused(model_type: str, name: str, heeded: Any, unheeded: Any) -> None:
    """As a file and as the library has them. Controls: the value of which both compute the same, and another family."""
    check_served({"model_type": model_type, name: heeded}, [], "it")
    check_served({"model_type": "llama", name: unheeded}, [], "it")
    with pytest.raises(UserError, match=f"sets '{name}', and vLLM computes as if it were"):
        check_served({"model_type": model_type, name: unheeded}, [], "it")

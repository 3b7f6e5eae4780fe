"""The estimate knows what lives in host memory: what GPUs need less, what the host needs more.

By hand: AdamW's masters and moments are 12 bytes per parameter, sums of gradients 4, and 4 for the copies that are
stepped on. Page-locked memory comes in powers of two.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.benchmarks.sizes.shapes import KNOWN, shape_named
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.run import Role
from penstock.engines.families.shape import ModelShape
from penstock.engines.sizing.memory import (
    SUB_GROUP,
    Rank,
    Recomputed,
    folder_bytes,
    locked,
    offloaded_bytes,
    rank_phases,
)

# Two million parameters whose halves are no powers of two.
SMALL = replace(shape_named("llama-3.1-70b"), parameters=2_000_000, layers=4, hidden_size=128)
ACTOR: tuple[Role, ...] = ("actor",)


def _config(offload: str, **more: Any) -> TrainConfig:
    actor = {"zero_stage": 3, "offload": offload, "gradient_checkpointing": True, "micro_batch_tokens": 1000, **more}
    return TrainConfig.model_validate({"actor": actor, "data": {"max_prompt_tokens": 10}})


def _rank(device: str) -> Rank:
    return Rank(dict.fromkeys(ACTOR, SMALL), 2, device, 2)


def _files(offload: str, **more: Any) -> dict[str, int]:
    return folder_bytes(_config(offload, **more), _rank("cuda"))


def _parts(offload: str, device: str = "cuda", **more: Any) -> tuple[dict[str, int], int]:
    config, rank = _config(offload, **more), _rank(device)
    recomputed = {"actor": Recomputed(activations=True, logits=True)}
    return rank_phases(config, rank, recomputed)["update of the actor"], offloaded_bytes(config, rank)


def test_what_lives_in_host_memory_is_no_longer_on_the_gpu() -> None:
    """Of each rank's million parameters. Controls: without it all is on the GPU; a CPU has it all the same."""
    parts, host = _parts("nothing")
    assert (parts["actor weights"], parts["actor masters and moments"], parts["actor gradients"]) == (
        2_000_000,
        12_000_000,
        4_000_000,
    )
    assert host == 0
    parts, host = _parts("optimizer")
    assert parts["actor weights"] == 2_000_000 and parts["actor gradients"] == 0
    assert "actor masters and moments" not in parts
    assert host == 12_000_000 + 2 * 4_194_304
    parts, more = _parts("all")
    assert "actor weights" not in parts
    assert more - host == 2_097_152
    parts, _ = _parts("all", "cpu")
    assert parts["actor gradients"] == 8_000_000 and parts["actor masters and moments"] == 12_000_000


def test_what_lives_in_files_is_no_longer_in_host_memory() -> None:
    """Of each rank's million parameters the sums of gradients alone, of no rounded size; with weights that live there,
    too, more is on its way at the start: masters and weights. A CPU's update has less, too, but its start the masters.
    Control: without a folder there are no files, and more memory is needed.
    """
    for offload, files, kept in (("optimizer", 12_000_000, 4_000_000), ("all", 14_000_000, 6_000_000)):
        parts, host = _parts(offload, offload_folder="/disk")
        assert host == kept < _parts(offload)[1]
        assert parts == _parts(offload)[0]
        assert _files(offload, offload_folder="/disk") == {"/disk": files}
        assert _files(offload) == {}
        parts, without = (_parts(offload, "cpu", offload_folder=folder)[0] for folder in ("/disk", None))
        gone = {name: size for name, size in without.items() if parts.get(name) != size}
        assert parts["actor gradients"] == 4_000_000 and gone.pop("actor gradients") == 8_000_000
        assert gone == {"actor masters and moments": 12_000_000} | (
            {"actor weights": 2_000_000} if files > 12e6 else {}
        )


def test_large_parts_are_stepped_on_in_groups() -> None:
    """A copy for each group of a billion numbers, so that rounding up costs little; the sum is one tensor."""
    assert [locked(size) for size in (0, 1, 3, 4, 4 * SUB_GROUP)] == [0, 1, 4, 4, 1 << 32]


def test_inputs_of_blocks_wait_on_the_host() -> None:
    """Three of them are on the GPU at a time. Control: four layers' without it."""
    without, none = _parts("nothing")[0]["activations"], _parts("nothing", offload_activations=False)[1]
    parts, host = _parts("nothing", offload_activations=True)
    tokens = 10 + 1024  # the longest row is above the budget
    assert without - parts["activations"] == 2 * 128 * tokens
    assert none == 0 and host == 4 * locked(2 * 128 * tokens)


@pytest.mark.parametrize(("name", "parameters"), [("qwen2.5-32b", 32_763_876_352), ("llama-3.1-70b", 70_553_706_496)])
def test_sizes_follow_from_the_configuration(name: str, parameters: int) -> None:
    """To the last parameter, as the published models have them."""
    shape: ModelShape = shape_named(name)
    assert shape.parameters == parameters and shape.explained
    assert name in KNOWN

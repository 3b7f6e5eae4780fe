"""The sizes that the checks assume of a tiny model are those of the model that is then made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.configs.loading.load import config_from_mapping, load_config
from penstock.data.tokenizer import make_byte_tokenizer
from penstock.engines.families.shape import read_shape
from penstock.engines.families.tiny import tiny_shape
from penstock.engines.models.tiny import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "tiny",
    [
        {},
        {"heads": 4, "kv_heads": 2, "layers": 1},
        {"tie_embeddings": False, "intermediate_size": 64},
        {"hidden_size": 64, "heads": 2, "kv_heads": 2, "max_positions": 99},
    ],
)
def test_the_assumed_sizes_are_the_real_ones(tmp_path: Path, tiny: dict[str, Any]) -> None:
    """Also with grouped heads and with two embedding matrices."""
    config = config_from_mapping({"model": {"tiny": tiny}}, "test")
    assert config.model.tiny is not None
    vocabulary = make_byte_tokenizer(tmp_path)
    parameters = make_tiny_model(tmp_path, config.model.tiny, vocabulary, eos=1, pad=0, seed=0)
    assert tiny_shape(config.model.tiny).parameters == parameters
    assert tiny_shape(config.model.tiny) == read_shape(tmp_path)


def test_the_quickstart_trains_338784_parameters() -> None:
    """The number that its summary reports."""
    tiny = load_config(ROOT / "configs" / "quickstart.yaml").model.tiny
    assert tiny is not None and tiny_shape(tiny).parameters == 338_784

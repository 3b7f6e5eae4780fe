"""Pictures made from a seed, and images of rows: read before anything starts, refused by row and file."""

from __future__ import annotations

import base64
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from penstock.base.errors import UserError
from penstock.checks.training import check_environment
from penstock.configs.schema import TrainConfig
from penstock.configs.sections.data import SquaresData
from penstock.data.images import check_images, read_images
from penstock.data.squares import make_pictures


def test_pictures_are_made_from_the_seed_and_a_share_is_miscounted() -> None:
    """Splits have the sizes asked for; control: another seed makes others."""
    config = SquaresData(sft=400, mistakes=0.25, train=30, heldout=20)
    frames = make_pictures(config, 0)
    assert {split: len(frame) for split, frame in frames.items()} == {"sft": 400, "train": 30, "heldout": 20}
    assert frames["train"].equals(make_pictures(config, 0)["train"])
    assert not frames["train"].equals(make_pictures(config, 1)["train"])
    right = (frames["sft"]["answer"] + "." == frames["sft"]["response"]).mean()
    assert 0.65 < right < 0.85
    assert (frames["train"]["answer"] + "." == frames["train"]["response"]).all()


def test_images_are_paths_beside_the_data_or_base64(tmp_path: Path) -> None:
    Image.new("RGB", (30, 20)).save(tmp_path / "one.png")
    content = (tmp_path / "one.png").read_bytes()
    frame = pd.DataFrame({"images": [["one.png"], [], [base64.b64encode(content).decode()]]})
    assert list(read_images(frame, "images", tmp_path / "rows.jsonl")) == [[content], [], [content]]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("absent.png", "cannot be read"),
        ("text.png", "no image that can be read"),
        ("large.png", "too large"),
        ("https://example.org/one.png", "no network"),
        ("!!", "neither a path"),
        ("bücher", "neither a path"),
        ("with\0.png", "neither a path"),
        ("../dev.zero/../dev.zero", "is no file"),
        ("figure.eps", "no image that can be read"),
    ],
)
def test_an_image_that_cannot_be_used_is_refused_by_row(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    (tmp_path / "text.png").write_text("no image")
    Image.new("RGB", (15, 10)).save(tmp_path / "large.png")
    Image.new("RGB", (5, 5)).save(tmp_path / "good.png")
    Image.new("RGB", (5, 5)).save(tmp_path / "figure.eps")
    (tmp_path.parent / "dev.zero").mkdir(exist_ok=True)
    frame = pd.DataFrame({"images": [["good.png"], [name]]})
    with pytest.raises(UserError, match=said) as error:
        check_images(frame, "images", tmp_path / "rows.jsonl")
    assert "line 2" in str(error.value)


def test_what_is_not_shown_with_images_is_refused() -> None:
    """Control: without it the recipe is a recipe."""
    rows = {"data": {"squares": {}}, "model": {"tiny": {"encoder": {"hidden_size": 32, "layers": 2, "heads": 2}}}}
    TrainConfig.model_validate(rows)
    for more in ({"actor": {"zero_stage": 3}}, {"rollout": {"tensor_parallel": 2}}, {"model": {"tiny": {}}}):
        with pytest.raises(ValueError, match="images"):
            TrainConfig.model_validate({**rows, **more})
    learns = {**rows, "model": {**rows["model"], "train_encoder": True}}
    TrainConfig.model_validate({**learns, "rollout": {"tail": {}}})
    TrainConfig.model_validate({**rows, "rollout": {"carry": {}}})
    with pytest.raises(ValueError, match="rollout.carry beside 'model.train_encoder'"):
        TrainConfig.model_validate({**learns, "rollout": {"carry": {}}})
    adapted = {"actor": {"lora": {"rank": 4}}}
    TrainConfig.model_validate({**rows, **adapted})
    with pytest.raises(ValueError, match="actor.lora beside 'model.train_encoder'"):
        TrainConfig.model_validate({**learns, **adapted})
    with pytest.raises(ValueError, match="no images to train it with"):
        TrainConfig.model_validate({"model": {"train_encoder": True}})


def test_an_agent_has_no_place_for_images() -> None:
    """It asks by messages of its own. Control: an environment that answers the policy is none."""
    rows = {"data": {"squares": {}}, "model": {"tiny": {"encoder": {}}}}
    of_type = "penstock.environments.calculator:{}"
    check_environment(TrainConfig.model_validate({**rows, "environment": {"type": of_type.format("Calculator")}}))
    with pytest.raises(UserError, match="images of rows have no place"):
        check_environment(
            TrainConfig.model_validate({**rows, "environment": {"type": of_type.format("CalculatorAgent")}})
        )

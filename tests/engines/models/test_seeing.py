"""Packed rows with images are, row by row, what the library computes: log-probs and the decoder's gradients.

In float32, on a tiny model of Qwen2.5-VL's shape. The library places images and positions by itself.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from penstock.base.ragged import Ragged
from penstock.engines.batches.images import with_images
from penstock.engines.batches.packing import Rows, pack
from penstock.engines.models.loading import load_causal_lm
from penstock.engines.models.models import PackedPolicy
from tests.engines.seeing import PROMPTS, Seen, library_logprobs, library_model, seen_rows, write_seeing_model

EQUAL = 1e-5
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_model(tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture
def seen(model: Path, tmp_path: Path) -> Seen:
    return seen_rows(model, tmp_path / "images")


def _policy(model: Path, seen: Seen) -> PackedPolicy:
    return PackedPolicy(load_causal_lm(model, torch.float32, False), images=seen.folder)


def _logprobs(policy: PackedPolicy, rows: Rows, index: list[int]) -> torch.Tensor:
    return policy(pack(rows, index, CPU), 1.0)[0]


def test_packed_rows_are_the_librarys_row_by_row(model: Path, seen: Seen) -> None:
    """One run of all rows: log-probs, and gradients of every weight of the decoder; the encoder has none."""
    policy, lm = _policy(model, seen), library_model(model)
    ours_T = _logprobs(policy, seen.rows(), [*range(len(PROMPTS))])
    theirs_T = torch.cat([library_logprobs(lm, seen, row) for row in range(len(PROMPTS))])
    assert (ours_T - theirs_T).abs().max() < EQUAL
    ours_T.sum().backward()
    theirs_T.sum().backward()
    gradients = {name: value.grad for name, value in policy.lm.named_parameters() if value.grad is not None}
    decoder = {name: value.grad for name, value in lm.named_parameters() if "visual" not in name}
    assert gradients.keys() == decoder.keys()
    for name, value in decoder.items():
        assert value is not None and (gradients[name] - value).norm() < EQUAL * (1 + value.norm()), name


def test_a_row_depends_on_its_own_image(model: Path, seen: Seen, tmp_path: Path) -> None:
    """The control: with other pictures and the same responses, only rows without any are the same."""
    others = replace(seen_rows(model, tmp_path / "others", seed=1), responses=seen.responses)
    index = [*range(len(PROMPTS))]
    with torch.no_grad():
        one_T = _logprobs(_policy(model, seen), seen.rows(), index)
        other_T = _logprobs(_policy(model, others), others.rows(), index)
    gaps = [gap_T.abs().max() for gap_T in (one_T - other_T).split(seen.responses.lengths_B.tolist())]
    assert [bool(gap > 1e-3) for gap in gaps] == [bool(pictures) for pictures in PROMPTS]


def test_equal_words_with_other_images_are_other_prompts(seen: Seen) -> None:
    """The first three prompts have the same tokens; only those with the same picture are computed once."""
    assert np.array_equal(seen.prompts.row(0), seen.prompts.row(2))
    rows = seen.rows()
    ids = rows.prompt_ids_B.tolist()
    assert ids[0] == ids[1] != ids[2]
    together, apart = (len(pack(rows, index, CPU).tokens_N) for index in ([0, 1], [0, 2]))
    assert together == rows.lengths_B[[0, 1]].sum() - len(seen.prompts.row(0))
    assert apart == rows.lengths_B[[0, 2]].sum()


def test_an_image_is_looked_at_once(model: Path, seen: Seen) -> None:
    """Four prompts name two of the pictures, in two passes."""
    policy = _policy(model, seen)
    with patch.object(policy.lm, "get_image_features", wraps=policy.lm.get_image_features) as encoder, torch.no_grad():
        for index in ([0, 1, 2], [0, 2]):
            _logprobs(policy, seen.rows(), index)
    assert encoder.call_count == 2


def test_a_row_of_text_is_as_in_a_file_without_images(model: Path, seen: Seen) -> None:
    policy, row = _policy(model, seen), PROMPTS.index(())
    text = Rows(seen.prompts, seen.responses, seen.rows().mask, {})
    with torch.no_grad():
        assert torch.allclose(_logprobs(policy, text, [row]), _logprobs(policy, seen.rows(), [row]), atol=1e-6)


def test_an_image_that_reaches_beyond_its_prompt_is_noticed(seen: Seen) -> None:
    short = Ragged.of([seen.prompts.row(0)[:4]], np.int32)
    with pytest.raises(ValueError, match="more tokens than are left"):
        with_images(short, seen.images.take(np.asarray([0])))

"""Packed rows with images are, row by row, what the library computes: log-probs and the decoder's gradients.

In float32, on tiny models of Qwen2.5-VL's and of Qwen3-VL's shape. The library places images and positions by itself.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from penstock.base.ragged import Ragged
from penstock.configs.sections.trainer import LoraConfig, SftConfig
from penstock.data.images import ImageFolder
from penstock.engines.batches.images import NUMBERS, with_images
from penstock.engines.batches.packing import Rows, pack
from penstock.engines.commands.finetuning import ModelToTrain
from penstock.engines.kernels.lm_head import Head, Reference
from penstock.engines.models.loading import load_causal_lm
from penstock.engines.models.models import PackedCritic, PackedPolicy
from penstock.engines.models.seeing import KEPT_BYTES, sight_of
from penstock.engines.ranks.finetuning import _settings
from penstock.engines.ranks.models import RankModels
from penstock.engines.sizing.memory import FEATURES
from penstock.engines.weights.lora import adapted_layers, attach, merged_state
from tests.engines.seeing import (
    PROMPTS,
    SEEING,
    Seen,
    library_distributions,
    library_logprobs,
    library_model,
    library_states,
    seen_rows,
    write_seeing_model,
)

EQUAL = 1e-5
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=SEEING)
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return write_seeing_model(tmp_path_factory.mktemp("seeing") / "model", request.param)


@pytest.fixture
def seen(model: Path, tmp_path: Path) -> Seen:
    return seen_rows(model, tmp_path / "images")


def _policy(model: Path, seen: Seen, learns: bool = False, recomputes: bool = False) -> PackedPolicy:
    lm = load_causal_lm(model, torch.float32, recomputes, train_encoder=learns)
    return PackedPolicy(lm, images=seen.folder).train()


def _logprobs(policy: PackedPolicy, rows: Rows, index: list[int]) -> torch.Tensor:
    return policy(pack(rows, index, CPU), 1.0)[0]


@pytest.mark.parametrize(("learns", "recomputes"), [(False, False), (True, False), (True, True)])
def test_packed_rows_are_the_librarys_row_by_row(model: Path, seen: Seen, learns: bool, recomputes: bool) -> None:
    """One run of all rows: log-probs, and gradients of every weight; an encoder that rests has none."""
    policy, lm = _policy(model, seen, learns, recomputes), library_model(model)
    ours_T = _logprobs(policy, seen.rows(), [*range(len(PROMPTS))])
    theirs_T = torch.cat([library_logprobs(lm, seen, row) for row in range(len(PROMPTS))])
    assert (ours_T - theirs_T).abs().max() < EQUAL
    ours_T.sum().backward()
    theirs_T.sum().backward()
    gradients = {name: value.grad for name, value in policy.lm.named_parameters() if value.grad is not None}
    wanted = {name: value.grad for name, value in lm.named_parameters() if learns or "visual" not in name}
    assert gradients.keys() == wanted.keys()
    for name, value in wanted.items():
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
    looks = policy.lm.base_model
    with patch.object(looks, "get_image_features", wraps=looks.get_image_features) as encoder, torch.no_grad():
        for index in ([0, 1, 2], [0, 2]):
            _logprobs(policy, seen.rows(), index)
    assert encoder.call_count == 2


def test_an_encoder_that_learns_looks_again(model: Path, seen: Seen) -> None:
    """At the same picture once its weights are others; one that rests is not asked again: the control."""
    for learns in (True, False):
        policy = _policy(model, seen, learns)
        with torch.no_grad():
            before_T = _logprobs(policy, seen.rows(), [0])
            for name, weight in policy.lm.named_parameters():
                if "visual.merger" in name:
                    weight.mul_(1.5)
            assert bool((_logprobs(policy, seen.rows(), [0]) - before_T).abs().max() > 1e-3) == learns


def test_a_run_of_text_leaves_gradients_of_zero(model: Path, seen: Seen) -> None:
    """For an encoder that learns, whose gradients ranks sum up together; with an image they are not zero."""
    policy = _policy(model, seen, learns=True)
    encoder = {name: weight for name, weight in policy.lm.named_parameters() if "visual" in name}
    for row, some in ((PROMPTS.index(()), False), (0, True)):
        policy.zero_grad()
        _logprobs(policy, seen.rows(), [row]).sum().backward()
        sums = [weight.grad.abs().sum() for weight in encoder.values() if weight.grad is not None]
        assert len(sums) == len(encoder) and bool(torch.stack(sums).sum() > 0) == some


def test_a_critic_sees(model: Path, seen: Seen, tmp_path: Path) -> None:
    """Its values are its head's of the library's last hidden states. Control: with other pictures they are others."""
    critic, lm = PackedCritic(load_causal_lm(model, torch.float32, False), seen.folder), library_model(model)
    torch.nn.init.normal_(critic.head.weight, std=0.2)
    others = replace(seen_rows(model, tmp_path / "others", seed=1), responses=seen.responses)
    index = [*range(len(PROMPTS))]
    with torch.no_grad():
        ours_T = critic(pack(seen.rows(), index, CPU))
        theirs_T = torch.cat([critic.head(library_states(lm, seen, row))[:, 0] for row in index])
        assert (ours_T - theirs_T).abs().max() < EQUAL
        other_T = PackedCritic.forward(_with_images(critic, others.folder), pack(others.rows(), index, CPU))
    assert (ours_T - other_T).abs().max() > 1e-2


def _with_images(critic: PackedCritic, folder: ImageFolder) -> PackedCritic:
    critic.sight = sight_of(critic.backbone, folder)
    return critic


def test_adapters_are_the_decoders(model: Path, seen: Seen) -> None:
    """None is in the encoder, whose features are kept; merged, the library computes the same with them."""
    policy, lm = _policy(model, seen), library_model(model)
    attach(policy.lm, LoraConfig(rank=4), seed=0)
    for name, weight in policy.lm.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(weight, std=0.3)
    adapted = adapted_layers(policy.lm)
    assert adapted and all("language_model" in name for name in adapted)
    index = [*range(len(PROMPTS))]
    with torch.no_grad():
        ours_T = _logprobs(policy, seen.rows(), index)
        before_T = torch.cat([library_logprobs(lm, seen, row) for row in index])
        lm.load_state_dict(merged_state(policy.lm))
        theirs_T = torch.cat([library_logprobs(lm, seen, row) for row in index])
    assert (ours_T - theirs_T).abs().mean() < EQUAL < 1e-2 < (before_T - theirs_T).abs().mean()


def test_a_kl_over_the_vocabulary_sees(model: Path, seen: Seen) -> None:
    """By the hidden states of a reference with other weights: as computed by hand of the library's distributions."""
    policy, reference, index = _policy(model, seen), _policy(model, seen), [*range(len(PROMPTS))]
    lms = library_model(model), library_model(model)
    with torch.no_grad():
        for one in (reference.lm, lms[1]):
            one.get_submodule("model.language_model.layers.0.mlp.down_proj").weight.mul_(1.5)
        batch = pack(seen.rows(), index, CPU)
        head = Head(reference.head.weight.detach(), None)
        kl_T = policy(batch, 1.0, Reference(batch.distinct(reference.hidden(batch)), *head))[2]
        ours, theirs = ([library_distributions(lm, seen, row) for row in index] for lm in lms)
    wanted_T = torch.cat([(p_TV.exp() * (p_TV - q_TV)).sum(-1) for p_TV, q_TV in zip(ours, theirs, strict=True)])
    assert (kl_T - wanted_T).abs().max() < EQUAL < 1e-2 < wanted_T.max()


def test_a_row_of_text_is_as_in_a_file_without_images(model: Path, seen: Seen) -> None:
    policy, row = _policy(model, seen), PROMPTS.index(())
    text = Rows(seen.prompts, seen.responses, seen.rows().mask, {})
    with torch.no_grad():
        assert torch.allclose(_logprobs(policy, text, [row]), _logprobs(policy, seen.rows(), [row]), atol=1e-6)


def test_the_warm_up_trains_an_encoder_that_learns(model: Path) -> None:
    """As a rank loads the model for it. Control: one that rests."""
    for learns in (True, False):
        models = RankModels(0, 1, CPU)
        asked = ModelToTrain(str(model), "float32", SftConfig().model_dump(mode="json"), 0, train_encoder=learns)
        lm = models.causal_lm(asked.folder, _settings(models, asked))
        assert {value.requires_grad for name, value in lm.named_parameters() if "visual" in name} == {learns}


def test_deeper_levels_may_come_in_one_piece(model: Path, seen: Seen) -> None:
    """As transformers 5.17 has them: 5.19 has them image by image. Control: with tokens in another order."""
    sight = sight_of(load_causal_lm(model, torch.float32, False).base_model, seen.folder)
    assert sight is not None
    digests = seen.images.values_T.reshape(-1, NUMBERS)[:, 0].tolist()
    wanted_LFH, apart = sight._looked_at(digests), sight._lm.get_image_features

    def in_one(*given: torch.Tensor, swapped: bool = False) -> Any:
        found = apart(*given)
        if levels := getattr(found, "deepstack_features", None):
            found.deepstack_features = [torch.cat([*of_images]) for of_images in levels]
        if swapped:
            found.pooler_output = torch.cat([*found.pooler_output]).roll(1, 0)
        return found

    with patch.object(sight._lm, "get_image_features", in_one):
        assert torch.equal(sight._looked_at(digests), wanted_LFH)
    with patch.object(sight._lm, "get_image_features", partial(in_one, swapped=True)):
        assert not torch.equal(sight._looked_at(digests), wanted_LFH)


def test_the_estimate_counts_the_features_that_are_kept() -> None:
    """It imports no torch, so it has a number of its own, and it has to follow this one."""
    assert FEATURES == KEPT_BYTES


def test_an_image_that_reaches_beyond_its_prompt_is_noticed(seen: Seen) -> None:
    short = Ragged.of([seen.prompts.row(0)[:4]], np.int32)
    with pytest.raises(ValueError, match="more tokens than are left"):
        with_images(short, seen.images.take(np.asarray([0])))

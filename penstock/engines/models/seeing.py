"""What a decoder gets of images: features of a frozen encoder in place of embeddings, once for each distinct image.

The encoder does not change as long as a run lasts, so what it made of an image is kept, up to `KEPT_BYTES`.

Suffixes: `_NH` tokens of a run x hidden size, `_FH` tokens of an image x hidden size, `_PD` patches x their pixels.
Left out: training the encoder.
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.base.recent import Recent
from penstock.data.images import ImageFolder
from penstock.engines.batches.packing import PackedBatch
from penstock.engines.families.table import family_of

KEPT_BYTES = 256 << 20


class Sight:
    """The encoder of a model and the images that its rows name.

    Args:
        lm: a model that sees; its encoder is frozen.
        folder: where the images are; None: no row names any.
    """

    def __init__(self, lm: Any, folder: ImageFolder | None) -> None:
        self._lm, self._folder = lm, folder
        self._features = Recent(self._made, lambda features_FH: int(features_FH.nbytes), KEPT_BYTES)

    def inputs(self, batch: PackedBatch) -> dict[str, torch.Tensor]:
        """Return what the decoder is called with: embeddings [1, N, H] and positions [3, 1, N]."""
        embedded_NH = self._lm.get_input_embeddings()(batch.tokens_N.clamp(min=0))
        if batch.images is None:
            return {"inputs_embeds": embedded_NH[None], "position_ids": batch.positions_N.expand(3, 1, -1)}
        images = batch.images
        if images.digests:
            features_FH = torch.cat([self._features(digest) for digest in images.digests]).to(embedded_NH.dtype)
            embedded_NH = embedded_NH.index_copy(0, images.at_M, features_FH.index_select(0, images.feature_M))
        return {"inputs_embeds": embedded_NH[None], "position_ids": images.positions_3N[:, None]}

    @torch.no_grad()
    def _made(self, digest: int) -> torch.Tensor:
        if self._folder is None:
            raise RuntimeError("rows name images, and this model was not told where they are")
        pixels_PD, grid = self._folder.pixels(digest)
        device = next(self._lm.parameters()).device
        given = torch.from_numpy(pixels_PD).to(device), torch.tensor([grid], device=device)
        features_FH: torch.Tensor = self._lm.get_image_features(*given).pooler_output[0]
        return features_FH


def decoder_of(lm: Any) -> Any:
    """Return the part of a language model that runs over tokens: of one that sees its decoder."""
    family = family_of(lm.config.model_type)
    return lm.get_submodule(family.language) if family.encoder else lm.base_model


def freeze_encoder(lm: Any) -> None:
    """Keep the encoder of a model that sees from being trained."""
    family = family_of(lm.config.model_type)
    if family.encoder:
        lm.get_submodule(family.encoder).requires_grad_(False)


def frozen_encoder(lm: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the weights of the encoder that stays as it is, by their names in the model; none without images."""
    family = family_of(lm.config.model_type)
    if not family.encoder:
        return {}
    return {name: value.to(dtype) for name, value in lm.state_dict().items() if name.startswith(f"{family.encoder}.")}

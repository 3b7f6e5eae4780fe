"""What a decoder gets of images: features of an encoder in place of embeddings, once for each distinct image of a run.

An encoder that rests makes the same of an image as long as a run lasts, so that is kept, up to `KEPT_BYTES`. One that
is trained looks at the images of every run of tokens anew, and learns from what the decoder made of them.

Some decoders read images again behind their first layers, each time other features of them (DeepStack, arXiv
2406.04334): then an image's features have several levels, of which the first are embeddings.

Suffixes: `_NH` tokens of a run x hidden size, `_LFH` levels x tokens of images x hidden size, `_PD` patches x their
pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from penstock.base.recent import Recent
from penstock.data.images import ImageFolder
from penstock.engines.batches.packing import PackedBatch, to_device
from penstock.engines.families.table import family_of

KEPT_BYTES = 256 << 20


class Sight:
    """The encoder of a model and the images that its rows name.

    Args:
        lm: a model that sees, with its head or without.
        folder: where the images are; None: no row names any.
    """

    def __init__(self, lm: Any, folder: ImageFolder | None) -> None:
        self._lm, self._folder = lm, folder
        encoder = _part(lm, family_of(lm.config.model_type).encoder)
        self._trained = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
        self._features = Recent(self._made, lambda features_LFH: int(features_LFH.nbytes), KEPT_BYTES)

    def inputs(self, batch: PackedBatch) -> dict[str, Any]:
        """Return what the decoder is called with: embeddings [1, N, H], positions [3, 1, N], images' deeper levels."""
        embedded_NH = self._lm.get_input_embeddings()(batch.tokens_N.clamp(min=0))
        images, deeper = batch.images, dict[str, Any]()
        if images is None or not images.digests:
            embedded_NH = self._with_no_image(embedded_NH)
        else:
            features_LFH = self._seen(images.digests).to(embedded_NH.dtype).index_select(1, images.feature_M)
            embedded_NH = embedded_NH.index_copy(0, images.at_M, features_LFH[0])
            if len(features_LFH) > 1:
                seen_N = torch.zeros(len(embedded_NH), dtype=torch.bool, device=embedded_NH.device)
                seen_1N = seen_N.index_fill(0, images.at_M, True)[None]
                deeper = {"visual_pos_masks": seen_1N, "deepstack_visual_embeds": [*features_LFH[1:]]}
        positions_3N = batch.positions_N.expand(3, -1) if images is None else images.positions_3N
        return {"inputs_embeds": embedded_NH[None], "position_ids": positions_3N[:, None], **deeper}

    def _seen(self, digests: Sequence[int]) -> torch.Tensor:
        """Return features_LFH of images, one after the other."""
        if self._trained:
            return self._looked_at(digests)
        return torch.cat([self._features(digest) for digest in digests], dim=1)

    @torch.no_grad()
    def _made(self, digest: int) -> torch.Tensor:
        return self._looked_at([digest])

    def _looked_at(self, digests: Sequence[int]) -> torch.Tensor:
        if self._folder is None:
            raise RuntimeError("rows name images, and this model was not told where they are")
        pixels, grids = zip(*map(self._folder.pixels, digests), strict=True)
        device = next(self._lm.parameters()).device
        given = (to_device(array, device) for array in (np.concatenate(pixels), np.asarray(grids)))
        found = self._lm.get_image_features(*given)
        levels = [found.pooler_output, *(getattr(found, "deepstack_features", None) or [])]
        return torch.stack([_together(of_images) for of_images in levels])

    def _with_no_image(self, embedded_NH: torch.Tensor) -> torch.Tensor:
        """Give a trained encoder gradients of zero: ranks sum theirs up, and another rank's tokens may have images."""
        if not self._trained or not torch.is_grad_enabled():
            return embedded_NH
        return embedded_NH + 0 * torch.stack([weight.view(-1)[0] for weight in self._trained]).sum()


def _together(of_images: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a level's features one image after the other: transformers 5.17 has them so, 5.19 image by image."""
    return of_images if isinstance(of_images, torch.Tensor) else torch.cat([*of_images])


def sight_of(lm: Any, folder: ImageFolder | None) -> Sight | None:
    """Return what a model makes of images; None if it sees none."""
    return Sight(lm.base_model, folder) if family_of(lm.config.model_type).encoder else None


def decoder_of(lm: Any) -> Any:
    """Return the part of a language model that runs over tokens: of one that sees its decoder."""
    family = family_of(lm.config.model_type)
    return _part(lm, family.language) if family.encoder else lm.base_model


def _part(lm: Any, name: str) -> Any:
    """Return a part by its name in the whole language model, also of one without its head."""
    return lm.base_model.get_submodule(name.partition(".")[2])


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

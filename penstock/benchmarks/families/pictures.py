"""Pictures for the benchmark's models that see: each prompt has one of noise, of four tokens, in place of its middle.

Left out: what is measured with them (measuring.py).
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.base.ragged import Ragged
from penstock.data.images import ImageFolder
from penstock.engines.families.images import sees
from penstock.state.experience import IMAGES, add_columns, read_columns

AT, SIDE = 2, 2  # its first token, and its rows and columns of tokens


@dataclass(frozen=True)
class Pictures:
    """Where the pictures of a model are kept, and the tokens that stand for one."""

    kept: ImageFolder
    place: Path
    settings: Mapping[str, Any]

    @property
    def words(self) -> int:
        """Tokens below the model's special ones, which stand for images and belong in no response."""
        names = ("image", "video", "vision_start", "vision_end")
        return int(min(self.settings[f"{name}_token_id"] for name in names))

    def put(self, prompts: Ragged) -> tuple[Ragged, Ragged]:
        """Return prompts of eight tokens or more with a picture each, the same for the same prompt, and its numbers."""
        rows, numbers = [], []
        for row in range(len(prompts)):
            tokens, images = self._with_picture(prompts.row(row).copy())
            rows.append(tokens)
            numbers.append(images)
        return Ragged.of(rows, np.int32), Ragged.of(numbers, np.int64)

    def put_into(self, path: Path) -> None:
        """Give the prompts of an experience file pictures."""
        prompts, images = self.put(read_columns(path, ["prompt_tokens"])["prompt_tokens"])
        add_columns(path, {"prompt_tokens": prompts, IMAGES: images})

    def _with_picture(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        digest, rows, columns = self.kept.keep(self._picture(int(tokens.sum())))
        end = AT + rows * columns
        tokens[AT:end] = self.settings["image_token_id"]
        tokens[AT - 1], tokens[end] = self.settings["vision_start_token_id"], self.settings["vision_end_token_id"]
        return tokens, np.asarray((digest, AT, rows, columns))

    def _picture(self, seed: int) -> bytes:
        from PIL import Image

        side = SIDE * self.kept.pixels_of_token
        pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
        written = io.BytesIO()
        Image.fromarray(pixels).save(written, "PNG")
        return written.getvalue()


def pictures_for(folder: Path, settings: Mapping[str, Any], work: Path) -> Pictures | None:
    """Return pictures for a model that sees, kept in a folder beside its work; None for one that sees none."""
    place = work / "images"
    return Pictures(ImageFolder(place, str(folder)), place, settings) if sees(settings) else None

"""Images of data rows: looked at before anything starts, kept in the run folder, opened by the ranks that need them.

A row names an image by a path with a suffix, from the data file if it is relative, or has its bytes in base64 (without
a full stop in it). It is kept under its digest, as it is. No address of a network is followed: an image is there before
a run begins. What becomes of the pixels, and how many tokens an image has, the image processor of the model's folder
says; trainer and rollout engine get the same pixels.

Left out: videos; where images stand in a prompt (penstock/data/prompts.py).
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from penstock.base.errors import UserError
from penstock.base.files import replacing
from penstock.base.interrupts import interrupts_deferred
from penstock.base.recent import Recent
from penstock.data.rows import place, require_columns

KEPT_BYTES = 256 << 20  # of images whose pixels a process keeps
FORMATS = ("PNG", "JPEG", "WEBP")  # others start programs of their own
REMEDY = "give a PNG, JPEG or WebP file, by its path beside the data file or as base64"


class ImageFolder:
    """The images of a run, by their digests.

    Args:
        folder: where they are kept; made with the first one.
        model_folder: has the image processor.
    """

    def __init__(self, folder: Path, model_folder: str) -> None:
        with interrupts_deferred():
            from transformers import AutoImageProcessor

        self._folder, self._model = folder, Path(model_folder)
        self._processor: Any = AutoImageProcessor.from_pretrained(
            model_folder, local_files_only=True, trust_remote_code=False
        )
        self._recent = Recent(self._pixels, lambda made: made[0].nbytes, KEPT_BYTES)

    def token(self) -> int:
        """Return the token that stands for an image in a prompt, which the model's configuration names."""
        settings = json.loads((self._model / "config.json").read_text(encoding="utf-8"))
        return int(settings["image_token_id"])

    @property
    def merged(self) -> int:
        """How many patches, along each side, become one token."""
        return int(self._processor.merge_size)

    @property
    def pixels_of_token(self) -> int:
        """How many pixels, along each side, become one token."""
        return self.merged * int(self._processor.patch_size)

    def keep(self, content: bytes) -> tuple[int, int, int]:
        """Keep an image; return its digest (63 bits of SHA-256), and how many rows and columns of tokens it has."""
        digest = _digest(content)
        if not (path := self._path(digest)).exists():
            with replacing(path, durable=False) as aside:  # nobody waits thousands of times for the disk:
                aside.write_bytes(content)  # what a power cut took is noticed when it is read
        _, (_, rows, columns) = self.pixels(digest)
        return digest, rows // self.merged, columns // self.merged

    def pixels(self, digest: int) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Return patches x pixels in float32, and the grid of patches: images in time (1), rows, columns.

        Raises:
            UserError: the file is missing, or not what was kept.
        """
        return self._recent(digest)

    def _pixels(self, digest: int) -> tuple[np.ndarray, tuple[int, int, int]]:
        path = self._path(digest)
        content = path.read_bytes() if path.is_file() else b""
        if _digest(content) != digest:
            raise UserError(f"{path} is missing or damaged", "start a new run, which keeps its images anew")
        made = self._processor(images=[opened(content)], return_tensors="np")
        time, rows, columns = (int(count) for count in made["image_grid_thw"][0])
        return np.asarray(made["pixel_values"], np.float32), (time, rows, columns)

    def _path(self, digest: int) -> Path:
        return self._folder / f"{digest:016x}"


def read_images(frame: pd.DataFrame, column: str, source: Path | str) -> Iterator[list[bytes]]:
    """Yield the images of every row, each of which Pillow can open; all of them may be more than memory holds.

    Raises:
        UserError: the column is absent or no list of texts; an image is missing, too large or none (names the row).
    """
    require_columns(frame, [column], source)
    for row, value in enumerate(frame[column]):
        yield _of_row(value, place(source, row), Path(source).parent, column)


def check_images(frame: pd.DataFrame, column: str, source: Path | str) -> None:
    """Raises what `read_images` raises."""
    for _ in read_images(frame, column, source):
        pass


def opened(content: bytes) -> Any:
    """Return an image, decoded, in RGB.

    Raises:
        OSError: it is none, or damaged.
        Image.DecompressionBombError, Image.DecompressionBombWarning: it has more pixels than Pillow's limit.
    """
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        return Image.open(io.BytesIO(content), formats=FORMATS).convert("RGB")


def _of_row(value: Any, where: str, folder: Path, column: str) -> list[bytes]:
    names = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{where}: '{column}' is no list of images", 'write ["PATH", ...], or [] where there is none')
    return [_image(name, where, folder) for name in names]


def _image(name: str, where: str, folder: Path) -> bytes:
    from PIL import Image

    what = name if len(name) < 100 else "an image in base64"
    if "://" in name:
        raise UserError(f"{where}: {what} is an address, and no network is asked for images", REMEDY)
    try:
        content = _read(folder / name, where) if "." in name else base64.b64decode(name, validate=True)
    except ValueError:  # binascii's own, a letter beyond ASCII, a null byte
        raise UserError(f"{where}: {what} is neither a path with a suffix nor base64", REMEDY) from None
    except OSError as error:
        raise UserError(f"{where}: {folder / name} cannot be read: {error.strerror}", REMEDY) from None
    try:
        opened(content)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UserError(f"{where}: {what} is too large: {error}", "make it smaller") from None
    except (OSError, ValueError, SyntaxError) as error:
        raise UserError(f"{where}: {what} is no image that can be read: {error}", REMEDY) from None
    return content


def _read(path: Path, where: str) -> bytes:
    if path.exists() and not path.is_file():  # a device or a pipe has no end
        raise UserError(f"{where}: {path} is no file", REMEDY)
    return path.read_bytes()


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") >> 1


def names_in_run(numbers: np.ndarray) -> list[str]:
    """Return where images lie in a run folder, by what `placed` says of them."""
    return [f"data/images/{digest:016x}" for digest in numbers.reshape(-1, 4)[:, 0].tolist()]


def placed(
    tokens: np.ndarray, image_token: int, images: Sequence[tuple[int, int, int]], where: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return a prompt in which each image has as many tokens as it needs, and four numbers of each of its images.

    They are the digest, the token at which it begins, and its rows and columns of tokens.

    Args:
        tokens: of the prompt, with one image token for each image.
        images: digest, rows and columns of each.

    Raises:
        UserError: the prompt has not one image token for each image.
    """
    at = np.flatnonzero(tokens == image_token)
    if len(at) != len(images):
        raise UserError(
            f"{where}: the prompt has a place for {len(at)} images, and the row has {len(images)}",
            'put {"type": "image"} into its messages for each, or into data.template what stands for an image',
        )
    counts = np.ones(len(tokens), np.int64)
    counts[at] = [rows * columns for _, rows, columns in images]
    begins = np.concatenate([[0], np.cumsum(counts)])[:-1][at]
    numbers = [(digest, begin, rows, columns) for (digest, rows, columns), begin in zip(images, begins, strict=True)]
    return np.repeat(tokens, counts), np.asarray(numbers, np.int64).reshape(-1)

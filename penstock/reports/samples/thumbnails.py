"""Images of prompts, small, inside of a page: it stays one file, and that file stays small.

Images lie in the run folder under their digests (penstock/data/images.py). A picture that is gone, damaged or too much
for the page is named, so that whoever reads the page can look for it in the run folder.

Left out: images as large as they are; what the model's image processor makes of them.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.data.images import opened
from penstock.state.run_folder import RunFolder

SIDE = 112  # pixels of the longer side
PAGE_BYTES = 2 << 20  # of all pictures of a page, as they stand in it
SMALLEST = 512  # bytes: with less left no file is opened
NAME = re.compile(r"data/images/[0-9a-f]{16}")  # of an image in a run folder


@dataclass(frozen=True)
class Thumbnail:
    """A picture as a page has it; `uri` is empty where there is none."""

    name: str
    uri: str


class Thumbnails:
    """The pictures of one page.

    Args:
        run: whose images they are.
        most: bytes of all of them.
    """

    def __init__(self, run: RunFolder, most: int = PAGE_BYTES) -> None:
        self._run, self._left = run, most
        self._made: dict[str, str] = {}

    def __call__(self, names: Sequence[str]) -> list[Thumbnail]:
        """Return the pictures of a prompt, by the names of its images in the run folder."""
        return [Thumbnail(name, self._within(name)) for name in names]

    def _within(self, name: str) -> str:
        if self._left < SMALLEST or not NAME.fullmatch(name):
            return ""
        if name not in self._made:
            self._made[name] = _data_uri(self._run.path / name)
        uri = self._made[name]
        if len(uri) > self._left:
            return ""
        self._left -= len(uri)
        return uri


def _data_uri(path: Path) -> str:
    """Return the image of a file as a small JPEG in a data URI; empty if the file holds none."""
    from PIL import Image

    try:
        image = opened(path.read_bytes())
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning):
        return ""
    image.thumbnail((SIDE, SIDE))
    written = io.BytesIO()
    image.save(written, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(written.getvalue()).decode("ascii")

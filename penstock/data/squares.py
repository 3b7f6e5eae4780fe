"""Pictures of one to four bright squares, made from a seed; the question is how many: a task for a model that sees.

Squares lie in different cells of a grid, a little off their middle, and are not equally bright. The examples for
supervised training may come from a careless teacher, who miscounts a share of them. Pictures are rows like any others:
PNG files in base64.

Suffix: `_N` pictures. Left out: an end of the pictures: there are more of them than anyone could train on, so splits
are drawn and not dealt out.
"""

from __future__ import annotations

import base64
import io

import numpy as np
import pandas as pd

from penstock.configs.sections.data import SquaresData

MOST = 4  # squares of a picture
SIDE, CELL, SQUARE = 56, 14, 10  # pixels of a picture, of a cell and of a square
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"  # of the picture in the prompt
SQUARE_COLUMNS = ("prompt", "images", "answer", "response")


def make_pictures(config: SquaresData, seed: int) -> dict[str, pd.DataFrame]:
    """Return the rows of "sft", "train" and "heldout": prompt, image, answer and the teacher's response."""
    counts = {"sft": config.sft, "train": config.train, "heldout": config.heldout}
    frames = {split: _rows(count, seed, number) for number, (split, count) in enumerate(counts.items())}
    frames["sft"]["response"] = _careless(frames["sft"]["answer"], config.mistakes, seed)
    return frames


def _rows(count: int, seed: int, split: int) -> pd.DataFrame:
    cells = (SIDE // CELL) ** 2
    draws_N = _draws(count * (1 + 4 * cells), seed, split).reshape(count, -1)
    squares_N = (1 + draws_N[:, 0] % MOST).astype(np.int64)
    pictures = [_png(row[1:].reshape(4, cells), squares) for row, squares in zip(draws_N, squares_N, strict=True)]
    answers = [str(squares) for squares in squares_N.tolist()]
    return pd.DataFrame(
        {
            "prompt": [f"{PLACE}="] * count,
            "images": [[picture] for picture in pictures],
            "answer": answers,
            "response": [f"{answer}." for answer in answers],
        }
    )


def _png(drawn: np.ndarray, squares: int) -> str:
    """Return a picture; of each cell `drawn` says in which order it is taken, its square's offsets and brightness."""
    from PIL import Image

    pixels = np.zeros((SIDE, SIDE, 3), np.uint8)
    order, down, right, light = drawn
    for cell in np.argsort(order, kind="stable")[:squares].tolist():
        top, left = (CELL * place for place in divmod(cell, SIDE // CELL))
        top += int(down[cell] % (CELL - SQUARE + 1))
        left += int(right[cell] % (CELL - SQUARE + 1))
        pixels[top : top + SQUARE, left : left + SQUARE] = 200 + int(light[cell] % 56)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return base64.b64encode(written.getvalue()).decode("ascii")


def _careless(answers: pd.Series[str], share: float, seed: int) -> list[str]:
    """Return the teacher's responses: a `share` of them, in expectation, has another count."""
    draws = _draws(2 * len(answers), seed, split=3).reshape(2, -1)
    wrong_N = draws[0] % 1000 < round(1000 * share)
    off_N = (1 + draws[1] % (MOST - 1)).astype(np.int64)
    told = [1 + (int(answer) - 1 + int(off)) % MOST for answer, off in zip(answers, off_N * wrong_N, strict=True)]
    return [f"{squares}." for squares in told]


def _draws(count: int, seed: int, split: int) -> np.ndarray:
    """Return random words that are the same under every version of NumPy."""
    return np.random.PCG64(np.random.SeedSequence([seed, 3, split])).random_raw(count)

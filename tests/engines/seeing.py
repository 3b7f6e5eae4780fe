"""Tiny models that see, pictures, and rows that name them, for tests; and what the library makes of a row."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig

from penstock.base.ragged import Ragged
from penstock.configs.sections.model import TinyEncoder, TinyModel
from penstock.data.images import ImageFolder, placed
from penstock.data.tokenizer import load_tokenizer, make_byte_tokenizer
from penstock.engines.batches.images import NUMBERS, with_images
from penstock.engines.batches.packing import Rows
from penstock.engines.families.tiny import SPECIAL
from penstock.engines.models.tiny import make_tiny_model

SEEING = ("qwen2_5_vl", "qwen3_vl")
TINY = TinyModel(
    hidden_size=64,
    heads=2,
    kv_heads=1,
    layers=2,
    intermediate_size=96,
    max_positions=256,
    tie_embeddings=False,
    encoder=TinyEncoder(hidden_size=32),
)
SIZES = ((56, 56), (56, 56), (28, 84), (140, 252))  # pixels: 4, 4, 3 and 45 tokens, the last of several windows
PROMPTS = ((0,), (0,), (1,), (), (2, 0), (3,))  # pictures of each prompt


def write_seeing_model(folder: Path, family: str = "qwen2_5_vl") -> Path:
    """Write a tiny model of one of `SEEING` with random weights, wide enough that every wrong one shows."""
    folder.mkdir(parents=True)
    vocabulary = make_byte_tokenizer(folder, special=[*SPECIAL.values()])
    tokenizer = load_tokenizer(str(folder))
    special = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in SPECIAL.items()}
    ends = tokenizer.eos_token_id, tokenizer.pad_token_id
    make_tiny_model(folder, TINY, vocabulary, *ends, 0, special)
    if family == "qwen3_vl":
        _write_qwen3_vl(folder, vocabulary, *ends, special)
    return folder


def _write_qwen3_vl(folder: Path, vocabulary: int, eos: int, pad: int, special: dict[str, int]) -> None:
    """Write a Qwen3-VL in place of the model in a folder: two levels of images, as many as layers in the decoder."""
    decoder = {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "initializer_range": 64**-0.5,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "bos_token_id": None,
    }
    encoder = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 14,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 128**-0.5,
    }
    config = AutoConfig.for_model("qwen3_vl", text_config=decoder, vision_config=encoder, **special)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for name, values in model.named_parameters():
            if values.ndim == 1 or "pos_embed" in name:  # norms of 1 and biases of 0 would hide wrong ones
                values.data.add_(torch.randn_like(values), alpha=0.2)
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad)
    model.save_pretrained(folder)


@dataclass(frozen=True)
class Seen:
    """Rows with images before anything is made of them.

    `images`: four numbers of each image of a prompt.
    """

    folder: ImageFolder
    kept_in: Path
    prompts: Ragged
    images: Ragged
    responses: Ragged

    def rows(self) -> Rows:
        """As a rank has them, each token counting, with advantages."""
        prompts, tokens = with_images(self.prompts, self.images)
        mask = Ragged(np.ones(len(self.responses.values_T), np.uint8), self.responses.offsets_B1)
        return Rows(prompts, self.responses, mask, {}, images=tokens)


def picture(size: tuple[int, int], seed: int) -> bytes:
    """A PNG of noise; height and width in pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return written.getvalue()


def seen_rows(model: Path, kept_in: Path, seed: int = 0) -> Seen:
    """Rows of `PROMPTS`, the first two alike, with random responses; `seed` makes other pictures and responses."""
    folder, token = ImageFolder(kept_in, str(model)), ImageFolder(kept_in, str(model)).token()
    kept = [folder.keep(picture(size, 10 * seed + number)) for number, size in enumerate(SIZES)]
    rows = []
    for pictures in PROMPTS:
        tokens = np.asarray([5, *(part for _ in pictures for part in (52, token, 53, 7)), 9, 11], np.int32)
        rows.append(placed(tokens, token, [kept[number] for number in pictures], "here"))
    random = np.random.default_rng(seed)
    responses = Ragged.of([random.integers(3, 50, length) for length in (3, 5, 4, 6, 2, 7)], np.int32)
    prompts, images = Ragged.of([row for row, _ in rows], np.int32), Ragged.of([of for _, of in rows], np.int64)
    return Seen(folder, kept_in, prompts, images, responses)


def library_model(folder: Path) -> Any:
    """The library's own class of a folder's model, in float32, with PyTorch's attention."""
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, local_files_only=True)


def library_logprobs(lm: Any, seen: Seen, row: int) -> torch.Tensor:
    """Log-probs_T of a row's response, by the library alone."""
    targets_T = torch.from_numpy(seen.responses.row(row).astype(np.int64))
    return library_distributions(lm, seen, row).gather(-1, targets_T[:, None])[:, 0]


def library_distributions(lm: Any, seen: Seen, row: int) -> torch.Tensor:
    """Log-probs_TV of all tokens at the places of a row's response."""
    states_TH = library_states(lm, seen, row)
    logprobs_TV: torch.Tensor = lm.lm_head(states_TH).log_softmax(-1)
    return logprobs_TV


def library_states(lm: Any, seen: Seen, row: int) -> torch.Tensor:
    """Last hidden states_TH that predict a row's response; the library finds the positions, and where images go."""
    tokens = torch.from_numpy(np.concatenate([seen.prompts.row(row), seen.responses.row(row)]).astype(np.int64))[None]
    given: dict[str, Any] = {}
    if digests := seen.images.row(row).reshape(-1, NUMBERS)[:, 0].tolist():
        pixels, grids = zip(*map(seen.folder.pixels, digests), strict=True)
        given = {
            "pixel_values": torch.from_numpy(np.concatenate(pixels)),
            "image_grid_thw": torch.tensor(grids),
            "mm_token_type_ids": (tokens == lm.config.image_token_id).int(),
        }
    length = len(seen.responses.row(row))
    states_TH: torch.Tensor = lm.model(input_ids=tokens, **given).last_hidden_state[0, -length - 1 : -1]
    return states_TH

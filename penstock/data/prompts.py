"""Prompts as the model gets them: templates applied, tokenised once, kept with the row's own columns.

A prompt is plain text (with the special tokens the tokenizer adds, a BOS for instance), or chat, where the chat
template writes every special token itself and the tokenizer must not add a second BOS.

Left out: the order in which prompts are taken (penstock/data/order.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.base.errors import UserError
from penstock.configs.sections.data import DataConfig
from penstock.data.chat import behind_the_last_message, reads, rendered
from penstock.data.images import ImageFolder, placed, read_images
from penstock.data.rows import place, require_columns, require_filled, to_frame
from penstock.state.digests import marked

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IMAGES_OF_PROMPT = "prompt_images"
RESERVED = ("prompt_id", "prompt_text", "prompt_tokens", IMAGES_OF_PROMPT)
DROPPED, CUT = b"penstock.dropped", b"penstock.cut"
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class PromptTable:
    """Tokenised prompts.

    Attributes:
        frame: `prompt_id` (split and row of the source file, `train-000017`: the same in every epoch and every run of
            that file), `prompt_text` (exactly what was tokenised), `prompt_tokens` (int32 arrays), then the source's
            own columns under their own names. Where prompts may have images `prompt_images` has four numbers of each
            of them (penstock/data/images.py).
        dropped: prompts left out because they are too long.
        cut: prompts of which something is left out because they are too long.
    """

    frame: pd.DataFrame
    dropped: int
    cut: int = 0

    def __len__(self) -> int:
        return len(self.frame)

    @property
    def columns(self) -> list[str]:
        """The prompt id, and the source's own columns."""
        return ["prompt_id", *(name for name in self.frame.columns if name not in RESERVED)]

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return the source's own columns of every prompt, by prompt id."""
        records = self.frame[self.columns].to_dict("records")
        return {str(record.pop("prompt_id")): record for record in records}  # type: ignore[misc]

    def save(self, path: Path) -> None:
        """Write the table as Parquet, atomically."""
        table = pa.Table.from_pandas(self.frame, preserve_index=False)
        tokens = pa.array(self.frame["prompt_tokens"], pa.list_(pa.int32()))
        table = table.set_column(table.column_names.index("prompt_tokens"), "prompt_tokens", tokens)
        with marked(path) as aside:
            counts = {DROPPED: str(self.dropped), CUT: str(self.cut)}
            pq.write_table(table.replace_schema_metadata(counts), aside)

    @classmethod
    def load(cls, path: Path) -> PromptTable:
        """Read what `save` wrote."""
        table = pq.read_table(path)
        counts = table.schema.metadata
        return cls(to_frame(table), int(counts[DROPPED]), int(counts.get(CUT, 0)))


def tokenize_prompts(
    frame: pd.DataFrame,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    split: str,
    tools: Tools | None = None,
    images: ImageFolder | None = None,
) -> PromptTable:
    """Return the prompts of a split; those above `config.max_prompt_tokens` are dropped or cut, and counted.

    With tools a prompt ends within its last message, to which an environment may add
    (penstock/engines/rollout/chat.py).

    Args:
        frame: rows in the order of their file (see `penstock.data.rows.read_rows`).
        config: which column, which template, which limit.
        tokenizer: the actor's.
        split: `train` or `heldout`: the beginning of every prompt id, and the key of the file in `config`.
        tools: what the chat template is told of tools; None: there are none.
        images: where those of the rows are kept; None: they have none.

    Raises:
        UserError: the column is absent or a prompt is empty, a column has a reserved name, a chat template is needed
            and absent, or every prompt is too long; the end of chats would be cut off.
    """
    source = getattr(config, split, None) or f"the {split} data"
    refuse_reserved(frame, source)
    texts, tokens = encode_prompts(frame, config.prompt, config, tokenizer, source, tools, is_open=tools is not None)
    seen = {} if images is None else {IMAGES_OF_PROMPT: place_images(frame, tokens, config, images, source)}
    lengths = np.fromiter((len(row) for row in tokens), dtype=np.int64, count=len(tokens))
    kept, cut = lengths <= config.max_prompt_tokens, 0
    if config.too_long != "drop":
        chats = is_templated(frame, config)
        refuse_cut_end(config, source, chats)
        cut = cut_too_long(texts, tokens, config, tokenizer, chats)
        kept = np.ones(len(tokens), bool)
    if not kept.any():
        raise UserError(
            f"every prompt of {source} is longer than data.max_prompt_tokens ({config.max_prompt_tokens}): "
            f"the shortest has {lengths.min()} tokens",
            f"set data.max_prompt_tokens to {lengths.max()} to keep them all",
        )
    own = {
        "prompt_id": [f"{split}-{row:06d}" for row in range(len(frame))],
        "prompt_text": texts,
        "prompt_tokens": tokens,
        **seen,
    }
    table = pd.concat([pd.DataFrame(own), frame.reset_index(drop=True)], axis=1)
    return PromptTable(table[kept].reset_index(drop=True), int((~kept).sum()), cut)


def place_images(
    frame: pd.DataFrame,
    tokens: list[np.ndarray],
    config: DataConfig,
    images: ImageFolder,
    source: Path | str,
) -> list[np.ndarray]:
    """Keep the images of all rows and make room for them in the prompts, in place; return their numbers, row by row.

    Raises:
        UserError: an image cannot be read, or a prompt has not one place for each of its row.
    """
    column, image_token = str(config.image_column), images.token()
    numbers = []
    for row, contents in enumerate(read_images(frame, column, source)):
        try:
            kept = [images.keep(content) for content in contents]
        except ValueError as error:  # of other shapes than the model takes
            why = f"{place(source, row)}: the model's image processor refuses an image: {error}"
            raise UserError(why, "crop or resize it") from error
        tokens[row], of_row = placed(tokens[row], image_token, kept, place(source, row))
        numbers.append(of_row)
    return numbers


def is_templated(frame: pd.DataFrame, config: DataConfig) -> bool:
    """Whether a chat template writes the special tokens of a split's prompts."""
    return config.chat or not isinstance(frame[config.prompt].iloc[0], str)


def cut_too_long(
    texts: list[str], tokens: list[np.ndarray], config: DataConfig, tokenizer: PreTrainedTokenizerBase, chats: bool
) -> int:
    """Cut prompts that are longer than `config.max_prompt_tokens` to that, in place; return how many.

    Args:
        texts: get the text of the tokens that are left.
        chats: a chat template wrote all special tokens; else those that the tokenizer puts before a text stay.
    """
    before = [] if chats else list(tokenizer("")["input_ids"])
    long = [row for row, ids in enumerate(tokens) if len(ids) > config.max_prompt_tokens]
    for row in long:
        kept = len(os.path.commonprefix([before, tokens[row].tolist()]))
        tokens[row] = shortened(tokens[row], config.max_prompt_tokens, config.too_long, kept)
        texts[row] = str(tokenizer.decode(tokens[row][kept:]))
    return len(long)


def shortened(tokens_T: np.ndarray, most: int, where: str, kept: int = 0) -> np.ndarray:
    """Return `most` tokens of a longer prompt, of which the first `kept` stay.

    Args:
        where: the others are cut out: `left` at the beginning, in the `middle`, `right` at the end.
    """
    head = min(most, {"left": kept, "middle": max(kept, most // 2), "right": most}[where])
    return np.concatenate([tokens_T[:head], tokens_T[len(tokens_T) - (most - head) :]])


def refuse_reserved(frame: pd.DataFrame, source: Path | str) -> None:
    """Check that no column has the name of one that `PromptTable` adds.

    Raises:
        UserError: one has.
    """
    if taken := [name for name in RESERVED if name in frame.columns]:
        raise UserError(f"{source} has a column '{taken[0]}', a name Penstock uses itself", "rename that column")


def encode_prompts(
    frame: pd.DataFrame,
    column: str,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    source: Path | str,
    tools: Tools | None = None,
    is_open: bool = False,
) -> tuple[list[str], list[np.ndarray]]:
    """Return the exact text and the tokens (int32) of every row's prompt.

    Args:
        tools: as for `tokenize_prompts`.
        is_open: leave out what closes the last message and begins the model's.

    Raises:
        UserError: as for `tokenize_prompts`.
    """
    require_columns(frame, [column], source)
    require_filled(frame, column, source)
    messages = [] if isinstance(frame[column].iloc[0], str) else _chats(frame, column, source)
    if messages and config.template is not None:
        raise UserError(f"'data.template' has no effect on a column of messages ('{column}')", "remove data.template")
    texts = [] if messages else [(config.template or "{prompt}").replace("{prompt}", text) for text in frame[column]]
    if config.chat and not messages:
        images = [()] * len(texts) if config.image_column is None else frame[config.image_column]
        messages = [[_of_user(text, len(of_row))] for text, of_row in zip(texts, images, strict=True)]
    if messages:
        arguments = config.chat_arguments if tools is None else {**config.chat_arguments, "tools": [*tools]}
        texts = _apply_chat_template(messages, tokenizer, arguments, source)
        if is_open:
            texts = _opened(texts, behind_the_last_message(tokenizer, config.chat_arguments), source)
    elif tools is not None:
        refuse_tools(source)
    elif config.chat_arguments:
        refuse_chat_arguments(source)
    tokens = encode_texts(texts, tokenizer, add_special_tokens=not messages)
    if empty := [row for row, ids in enumerate(tokens) if len(ids) == 0]:
        raise UserError(
            f"{place(source, empty[0])}: the prompt has no tokens: the tokenizer knows none of its characters",
            "use data that fits the tokenizer",
        )
    return texts, tokens


def refuse_cut_end(config: DataConfig, source: Path | str, chats: bool) -> None:
    """Refuse to cut off what a chat template ends a prompt with: the model's message begins there.

    Raises:
        UserError: `config` says so, and these are chats.
    """
    if chats and config.too_long == "right":
        raise UserError(
            f"data.too_long=right cuts off where the model's message begins, and {source} has chats",
            "set data.too_long=middle, or left",
        )


def refuse_chat_arguments(source: Path | str) -> None:
    """Say that there is no chat template to give arguments to.

    Raises:
        UserError: always.
    """
    raise UserError(
        f"'data.chat_arguments' has no effect on the text prompts of {source} without 'data.chat'",
        "add data.chat=true, or remove data.chat_arguments",
    )


def refuse_tools(source: Path | str) -> None:
    """Say that there is no chat template to tell of tools.

    Raises:
        UserError: always.
    """
    raise UserError(
        f"the environment has tools, of which a chat template tells the model, and {source} has text prompts",
        "add data.chat=true, or make the column a list of messages",
    )


def encode_texts(texts: list[str], tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool) -> list[np.ndarray]:
    """Return the tokens (int32) of every text."""
    # verbose=False: prompts above the model's limit are dropped later, a warning for each would only alarm.
    batch = tokenizer(texts, add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False)
    return [np.asarray(ids, dtype=np.int32) for ids in batch["input_ids"]]


def _of_user(text: str, images: int) -> dict[str, Any]:
    """Return a user's message, its images before the text."""
    if not images:
        return {"role": "user", "content": text}
    return {"role": "user", "content": [*({"type": "image"} for _ in range(images)), {"type": "text", "text": text}]}


def refuse_other_than_chats(frame: pd.DataFrame, column: str, source: Path | str) -> None:
    """Say which row of a column without texts is no list of messages.

    Raises:
        UserError: there is one: a part of it is no object, has no role, or says nothing.
    """
    for row, value in enumerate(frame[column]):
        listed = isinstance(value, list | np.ndarray) and len(value) > 0
        if not listed or not all(isinstance(message, Mapping) and _is_message(message) for message in value):
            raise UserError(
                f"{place(source, row)}: '{column}' is neither text nor a list of messages",
                'write text, or [{"role": "user", "content": "..."}]',
            )


def _is_message(message: Mapping[str, Any]) -> bool:
    """Whether it has a role and says something: a text, parts, or calls of tools. Arrow makes null of a missing key."""
    said = any(message.get(key) is not None for key in ("content", "tool_calls"))
    return isinstance(message.get("role"), str) and said


def _chats(frame: pd.DataFrame, column: str, source: Path | str) -> list[list[dict[str, Any]]]:
    refuse_other_than_chats(frame, column, source)
    return [[_plain(message) for message in value] for value in frame[column]]


def _plain(value: Any) -> Any:
    """Return a value of a message as JSON would have it: lists for arrays, and no key whose value is null.

    Arrow gives every object of a column the keys of all of them: null stands for a key that was not there.
    """
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items() if part is not None}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return [_plain(part) for part in value] if isinstance(value, list) else value


def _apply_chat_template(
    chats: list[list[dict[str, Any]]],
    tokenizer: PreTrainedTokenizerBase,
    arguments: Mapping[str, Any],
    source: Path | str,
) -> list[str]:
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        raise UserError(
            "the prompts are chat messages, and the model's tokenizer has no chat template",
            "use an instruction-tuned model, or text prompts with data.chat=false and a data.template",
        )
    if unread := [name for name in arguments if not reads(tokenizer, name)]:
        if unread[0] == "tools":
            raise UserError(
                "the environment has tools, and the model's chat template tells of none",
                "use a model that was trained with tools, or an environment that reads the model's text",
            )
        raise UserError(
            f"data.chat_arguments has '{unread[0]}', which the model's chat template does not read",
            "correct its name, or remove it",
        )
    settings = {**arguments, "add_generation_prompt": True}
    texts = []
    for row, chat in enumerate(chats):
        try:
            texts.append(rendered(tokenizer, chat, settings))
        # Templates refuse roles they do not know, or an order they do not expect, and fail on values of another kind.
        except (TemplateError, TypeError, ValueError) as error:
            raise UserError(
                f"{place(source, row)}: the chat template refuses these messages: {error}",
                "correct their roles and order, and give them the keys and values that the template reads",
            ) from None
    return texts


def _opened(texts: list[str], closing: str, source: Path | str) -> list[str]:
    """Return chats without what closes their last message.

    Raises:
        UserError: the last message of a row is not the user's.
    """
    if wrong := [row for row, text in enumerate(texts) if not text.endswith(closing)]:
        raise UserError(
            f"{place(source, wrong[0])}: the environment has tools, and the last message is not the user's",
            "end the messages with one of the user's",
        )
    return [text.removesuffix(closing) for text in texts]

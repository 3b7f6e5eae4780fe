"""What ends a run for its prompts' length is found before an engine starts, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import UserError
from penstock.checks.prompts import check_prompt_lengths, describe_prompts, prompt_lengths, read_prompts
from penstock.configs.schema import TrainConfig
from penstock.data.prompts import tokenize_prompts
from penstock.data.rows import read_rows
from penstock.data.tokenizer import make_byte_tokenizer
from penstock.tasks.start import load_tokenizer


def config(folder: Path, limit: int, texts: list[Any], prompts: int = 2, **data: Any) -> TrainConfig:
    """Return a configuration whose splits are the same texts."""
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    rows = str(folder / "rows.jsonl")
    section = {"train": rows, "heldout": rows, "max_prompt_tokens": limit, **data}
    return TrainConfig.model_validate(
        {"model": {"path": str(folder)}, "data": section, "rollout": {"prompts": prompts}}
    )


def check_lengths(config: TrainConfig) -> None:
    check_prompt_lengths(config, read_prompts(config))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_byte_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def test_lengths_are_those_of_the_run(model: Path) -> None:
    """Counted without transformers, with the template around each prompt."""
    section = config(model, 50, ["1+1=", "12+12=", "é+1"], template="q: {prompt} a:")
    frame = read_rows(Path(str(section.data.train)))
    table = tokenize_prompts(frame, section.data, load_tokenizer(str(model)), "train")
    found = prompt_lengths(section, frame)
    assert found is not None
    assert found.tolist() == [len(tokens) for tokens in table.frame["prompt_tokens"]]


def test_prompts_that_are_all_too_long_are_refused(model: Path) -> None:
    """Control: one that fits, also behind the rows that are looked at first, is enough."""
    with pytest.raises(UserError, match=r"every prompt of .*rows\.jsonl is longer .*\(3\): the shortest has 4 tokens"):
        check_lengths(config(model, 3, ["1+1=", "12+12="]))
    check_lengths(config(model, 3, ["1+1="] * 1200 + ["1"]))
    with pytest.raises(UserError, match="every prompt"):
        check_lengths(config(model, 3, ["1+1="] * 1200))
    (model / "elsewhere").mkdir()
    check_lengths(config(model / "elsewhere", 3, ["1+1="]))  # no tokenizer.json to ask


def test_prompts_that_are_all_too_long_are_cut_where_the_recipe_says_so(model: Path) -> None:
    """Not where that would cut off the end of a chat. Controls: the test above; a text has no such end."""
    rows = ["1+1=", "12+12="]
    check_lengths(config(model, 3, rows, too_long="right"))
    (train, _) = describe_prompts(config(model, 3, rows, too_long="right"))
    assert train == "train: 2 prompts, up to 6 tokens, 2 of them longer than data.max_prompt_tokens (3), which are cut"
    chats = [[{"role": "user", "content": text}] for text in rows]
    with pytest.raises(UserError, match=r"data.too_long=right cuts off .* and .*rows\.jsonl has chats\n.*middle"):
        check_lengths(config(model, 3, chats, too_long="right"))
    check_lengths(config(model, 3, chats, too_long="middle"))


@pytest.mark.parametrize(
    "wrong",
    [[{"rolle": "user", "content": "1"}], [{"content": "1"}], [{"role": "user"}], [{"role": None, "content": "1"}], []],
)
def test_a_row_that_is_no_chat_is_refused_before_the_start(tmp_path: Path, wrong: list[Any]) -> None:
    """Named with its line, also among chats. Control: chats alone are fine, with a model that has a template."""
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    chat = [{"role": "user", "content": "1+1="}]
    check_lengths(config(tmp_path, 8, [chat, chat]))
    with pytest.raises(UserError, match=r"rows\.jsonl, line 2: 'prompt' is neither text nor a list of messages"):
        check_lengths(config(tmp_path, 8, [chat, wrong]))


def test_messages_need_a_model_with_a_chat_template(tmp_path: Path) -> None:
    """Said before the start as well. Control: texts need none."""
    check_lengths(config(tmp_path, 8, ["1+1="]))
    with pytest.raises(UserError, match="no chat template"):
        check_lengths(config(tmp_path, 8, [[{"role": "user", "content": "1+1="}]]))


def test_arguments_without_a_chat_template_are_refused(model: Path) -> None:
    """Before anything starts; the control is a column of messages, which goes through the template."""
    arguments = {"chat_arguments": {"enable_thinking": False}}
    with pytest.raises(UserError, match=r"'data.chat_arguments' has no effect on the text prompts of .*rows\.jsonl"):
        check_lengths(config(model, 50, ["1+1="], **arguments))
    check_lengths(config(model, 50, [[{"role": "user", "content": "1+1="}]], **arguments))


def test_a_tiny_models_prompts_are_counted_too() -> None:
    """Its tokenizer does not exist yet."""
    section = {"model": {"tiny": {}}, "data": {"arithmetic": {}, "max_prompt_tokens": 2}}
    with pytest.raises(UserError, match="every prompt of the train data is longer"):
        check_lengths(TrainConfig.model_validate(section))


def test_prompts_are_described(model: Path) -> None:
    """How many, how long, how many are dropped, and how often an iteration takes each; lower bounds with messages."""
    rows = ["1+1=", "12+12="]
    assert describe_prompts(config(model, 4, rows, prompts=5)) == [
        "train: 2 prompts, up to 6 tokens, 1 of them longer than data.max_prompt_tokens (4), which are dropped",
        "heldout: 2 prompts, up to 6 tokens, 1 of them longer than data.max_prompt_tokens (4), which are dropped",
        "rollout.prompts is 5: an iteration takes the one prompt 5 times",
    ]
    (*_, often) = describe_prompts(config(model, 9, rows, prompts=5))
    assert often == "rollout.prompts is 5: an iteration takes each of the 2 prompts 2.5 times"
    (alone, *_) = describe_prompts(config(model, 9, rows[:1], prompts=1))
    assert alone == "train: 1 prompt, up to 4 tokens, none too long"
    messages = [[{"role": "user", "content": text}] for text in rows]
    for texts, chat in ((rows, True), (messages, False)):
        (train, _) = describe_prompts(config(model, 9, texts, chat=chat))
        assert train == "train: 2 prompts, up to 6 tokens, without the chat template, none too long"
    (many, _) = describe_prompts(config(model, 9, rows * 501))
    assert many == "train: 1002 prompts; of the first 1000: up to 6 tokens, none too long"


def test_counting_imports_no_torch(model: Path) -> None:
    """It would take longer than all other checks together."""
    path = config(model, 9, ["1+1=", "1+2="]).model_dump_json()
    code = (
        "import sys; from penstock.configs.schema import TrainConfig; "
        "from penstock.checks.prompts import describe_prompts; "
        "print(len(describe_prompts(TrainConfig.model_validate_json(sys.argv[1]))), 'torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["2", "False"]

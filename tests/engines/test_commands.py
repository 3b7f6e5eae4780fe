"""Commands and replies arrive as they were sent, what is not one is refused, and each command has one handler."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pyarrow as pa
import pytest

from penstock.algorithms.correction import Correction
from penstock.base.ragged import Ragged
from penstock.configs.schema import TrainConfig
from penstock.engines import commands
from penstock.engines.commands import hosts
from penstock.engines.commands.checkpoint import Export, Save
from penstock.engines.commands.forward import Logprobs, Score, TokenValues
from penstock.engines.commands.message import Command, WrongMessage, decode, encode, name_of, reply_type
from penstock.engines.commands.rollout import EngineResponses, Generate
from penstock.engines.commands.update import ActorLoss, Split, UpdateActor
from penstock.engines.groups import channel
from penstock.engines.groups.group import EngineGroup
from penstock.engines.groups.host import HANDLERS

for module in pkgutil.iter_modules(commands.__path__):
    import_module(f"{commands.__name__}.{module.name}")
OURS = (kind for kind in Command.__subclasses__() if kind.__module__.startswith(commands.__name__))  # no benchmark's
KINDS = sorted(OURS, key=name_of)
OF_HOSTS = {kind for kind in KINDS if kind.__module__ == hosts.__name__}
OF_RANKS = set(KINDS) - OF_HOSTS
SPLIT = Split(1, 2, 3, 1, 4, 5, "token-mean", 6)
LOSS = ActorLoss("ppo_clip", {"clip_low": 0.2}, 1.0, 0.0, None, 0.0)
UPDATE = UpdateActor("experience.parquet", 3, SPLIT, LOSS, 1e-3)


def examples(kind: Any) -> Iterator[Any]:
    """Yield values of a type such as arrive in a training; of a message two, with all that is optional and without."""
    simple = {str: "ü", int: 1 << 40, float: 0.1, bool: True, NoneType: None, Any: {"nested": [1, None, 0.5]}}
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Ragged:
        yield Ragged(np.array([7, -1, 3], np.int32), np.array([0, 2, 2, 3]))
    elif is_dataclass(kind):
        hints = get_type_hints(kind)
        for chosen in (0, -1):
            own = {field.name: list(examples(hints[field.name]))[chosen] for field in fields(kind)}
            yield kind(**own)  # type: ignore[operator]
    elif kind is np.ndarray:
        yield np.array([[0.5, np.nan], [-0.0, np.inf]], np.float32)
        yield np.empty((0, 3), np.int64)
    elif kind is pa.LargeStringArray:
        yield pa.array(["", "a ü", "\0"], pa.large_string())
    elif origin in (Union, UnionType):
        for argument in arguments:
            yield from examples(argument)
    elif origin in (list, tuple):
        yield origin(examples(arguments[0]))
        yield origin()
    elif origin is Literal:
        yield from arguments
    elif origin is dict:
        yield {next(examples(arguments[0])): next(examples(arguments[1]))}
        yield {}
    else:
        yield simple[kind]


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same bit for bit, types included."""
    if type(one) is not type(other):
        return False
    if is_dataclass(one):
        return all(same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return bool(one.equals(other) if isinstance(one, pa.Array) else one == other)


def travelled(value: Any) -> Any:
    return channel.unpack(channel.pack(encode(value)))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_every_command_its_reply_and_its_news_arrive_bit_for_bit(kind: type[Command[Any]]) -> None:
    """Every field of every message, optional ones with and without a value."""
    for part in (kind, reply_type(kind), kind.news):
        for sent in examples(part):
            assert same(decode(part, travelled(sent), "it"), sent)


def test_a_difference_of_one_bit_would_be_seen() -> None:
    """The control of the test above: in an array, a type, a nested field."""
    (sent, _) = examples(TokenValues)
    for spoilt in (
        replace(sent, values_T=np.array([[0.5, np.nan], [0.0, np.inf]], np.float32)),
        replace(sent, values_T=sent.values_T.astype(np.float64)),
    ):
        assert not same(spoilt, sent)
    assert not same(replace(UPDATE, split=replace(SPLIT, seed=7)), UPDATE)


def test_arrays_are_not_copied_on_their_way_into_a_message_and_out_of_it() -> None:
    """Encoding hands on the array itself; what is decoded is a view of the bytes that were received."""
    values = np.arange(1 << 16, dtype=np.float32)
    assert encode(TokenValues(np.arange(3), values))["values_T"] is values
    received = travelled(TokenValues(np.arange(3), values))
    assert decode(TokenValues, received, "it").values_T is received["values_T"]
    assert not received["values_T"].flags.owndata


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"paht": "x"}, "UpdateActor has no field paht"),
        ({"path": None}, r"update_actor.path is to be <class 'str'>, not NoneType"),
        ({"version": "3"}, r"update_actor.version is to be <class 'int'>, not str"),
        ({"version": True}, "not bool"),
        ({"version": 3.0}, "not float"),
        ({"learning_rate": "0.1"}, "not str"),
        ({"split": None}, "update_actor.split is to be the fields of Split"),
        ({"split": {**encode(SPLIT), "seed": None}}, r"update_actor.split.seed is to be"),
        ({"split": {"mini_batches": 1}}, "Split lacks aggregation, epochs"),
        ({"loss": {**encode(LOSS), "clip": 0.2}}, "ActorLoss has no field clip"),
        ({"loss": encode(replace(LOSS, correction=Correction(weights="tokens")))}, "correction.weights is to be"),
    ],
)
def test_a_field_that_is_unknown_or_of_another_type_is_refused(change: dict[str, Any], problem: str) -> None:
    """With its place. Control: the command without the change arrives."""
    fields_of = travelled(UPDATE)
    assert decode(UpdateActor, fields_of, "update_actor") == UPDATE
    with pytest.raises(WrongMessage, match=problem):
        decode(UpdateActor, fields_of | change, "update_actor")


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_a_field_that_is_missing_is_refused_also_where_it_has_a_default(kind: type[Command[Any]]) -> None:
    """Whoever sends a command says everything: a default of another release would be another command."""
    complete = encode(next(examples(kind)))
    for name in complete:
        rest = {other: value for other, value in complete.items() if other != name}
        with pytest.raises(WrongMessage, match=f"lacks {name}"):
            decode(kind, rest, "it")


@pytest.mark.parametrize(
    ("kind", "value"),
    [(Score, {"texts": ["a", 1], "budget": 8}), (TokenValues, {"rows": [0, 1], "values_T": np.zeros(2)})],
    ids=["within a list", "a list for an array"],
)
def test_what_is_inside_is_looked_at(kind: Any, value: dict[str, Any]) -> None:
    """A list's entries have its type, and a list is no array."""
    with pytest.raises(WrongMessage, match="it\\."):
        decode(kind, value, "it")


def test_a_whole_number_is_a_number() -> None:
    """As in a type checker: a rate of 0 may be written without a point. It arrives as it was sent."""
    assert decode(UpdateActor, travelled(replace(UPDATE, learning_rate=0)), "it").learning_rate == 0


def test_a_type_that_a_message_cannot_hold_is_no_silent_pass() -> None:
    """A literal is one of its values; `X | None` is None or an X."""
    assert decode(Literal["a", "b"], "a", "it") == "a"
    with pytest.raises(WrongMessage):
        decode(Literal["a", "b"], "c", "it")
    assert decode(EngineResponses | None, None, "it") is None
    with pytest.raises(WrongMessage):
        decode(EngineResponses | None, {}, "it")


def test_no_field_has_a_name_that_a_call_takes_for_itself() -> None:
    """A group's call takes a command's fields beside its own arguments."""
    own = set(get_type_hints(EngineGroup.begin)) - {"arguments", "return"}
    assert {"key", "on_news"} <= own
    for kind in OF_RANKS:
        assert own.isdisjoint(field.name for field in fields(kind))  # type: ignore[arg-type]


def test_a_command_is_named_as_logs_name_it() -> None:
    """In words of small letters; no two share a name."""
    assert [name_of(kind) for kind in (Generate, UpdateActor, Logprobs)] == ["generate", "update_actor", "logprobs"]
    assert len({name_of(kind) for kind in KINDS}) == len(KINDS)


def test_every_command_has_one_handler_whose_types_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: a second handler, and a wrong one."""
    import_module("penstock.engines.ranks.worker")  # all handlers, and with them DeepSpeed and vLLM
    handlers = import_module("penstock.engines.ranks.serving.handlers")
    RankModels = import_module("penstock.engines.ranks.models").RankModels
    assert {item.kind for item in handlers.HANDLERS.values()} == OF_RANKS
    for kind, function, *_ in handlers.HANDLERS.values():
        hints, reply = get_type_hints(function), reply_type(kind)
        assert hints.pop("return") in (reply, handlers.Later[reply]), function
        assert hints == {"models": RankModels, "command": kind}, function
    for trainers, others in (({"actor": None}, set()), ({}, {"save", "load"})):  # of ranks that train nothing
        models = RankModels(0, 1, None, trainers=trainers)
        begun = [name for name, item in handlers.HANDLERS.items() if item.during_generation(models)]
        expected = {"connect", "reshard", "generate", "sample_to_compare"} | others
        assert set(begun) == expected, "during a generation, and no more"

    models = RankModels(0, 1, None, config=TrainConfig.model_validate({"rollout": {"stream": {}}}))
    begun = [name for name, item in handlers.HANDLERS.items() if item.during_generation(models)]
    beside = {name for name, item in handlers.HANDLERS.items() if item.beside}
    assert beside == {"sum_gradient", "logprobs", "values"} and set(begun) == expected | beside

    def added(takes: type) -> Any:
        def function(models: Any, command: Any) -> None: ...

        function.__annotations__ = {"models": RankModels, "command": takes, "return": None}
        return function

    with pytest.raises(TypeError, match="export is carried out by export already"):
        handlers.carries_out(Export)(added(Export))
    monkeypatch.delitem(handlers.HANDLERS, "export")
    with pytest.raises(TypeError, match="function carries out Export, but takes .*Save"):
        handlers.carries_out(Export)(added(Save))


def test_every_command_to_a_host_has_one_handler_whose_types_fit() -> None:
    """As for ranks, whose commands a host does not know."""
    assert {kind for kind, _ in HANDLERS.values()} == OF_HOSTS
    for kind, handler in HANDLERS.values():
        hints = get_type_hints(handler)
        reply = reply_type(kind)
        assert hints.pop("return") in (reply, Future[reply])
        assert list(hints.values()) == [kind]

"""What the gateway is asked and how it answers, in the shapes of OpenAI's API and of vLLM's `/inference/v1/generate`.

How tokens are sampled is the recipe's: trainers compute log-probs under that distribution, so a request's temperature,
top_p, top_k and seed change nothing. What would change the distribution otherwise, or ask for what there is not, is
refused.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from penstock.environments.gateway.asks import Ask, SaidCall, Turn
from penstock.environments.gateway.history import History, Refused

NO_CALLS = "none"  # of `tool_choice`: the template tells of the tools, and a call in the turn stays text
NOT_SERVED: dict[str, tuple[Any, ...]] = {  # by name the values that do not change how tokens are sampled
    "best_of": (1,),
    "echo": (),
    "suffix": ("",),
    "logit_bias": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "bad_words": (),
    "stop": ("",),
    "stop_token_ids": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "tool_choice": ("auto", NO_CALLS),
    "functions": (),
    "features": (),
    "content_parts": (),
}


class _Request(BaseModel):
    """Others' fields are let through: clients send many that say nothing about the turn."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    stream: bool | None = False
    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1)
    logprobs: bool | int | None = None
    return_token_ids: bool | None = None
    stream_options: dict[str, Any] | None = None

    @property
    def choices(self) -> int:
        """How many turns are asked for."""
        return self.n or 1

    def refuse(self) -> None:
        """Raises `Refused` for what would change how tokens are sampled, or cannot be had."""
        _refuse(self.model_extra or {})


def _refuse(fields: Mapping[str, Any]) -> None:
    for name, harmless in NOT_SERVED.items():
        value = fields.get(name)
        if value not in (None, False, [], {}, *harmless):
            raise Refused(f"'{name}' is not served while the policy is trained: leave it out")


class ChatRequest(_Request):
    """Of `/v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = Field(None, ge=1)

    def ask(self, history: History) -> Ask:
        """Return what is asked, after what there was."""
        ask = history.chat(self.messages, self.tools, self.max_completion_tokens or self.max_tokens)
        calls = (self.model_extra or {}).get("tool_choice") != NO_CALLS
        return replace(ask, choices=self.choices, calls=calls)

    def answer(self, turns: list[Turn], history: History) -> dict[str, Any]:
        """Return the body of the answer; a turn that is learnt from becomes part of the history."""
        return _body("chat.completion", "chatcmpl", self, turns, [self._choice(turn, history) for turn in turns])

    def _choice(self, turn: Turn, history: History) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": turn.text}
        if turn.tool_calls:
            message["tool_calls"] = [_call(call) for call in turn.tool_calls]
        if turn.learnt:
            history.chat_went_on(self.messages, self.tools, message, turn.number)
        reason = "length" if turn.truncated else "tool_calls" if turn.tool_calls else "stop"
        return {"message": message, "finish_reason": reason, "logprobs": _chat_logprobs(self, turn)}

    def chunks(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield an answer in the pieces of a stream: the message, and how it ended."""
        for choice in body["choices"]:
            delta, ended = dict(choice["message"]), choice["finish_reason"]
            if "tool_calls" in delta:
                delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(delta["tool_calls"])]
            for piece, reason in ((delta, None), ({}, ended)):
                told = {"index": choice["index"], "delta": piece, "finish_reason": reason}
                yield _chunk(body, "chat.completion.chunk", told)


class CompletionRequest(_Request):
    """Of `/v1/completions`."""

    prompt: str | list[int] = Field(min_length=1)

    def ask(self, history: History) -> Ask:
        """Return what is asked, after what there was."""
        if isinstance(self.prompt, str):
            return replace(history.text(self.prompt, self.max_tokens), choices=self.choices)
        return Ask(tokens=self.prompt, max_tokens=self.max_tokens, choices=self.choices)

    def answer(self, turns: list[Turn], history: History) -> dict[str, Any]:
        """Return the body of the answer; a turn that is learnt from becomes part of the history."""
        return _body("text_completion", "cmpl", self, turns, [self._choice(turn, history) for turn in turns])

    def _choice(self, turn: Turn, history: History) -> dict[str, Any]:
        if turn.learnt and isinstance(self.prompt, str):
            history.text_went_on(self.prompt, turn.text, turn.number)
        reason = "length" if turn.truncated else "stop"
        return {"text": turn.text, "finish_reason": reason, "logprobs": _logprobs(self, turn)}

    def chunks(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield an answer in the pieces of a stream."""
        for choice in body["choices"]:
            yield _chunk(body, "text_completion", choice)


class SamplingParams(BaseModel):
    """What `/inference/v1/generate` is told of sampling, in a place of its own."""

    model_config = ConfigDict(extra="allow")

    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1)


class GenerateRequest(_Request):
    """Of `/inference/v1/generate`: tokens in, tokens out."""

    token_ids: list[int] = Field(min_length=1)
    sampling_params: SamplingParams = Field(default_factory=SamplingParams)

    @property
    def choices(self) -> int:
        """As of the others."""
        return self.sampling_params.n or 1

    def refuse(self) -> None:
        """As of the others."""
        super().refuse()
        told = self.sampling_params.model_extra or {}
        _refuse({name: value for name, value in told.items() if name != "stop_token_ids"})
        if self.stream:
            raise Refused("'stream' is not served here: leave it out")

    def ask(self, history: History) -> Ask:
        """Return what is asked."""
        return Ask(tokens=self.token_ids, max_tokens=self.sampling_params.max_tokens, choices=self.choices)

    def answer(self, turns: list[Turn], history: History) -> dict[str, Any]:
        """Return the body of the answer."""
        return {
            "request_id": f"gen-{uuid.uuid4().hex}",
            "choices": [{"index": number, **_generated(turn)} for number, turn in enumerate(turns)],
            "prompt_token_ids": turns[0].prompt,
            "usage": _usage(turns),
            "policy_version": _version(turns),
        }


def _generated(turn: Turn) -> dict[str, Any]:
    """Return a choice in vLLM's shape.

    The mask of sampling is none, since each token could be drawn: top_p and top_k are refused where log-probs are kept,
    and without these a mask tells nothing. A token is named as well, since there are clients that read it by its name.
    """
    known = [
        {"token_id": token, "token": f"token_id:{token}", "logprob": value, "top_logprobs": []}
        for token, value in zip(turn.tokens, turn.logprobs, strict=False)
    ]
    ends = [start for start, _ in turn.versions[1:]] + [len(turn.tokens)]
    spans = zip(turn.versions, ends, strict=False)
    return {
        "token_ids": turn.tokens,
        "finish_reason": "length" if turn.truncated else "stop",
        "logprobs": {"content": known} if known else None,
        "sampling_mask": None,
        "weight_versions": [{"version": str(version), "start": start, "end": end} for (start, version), end in spans],
    }


Streamed = ChatRequest | CompletionRequest
Request = Streamed | GenerateRequest


def stream_of(request: Streamed, body: Mapping[str, Any]) -> Iterator[str]:
    """Yield an answer as server-sent events."""
    for chunk in request.chunks(body):
        yield f"data: {json.dumps(chunk)}\n\n"
    if (request.stream_options or {}).get("include_usage"):
        kind = "chat.completion.chunk" if isinstance(request, ChatRequest) else body["object"]
        yield f"data: {json.dumps({**body, 'object': kind, 'choices': []})}\n\n"
    yield "data: [DONE]\n\n"


def _body(
    kind: str, prefix: str, request: _Request, turns: list[Turn], choices: list[dict[str, Any]]
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": request.model or "policy",
        "choices": [{"index": number, **choice} for number, choice in enumerate(choices)],
        "usage": _usage(turns),
        "policy_version": _version(turns),
    }
    if request.return_token_ids:
        body["prompt_token_ids"] = turns[0].prompt
        for choice, turn in zip(body["choices"], turns, strict=True):
            choice["token_ids"] = turn.tokens
    return body


def _chunk(body: Mapping[str, Any], kind: str, choice: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: body[name] for name in ("id", "created", "model", "policy_version")}
    return {**kept, "object": kind, "choices": [choice]}


def _version(turns: list[Turn]) -> int:
    """The newest policy that sampled any of it."""
    return max(turn.policy_version for turn in turns)


def _usage(turns: list[Turn]) -> dict[str, int]:
    prompt, completion = len(turns[0].prompt), sum(len(turn.tokens) for turn in turns)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _call(call: SaidCall) -> dict[str, Any]:
    own = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call-{uuid.uuid4().hex[:24]}", "type": "function", "function": own}


def _chat_logprobs(request: _Request, turn: Turn) -> dict[str, Any] | None:
    if not request.logprobs:
        return None
    _need_logprobs(turn)
    return {"content": [_token(token, value) for token, value in zip(turn.tokens, turn.logprobs, strict=True)]}


def _logprobs(request: _Request, turn: Turn) -> dict[str, Any] | None:
    if not request.logprobs:
        return None
    _need_logprobs(turn)
    return {"tokens": [f"token_id:{token}" for token in turn.tokens], "token_logprobs": turn.logprobs}


def _need_logprobs(turn: Turn) -> None:
    if len(turn.logprobs) != len(turn.tokens):
        raise Refused("'logprobs' are not kept by this recipe: set algorithm.correction, or leave it out")


def _token(token: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}

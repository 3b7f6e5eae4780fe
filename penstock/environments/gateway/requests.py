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
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from penstock.environments.gateway.asks import Ask, SaidCall, Turn
from penstock.environments.gateway.history import History, Refused

NOT_SERVED: dict[str, tuple[Any, ...]] = {  # by name the values that change nothing
    "n": (1,),
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
    "tool_choice": ("auto",),
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
    logprobs: bool | int | None = None
    return_token_ids: bool | None = None
    stream_options: dict[str, Any] | None = None

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
        return history.chat(self.messages, self.tools, self.max_completion_tokens or self.max_tokens)

    def answer(self, turn: Turn, history: History) -> dict[str, Any]:
        """Return the body of the answer, which becomes part of the history if it is learnt from."""
        message: dict[str, Any] = {"role": "assistant", "content": turn.text}
        if turn.tool_calls:
            message["tool_calls"] = [_call(call) for call in turn.tool_calls]
        if turn.learnt:
            history.chat_went_on(self.messages, self.tools, message)
        reason = "length" if turn.truncated else "tool_calls" if turn.tool_calls else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": _chat_logprobs(self, turn)}
        return _body("chat.completion", "chatcmpl", self, turn, choice)

    def chunks(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield an answer in the pieces of a stream: the message, how it ended, what it took."""
        (choice,) = body["choices"]
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(delta["tool_calls"])]
        yield _chunk(body, "chat.completion.chunk", {"index": 0, "delta": delta, "finish_reason": None})
        yield _chunk(body, "chat.completion.chunk", {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]})


class CompletionRequest(_Request):
    """Of `/v1/completions`."""

    prompt: str | list[int] = Field(min_length=1)

    def ask(self, history: History) -> Ask:
        """Return what is asked, after what there was."""
        if isinstance(self.prompt, str):
            return history.text(self.prompt, self.max_tokens)
        return Ask(tokens=self.prompt, max_tokens=self.max_tokens)

    def answer(self, turn: Turn, history: History) -> dict[str, Any]:
        """Return the body of the answer, which becomes part of the history if it is learnt from."""
        if turn.learnt and isinstance(self.prompt, str):
            history.text_went_on(self.prompt, turn.text)
        reason = "length" if turn.truncated else "stop"
        choice = {"index": 0, "text": turn.text, "finish_reason": reason, "logprobs": _logprobs(self, turn)}
        return _body("text_completion", "cmpl", self, turn, choice)

    def chunks(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield an answer in the pieces of a stream."""
        (choice,) = body["choices"]
        yield _chunk(body, "text_completion", choice)


class GenerateRequest(_Request):
    """Of `/inference/v1/generate`: tokens in, tokens out."""

    token_ids: list[int] = Field(min_length=1)
    sampling_params: dict[str, Any] = Field(default_factory=dict)

    def refuse(self) -> None:
        """As of the others; what is asked of sampling is in a place of its own."""
        super().refuse()
        _refuse({name: value for name, value in self.sampling_params.items() if name != "stop_token_ids"})
        if self.stream:
            raise Refused("'stream' is not served here: leave it out")

    def ask(self, history: History) -> Ask:
        """Return what is asked."""
        return Ask(tokens=self.token_ids, max_tokens=self.sampling_params.get("max_tokens"))

    def answer(self, turn: Turn, history: History) -> dict[str, Any]:
        """Return the body of the answer."""
        known = [_token(token, value) for token, value in zip(turn.tokens, turn.logprobs, strict=False)]
        choice = {
            "index": 0,
            "token_ids": turn.tokens,
            "finish_reason": "length" if turn.truncated else "stop",
            "logprobs": {"content": known} if known else None,
        }
        return {
            "request_id": f"gen-{uuid.uuid4().hex}",
            "choices": [choice],
            "prompt_token_ids": turn.prompt,
            "usage": _usage(turn),
            "policy_version": turn.policy_version,
        }


Streamed = ChatRequest | CompletionRequest
Request = Streamed | GenerateRequest


def stream_of(request: Streamed, body: Mapping[str, Any]) -> Iterator[str]:
    """Yield an answer as server-sent events."""
    for chunk in request.chunks(body):
        yield f"data: {json.dumps(chunk)}\n\n"
    if (request.stream_options or {}).get("include_usage"):
        yield f"data: {json.dumps({**body, 'choices': []})}\n\n"
    yield "data: [DONE]\n\n"


def _body(kind: str, prefix: str, request: _Request, turn: Turn, choice: dict[str, Any]) -> dict[str, Any]:
    body = {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": request.model or "policy",
        "choices": [choice],
        "usage": _usage(turn),
        "policy_version": turn.policy_version,
    }
    if request.return_token_ids:
        body["prompt_token_ids"] = turn.prompt
        choice["token_ids"] = turn.tokens
    return body


def _chunk(body: Mapping[str, Any], kind: str, choice: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: body[name] for name in ("id", "created", "model", "policy_version")}
    return {**kept, "object": kind, "choices": [choice]}


def _usage(turn: Turn) -> dict[str, int]:
    prompt, completion = len(turn.prompt), len(turn.tokens)
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

"""Generated tokens in OpenAI's format: whole responses, chunks of a stream, log-probabilities.

`Completion` and `Chat` are the two formats; both are fed with deltas and give either chunks or, at
the end, one response.
"""

from __future__ import annotations

import codecs
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from parcae.data.tokenizer import Tokenizer
from parcae.infer.request import Request
from parcae.infer.sequence import TokenLogprob
from parcae.serving.protocol import CompletionRequest, Sampled
from parcae.serving.scheduler import Delta

FINISH = {"length": "length", "context": "length", "stop": "stop"}


class TokenTexts:
    """The texts of single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = tokenizer.token_bytes

    def bytes(self, token: int) -> bytes:
        return self._bytes[token] if token < len(self._bytes) else b""

    def __call__(self, token: int) -> str:
        return self.bytes(token).decode(errors="replace")

    def key(self, token: int) -> str:
        """A text that no other token has: parts of characters are written as bytes."""
        content = self.bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


class Choice:
    """One text while it is written."""

    def __init__(self, request: Request, texts: TokenTexts) -> None:
        self.request, self.texts = request, texts
        self.started = False
        self.text = ""
        self.tokens: list[dict[str, Any]] = []
        self.logprobs: list[dict[str, Any]] = []
        self.count = 0
        self.finish: str | None = None
        self._characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, delta: Delta) -> tuple[str, list[dict[str, Any]], list[dict[str, Any]]]:
        """Append a delta; returns its text, tokens and log-probabilities."""
        text = "".join(piece.text for piece in delta.pieces)
        tokens = [
            {"id": piece.token, "text": piece.text, "loops": piece.loops}
            for piece in delta.pieces
            if piece.token is not None or piece.text
        ]
        logprobs = [self._logprob(entry) for entry in delta.logprobs]
        self.text += text
        self.tokens += tokens
        self.logprobs += logprobs
        self.count += sum(piece.token is not None for piece in delta.pieces)
        self.finish = None if delta.finish is None else FINISH[delta.finish]
        return text, tokens, logprobs

    def _logprob(self, entry: TokenLogprob) -> dict[str, Any]:
        """In the chat format, with the offset in the text that the older format has."""
        before = self._characters
        self._characters += len(self._decoder.decode(self.texts.bytes(entry.token)))
        offset = max(before, self._characters - len(self.texts(entry.token)))
        likeliest = [self._token(token, logprob) for token, logprob in entry.alternatives]
        return {
            **self._token(entry.token, entry.logprob),
            "top_logprobs": likeliest,
            "offset": offset,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        content = list(self.texts.bytes(token))
        return {"token": self.texts.key(token), "logprob": logprob, "bytes": content}


class Format(ABC):
    """Of one API request. `add` returns the chunk of a delta, `response` all of it."""

    prefix = object = chunk_object = ""

    def __init__(
        self, body: Sampled, model: str, requests: Sequence[Request], tokenizer: Tokenizer
    ) -> None:
        self.body = body
        texts = TokenTexts(tokenizer)
        self.choices = [Choice(request, texts) for request in requests]
        self.head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def add(self, index: int, delta: Delta) -> dict[str, Any]:
        choice = self.choices[index]
        text, tokens, logprobs = choice.add(delta)
        first, choice.started = not choice.started, True
        chunk = {
            "index": index,
            **self.delta(choice, text, first),
            "logprobs": self._logprobs(logprobs),
            "finish_reason": choice.finish,
            **self._depths(choice, tokens, first),
        }
        usage = {"usage": None} if self.body.include_usage else {}
        return {**self.head, "object": self.chunk_object, "choices": [chunk], **usage}

    def usage_chunk(self) -> dict[str, Any]:
        return {**self.head, "object": self.chunk_object, "choices": [], "usage": self.usage()}

    def response(self) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(self.choices):
            logprobs = (
                self.logprobs(choice.logprobs) if self.body.alternatives is not None else None
            )
            content = {
                "index": index,
                **self.content(choice),
                "logprobs": logprobs,
                "finish_reason": choice.finish,
                **self._depths(choice, choice.tokens, True),
            }
            choices.append(content)
        return {**self.head, "object": self.object, "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """Each prompt counts once, however many texts continue it."""
        every = self.body.n or 1
        prompt = sum(len(choice.request.prompt) for choice in self.choices[::every])
        completion = sum(choice.count for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _logprobs(self, entries: list[dict[str, Any]]) -> dict[str, Any] | None:
        return None if self.body.alternatives is None else self.logprobs(entries)

    def _depths(
        self, choice: Choice, tokens: list[dict[str, Any]], with_prompt: bool
    ) -> dict[str, Any]:
        if not self.body.return_depths:
            return {}
        prompt = {"prompt_token_ids": list(choice.request.prompt)} if with_prompt else {}
        return {"parcae": {**prompt, "tokens": tokens}}

    @abstractmethod
    def delta(self, choice: Choice, text: str, first: bool) -> dict[str, Any]: ...

    @abstractmethod
    def content(self, choice: Choice) -> dict[str, Any]: ...

    @abstractmethod
    def logprobs(self, entries: list[dict[str, Any]]) -> dict[str, Any]: ...


class CompletionFormat(Format):
    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        body: CompletionRequest,
        model: str,
        requests: Sequence[Request],
        tokenizer: Tokenizer,
    ) -> None:
        super().__init__(body, model, requests, tokenizer)
        self.echoes = [""] * len(requests)
        if body.echo:
            prompts = [prompt for prompt in body.prompts for _ in range(body.n or 1)]
            self.echoes = [p if isinstance(p, str) else tokenizer.decode(p) for p in prompts]

    def delta(self, choice: Choice, text: str, first: bool) -> dict[str, Any]:
        return {"text": self._echo(choice) + text if first else text}

    def content(self, choice: Choice) -> dict[str, Any]:
        return {"text": self._echo(choice) + choice.text}

    def _echo(self, choice: Choice) -> str:
        return self.echoes[self.choices.index(choice)]

    def logprobs(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        likeliest = [
            {other["token"]: other["logprob"] for other in entry["top_logprobs"]}
            for entry in entries
        ]
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": likeliest if self.body.alternatives else None,
            "text_offset": [entry["offset"] for entry in entries],
        }


class ChatFormat(Format):
    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def delta(self, choice: Choice, text: str, first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if first else {}
        return {"delta": {**role, "content": text}}

    def content(self, choice: Choice) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": choice.text, "refusal": None}}

    def logprobs(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        content = [{key: entry[key] for key in entry if key != "offset"} for entry in entries]
        return {"content": content, "refusal": None}


def event(value: dict[str, Any] | str) -> bytes:
    """One server-sent event."""
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return f"data: {text}\n\n".encode()

"""Requests in OpenAI's format, with the fields that looped models add, and errors.

`num_loops`, `exit` and `draft` choose the depth, `return_depths` returns the loops of every token.
Fields of OpenAI's API that have no meaning here are ignored, those that would change the text are
refused unless they have no effect, and unknown ones are refused, so that no mistyped one is lost.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from parcae.schema import suggest

MAX_LOGPROBS = 20
MAX_STOPS = 16

IGNORED = (
    "user",
    "store",
    "metadata",
    "service_tier",
    "parallel_tool_calls",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "verbosity",
    "reasoning_effort",
    "modalities",
)
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "logit_bias": ({}, None),
    "suffix": ("", None),
    "best_of": (1, None),
    "tools": ([], None),
    "tool_choice": ("none", "auto", None),
    "functions": ([], None),
    "function_call": ("none", "auto", None),
    "response_format": ({"type": "text"}, None),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
}
"""Fields that are not implemented, and the values with which they may be given."""


class ApiError(Exception):
    """An error that is answered in OpenAI's format; it never contains a prompt."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}

    @property
    def type(self) -> str:
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> dict[str, Any]:
        """JSON; characters that are not valid Unicode, which a client may send, are escaped."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        for key, value in error.items():
            error[key] = value and value.encode(errors="backslashreplace").decode()
        return {"error": error}


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """What `ApiError.body` returns, for the schema."""

    error: ErrorFields


def invalid(param: str, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def busy(message: str) -> ApiError:
    return ApiError(429, f"{message} Try again later.", code="busy", retry_after=2)


def stopping() -> ApiError:
    return ApiError(503, "The server is stopping.", code="stopping", retry_after=5)


def disconnected() -> ApiError:
    """For the count of answers; nobody receives it."""
    return ApiError(499, "The client has gone.", code="disconnected")


def _valid(text: str) -> str:
    """JSON may contain halves of surrogate pairs, which are not text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("text", "The text is not valid Unicode") from None
    return text


Text = Annotated[str, AfterValidator(_valid)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(min_length=1)]
Stop = Annotated[Text, Field(min_length=1)]


class Body(BaseModel):
    """Of any request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    model: Text | None = Field(None, description="default: the first model")

    @model_validator(mode="before")
    @classmethod
    def _drop_other_fields(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        kept = {}
        for key, value in body.items():
            if key in cls.model_fields:
                kept[key] = value
            elif key in WITHOUT_EFFECT:
                if value not in WITHOUT_EFFECT[key]:
                    raise _refused(key, "Not supported. Omit it.")
            elif key not in IGNORED:
                raise _refused(key, f"Unknown field. {suggest(key, list(cls.model_fields))}")
        return kept


def _refused(field: str, problem: str) -> PydanticCustomError:
    return PydanticCustomError("field", "{problem}", {"problem": problem, "field": field[:64]})


class Part(BaseModel):
    """Of a request. Unknown fields are ignored: clients give names and annotations to messages."""

    model_config = ConfigDict(strict=True)


class StreamOptions(Part):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Sampled(Body):
    """What completions and chat completions share."""

    default_tokens: ClassVar[int | None] = None
    """max_tokens where it is not given; None is as many as fit."""

    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=1e-3, le=10)
    n: int | None = Field(None, ge=1, le=128)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: TokenIds | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    num_loops: int | None = Field(None, ge=1, description="loops per token; default: model's")
    exit: Text | None = Field(None, description="when a token stops earlier: state:0.05, kl:0.01")
    draft: int | None = Field(None, ge=0, description="loops of speculative drafts; 0: none")
    draft_tokens: int | None = Field(None, ge=1)
    return_depths: bool = Field(False, description="return id, text and loops of every token")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    @abstractmethod
    def alternatives(self) -> int | None:
        """The likeliest tokens whose log-probabilities are returned; None is no logprobs."""

    def token_limit(self) -> int | None:
        return self.max_tokens

    def options(self) -> dict[str, Any]:
        """Arguments of `Engine.request`, without prompt, seed and number of tokens."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        given = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "stop": stop or (),
            "loops": self.num_loops,
            "exit": self.exit,
            "draft_loops": self.draft,
            "draft_tokens": self.draft_tokens,
            "logprobs": self.alternatives,
        }
        return {name: value for name, value in given.items() if value is not None}


class CompletionRequest(Sampled):
    """`POST /v1/completions`."""

    default_tokens = 16

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1)]
        | Annotated[list[TokenIds], Field(min_length=1)]
    )
    echo: bool | None = Field(None, description="return the prompt before the text")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


class TextPart(Part):
    type: Literal["text"]
    text: Text


class Message(Part):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart] | None = None

    @property
    def text(self) -> str:
        parts = self.content or ""
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class ChatRequest(Sampled):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise _refused("top_logprobs", "Needs logprobs: true.")
        return self

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def token_limit(self) -> int | None:
        limits = (self.max_completion_tokens, self.max_tokens)
        return next((limit for limit in limits if limit is not None), None)


class TraceRequest(Body):
    """`POST /v1/trace`: how the prediction after one token changes from loop to loop."""

    prompt: Text | TokenIds
    position: int | None = Field(None, ge=0, description="of the token; default: the last")
    num_loops: int | None = Field(None, ge=1)
    top: int = Field(5, ge=1, le=MAX_LOGPROBS)

"""Models by name: each with its engine, its scheduler and the prompts of its chats."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parcae.config import ConfigError, require
from parcae.console import format_bytes
from parcae.data.tokenizer import Tokenizer
from parcae.files import FileError, read_json, read_text
from parcae.infer.engine import Engine
from parcae.infer.exit import EXIT_RULES
from parcae.infer.request import Request
from parcae.machine import available_memory
from parcae.model.base import LanguageModel
from parcae.runs import Checkpoint, find_checkpoint, open_checkpoint
from parcae.runs.layout import run_of
from parcae.runs.loading import find_tokenizer
from parcae.serving.metrics import Exposition, Metrics
from parcae.serving.protocol import ChatRequest, CompletionRequest, Message, Sampled, invalid
from parcae.serving.scheduler import Scheduler
from parcae.serving.settings import ServerSettings

if TYPE_CHECKING:
    import torch

DEMO = Path("out/demo/run")
PLAIN_NAMES = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}


class ServedModel:
    """A model under a name, and the thread that decodes with it."""

    def __init__(
        self,
        name: str,
        model: LanguageModel,
        tokenizer: Tokenizer,
        settings: ServerSettings,
        *,
        chat: ChatTemplate | None = None,
        memory_share: float = 0.5,
        **engine_options: Any,
    ) -> None:
        """`memory_share`: part of the free memory for the cache, where `settings` has no size."""
        self.name, self.model, self.tokenizer, self.settings = name, model, tokenizer, settings
        self.chat = chat or ChatTemplate(tokenizer)
        self.created = int(time.time())
        self.engine = Engine(
            model,
            tokenizer,
            max_batch_size=settings.max_batch_size,
            prefill_tokens=settings.prefill_tokens,
            max_cache_bytes=_cache_bytes(model, settings, memory_share),
            **engine_options,
        )
        self.metrics = Metrics()
        self.scheduler = Scheduler(self.engine, settings, self.metrics)

    @property
    def max_loops(self) -> int:
        if self.model.config.architecture == "transformer":
            return 1
        nominal = self.model.config.loop.nominal_loops
        return self.settings.max_loops or max(16, 2 * nominal)

    @property
    def default_loops(self) -> int:
        return min(self.model.config.loop.nominal_loops, self.max_loops)

    def card(self) -> dict[str, Any]:
        """The model's entry in /v1/models."""
        config = self.model.config
        looped = config.architecture != "transformer"
        depths = {
            "looped": looped,
            "default_loops": self.default_loops,
            "max_loops": self.max_loops,
            "context_length": config.context_length,
            "exit_rules": sorted(EXIT_RULES.names) if looped else [],
        }
        card = {"id": self.name, "object": "model", "created": self.created, "owned_by": "parcae"}
        return {**card, "parcae": depths}

    def requests(self, body: CompletionRequest | ChatRequest) -> list[Request]:
        """One engine request per choice: for each prompt, n with successive seeds."""
        chat = isinstance(body, ChatRequest)
        prompts = [self.chat.encode(body.messages)] if chat else body.prompts
        count, limit = body.n or 1, self.settings.max_choices
        if len(prompts) * count > limit:
            message = f"{len(prompts)} prompts x {count} texts, but at most {limit} are allowed."
            raise invalid("n", message)
        seed = secrets.randbits(31) if body.seed is None else body.seed
        options = {"loops": self.default_loops, **body.options()}
        if chat:
            options["stop"] = [*options.pop("stop", ()), *self.chat.stop]
        stop_tokens = {self.tokenizer.bos, *self.chat.stop_tokens, *(body.stop_token_ids or ())}
        requests = []
        for prompt in prompts:
            ids = list(self.engine.encode(prompt))
            common = {**options, "max_new_tokens": self._max_new_tokens(body, ids)}
            for index in range(count):
                request = self._request(ids, seed + index, stop_tokens, common)
                requests.append(request)
        return requests

    def _request(
        self, ids: list[int], seed: int, stop_tokens: set[int], options: dict[str, Any]
    ) -> Request:
        try:
            request = self.engine.request(ids, seed=seed, stop_tokens=stop_tokens, **options)
        except ConfigError as error:
            param, _, message = str(error).partition(": ")
            raise invalid(PARAMS.get(param, param), message or param) from None
        self.check_loops(request.plan.loops)
        cache = self.engine.cache
        needed = cache.bytes_per_token(request.plan.loops) * (len(ids) + request.max_new_tokens)
        if cache.max_bytes is not None and needed > cache.max_bytes:
            size = f"{format_bytes(needed)} of {format_bytes(cache.max_bytes)}"
            raise invalid("max_tokens", f"The request needs too much cache: {size}.")
        return request

    def check_loops(self, loops: int) -> None:
        if loops > self.max_loops:
            raise invalid("num_loops", f"{loops} loops, but at most {self.max_loops} are allowed.")

    def check_length(self, ids: Sequence[int]) -> None:
        """ApiError if a prompt is too long."""
        context = self.model.config.context_length
        limit = min(context, self.settings.max_prompt_tokens or context)
        if len(ids) > limit:
            message = f"The prompt has {len(ids)} tokens, but at most {limit} are allowed."
            raise invalid("prompt", message, "context_length_exceeded")

    def _max_new_tokens(self, body: Sampled, ids: Sequence[int]) -> int:
        self.check_length(ids)
        context = self.model.config.context_length
        limit, given = self.settings.max_new_tokens or context, body.token_limit()
        if given is not None and given > limit:
            raise invalid("max_tokens", f"{given} tokens, but at most {limit} are allowed.")
        room = context + 1 - len(ids)
        wanted = given or body.default_tokens or room
        return min(wanted, limit, room)

    def expose(self, exposition: Exposition) -> None:
        """Add the model's metrics."""
        cache = self.engine.cache
        gauges = {
            "queue_waiting": ("Texts that wait.", self.scheduler.waiting),
            "running": ("Texts that are decoded.", self.scheduler.running),
            "rows": ("Texts that can be decoded together.", self.engine.max_batch_size),
            "cache_bytes": ("Allocated key-value cache.", cache.bytes),
            "cache_limit_bytes": ("Its largest size.", cache.max_bytes or 0),
        }
        for name, kind, help, value in self.metrics.families():
            exposition.add(name, kind, help, value, model=self.name)
        for name, (help, value) in gauges.items():
            exposition.add(name, "gauge", help, value, model=self.name)


PARAMS = {
    "loops": "num_loops",
    "draft_loops": "draft",
    "max_new_tokens": "max_tokens",
    "stop_tokens": "stop_token_ids",
}
"""Fields by the engine's names."""


def _cache_bytes(model: LanguageModel, settings: ServerSettings, share: float) -> int | None:
    if settings.cache_gib is not None:
        return int(settings.cache_gib * 2**30)
    free = available_memory(model.device)
    return None if free is None else int(share * free)


class ChatTemplate:
    """Turns messages into token ids: by the tokenizer's template, or as `User: ...` lines."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        special: Mapping[str, str] | None = None,
    ) -> None:
        """`special`: the names of special tokens that a template writes, such as `eos_token`."""
        self._tokenizer, self._special = tokenizer, dict(special or {})
        self._template = None if template is None else _compiled(template)
        self.stop = () if template is not None else ("\nUser:", "\nSystem:")
        eos = tokenizer.backend_tokenizer.token_to_id(self._special.get("eos_token", "<|eos|>"))
        self.stop_tokens = () if eos is None else (eos,)
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
        names = sorted((token.content for token in added if token.special), key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)) or "(?!)")

    @classmethod
    def read(cls, folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
        """The template beside a tokenizer, in chat_template.jinja or tokenizer_config.json."""
        path, file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        try:
            config = read_json(path) if path.exists() else {}
            template = config.get("chat_template")
            if file.exists():
                template = read_text(file)
            if isinstance(template, list):  # several by name
                named = {entry["name"]: entry["template"] for entry in template}
                template = named.get("default")
            names = [key for key in config if key.endswith("_token")]
            return cls(tokenizer, template, {key: _content(config[key]) for key in names})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"no valid chat template ({type(error).__name__})"
            raise FileError(f"{folder}: {problem}. Correct or remove it.") from None

    def encode(self, messages: Sequence[Message]) -> list[int]:
        if self._template is None:
            lines = [f"{PLAIN_NAMES[message.role]}: {message.text}\n" for message in messages]
            return [self._tokenizer.bos, *self._tokenizer.encode("".join(lines) + "Assistant:")]
        # Only the template writes special tokens: their names in a message are marked as text.
        start, end = (str(secrets.randbits(64)) for _ in range(2))
        given = [
            {"role": message.role, "content": self._names.sub(rf"{start}\g<0>{end}", message.text)}
            for message in messages
        ]
        try:
            text = self._template.render(
                messages=given, add_generation_prompt=True, **self._special
            )
        except Exception:  # a template is a program, and raises errors of all kinds
            raise invalid("messages", "The model's chat template refuses these.") from None
        parts = re.split(f"{start}(.*?){end}", text, flags=re.DOTALL)
        return [
            token
            for number, part in enumerate(parts)
            for token in self._tokenizer.encode(part, allow_special=number % 2 == 0)
        ]


def _compiled(template: str) -> Any:
    """Sandboxed: a template is part of a model's files, and no code of those may run.

    Not optimised, since that computes its constants, such as 9 ** 9 ** 9.
    """
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, optimized=False
    )
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(template)
    except Exception as error:  # of any kind, where it is nested too deeply
        raise ValueError(str(error)) from None


def _content(token: Any) -> str:
    """The text of a special token, which a file writes as text or as an object."""
    return token["content"] if isinstance(token, dict) else str(token)


def open_models(
    models: Sequence[str | Path] | Mapping[str, Checkpoint | str | Path],
    settings: ServerSettings,
    *,
    device: str | torch.device = "auto",
    **engine_options: Any,
) -> dict[str, ServedModel]:
    """Models by name, from `NAME=PATH` or paths, or from a mapping of names. "demo" is the run of
    `make demo`. `device`: where models that are opened from a path run."""
    named = models if isinstance(models, Mapping) else dict(map(_named, map(str, models)))
    require(bool(named), "models", "none is given", "Give a checkpoint, or demo.")
    same = isinstance(models, Mapping) or len(named) == len(models)
    require(same, "models", "two have the same name", "Write NAME=PATH.")
    served = {}
    for name, source in named.items():
        checkpoint = source
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = open_checkpoint(checkpoint, device=device)
        chat = ChatTemplate(checkpoint.tokenizer)
        if not isinstance(source, Checkpoint):
            chat = ChatTemplate.read(find_tokenizer(checkpoint.folder), checkpoint.tokenizer)
        served[name] = ServedModel(
            name,
            checkpoint.model,
            checkpoint.tokenizer,
            settings,
            chat=chat,
            memory_share=0.5 / len(named),
            **engine_options,
        )
    return served


def _named(argument: str) -> tuple[str, str | Path]:
    name, equals, path = argument.partition("=")
    if equals and name and not Path(argument).exists():
        return name, path
    if argument == "demo" and not Path(argument).exists():
        if not DEMO.exists():
            raise FileError(f"{DEMO}: no such run. `make demo` trains it in minutes.")
        return "demo", DEMO
    folder = find_checkpoint(argument)
    return (run_of(folder) or folder).absolute().name, argument

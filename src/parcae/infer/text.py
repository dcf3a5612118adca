"""From a stream of ids to a stream of text: whole characters, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from parcae.data.tokenizer import Tokenizer


class TextStream:
    """`push` returns the text that has become certain; `finish` what was held back.

    The stop string that is complete first ends the text, of several the longest; so how the text is
    cut into tokens does not matter.

    A character whose bytes are spread over several tokens comes out with the last of them, and text
    that may be the beginning of a stop string comes out when it turns out not to be.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._bytes = tokenizer.token_bytes
        self._ids: list[int] = []
        self._spelled = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False
        """A stop string has appeared; everything from its first letter on is dropped."""

    def push(self, token: int) -> str:
        if not self._tokenizer.is_byte_level:
            return self._release(self._decode_again(token))
        # A model's vocabulary may have room that its tokenizer does not use.
        spelled = self._bytes[token] if token < len(self._bytes) else b""
        return self._release(self._decoder.decode(spelled))

    def _decode_again(self, token: int) -> str:
        """What a token adds, where tokens do not spell bytes one by one."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\ufffd"):
            return ""
        new, self._spelled = text[self._spelled :], len(text)
        return new

    def finish(self) -> str:
        text = self._release(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return text if self.stopped else text + rest

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        places = [(text.find(stop), stop) for stop in self._stops]
        found = [(place + len(stop), place) for place, stop in places if place >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` with which `stop` begins."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)

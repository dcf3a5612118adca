"""A loader's state: plain values that name a position and what it is a position in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parcae.config import ConfigError, require
from parcae.data.plan import Position, SourcePosition


def write_state(identity: Mapping[str, Any], position: Position) -> dict[str, Any]:
    """`identity` holds what must be the same for a position to mean the same rows."""
    sources = [
        {**source, **reached._asdict()}
        for source, reached in zip(identity["sources"], position.sources, strict=True)
    ]
    return {**identity, "step": position.step, "sources": sources}


def read_state(
    state: Mapping[str, Any], identity: Mapping[str, Any], blocks: Sequence[int]
) -> Position:
    """The position, if the state belongs to this identity; `blocks` counts each source's blocks."""
    try:
        saved = {name: state[name] for name in identity if name != "sources"}
        sources = list(state["sources"])
        for name, value in saved.items():
            _require_same(name, value, identity[name])
        _require_same("number of sources", len(sources), len(identity["sources"]))
        for source, expected in zip(sources, identity["sources"], strict=True):
            for name, value in expected.items():
                _require_same(f"{name} of source {expected['name']}", source[name], value)
        position = Position(
            int(state["step"]),
            tuple(
                SourcePosition(**{name: int(source[name]) for name in SourcePosition._fields})
                for source in sources
            ),
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"loader state: {error} is missing or not what a loader writes. "
            "Use the value of state_dict() as it was."
        ) from None
    _check_position(position, identity["global_batch"], blocks)
    return position


def _require_same(name: str, saved: object, mine: object) -> None:
    require(
        saved == mine,
        f"loader state, {name}",
        f"saved with {saved!r}, but this loader has {mine!r}, and the rows would not be the same",
        "Use the same documents and settings, or start without the state.",
    )


def _check_position(position: Position, global_batch: int, blocks: Sequence[int]) -> None:
    rows = sum(source.rows_read for source in position.sources)
    sound = rows == position.step * global_batch and all(
        min(source) >= 0 and source.block < count
        for source, count in zip(position.sources, blocks, strict=True)
    )
    require(
        sound, "loader state", f"{position} cannot be", "It is damaged; use another checkpoint."
    )

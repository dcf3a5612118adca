"""A loader's state: plain values that name a position and what it is a position in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from parcae.config import require
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
    for name, mine in identity.items():
        if name != "sources":
            _require_same(name, _entry(state, name), mine)
    sources = _entry(state, "sources")
    require(isinstance(sources, list), "loader state, sources", "not a list", _REMEDY)
    _require_same("number of sources", len(sources), len(identity["sources"]))
    for source, expected in zip(sources, identity["sources"], strict=True):
        for name, mine in expected.items():
            _require_same(f"{name} of source {expected['name']}", _entry(source, name), mine)
    position = Position(
        _count(state, "step"),
        tuple(
            SourcePosition(*(_count(source, name) for name in SourcePosition._fields))
            for source in sources
        ),
    )
    _check_position(position, identity["global_batch"], blocks)
    return position


_REMEDY = "Use what state_dict() gave, or another checkpoint."


def _entry(state: object, name: str) -> Any:
    found = isinstance(state, Mapping) and name in state
    require(found, f"loader state, {name}", "missing", _REMEDY)
    return cast(Mapping[str, Any], state)[name]


def _count(state: object, name: str) -> int:
    value = _entry(state, name)
    whole = isinstance(value, int) and value >= 0
    require(whole, f"loader state, {name}", f"{value!r} is not a whole number", _REMEDY)
    return value


def _require_same(name: str, saved: object, mine: object) -> None:
    require(
        saved == mine,
        f"loader state, {name}",
        f"saved with {saved!r}, but this loader has {mine!r}, and the rows would not be the same",
        "Use the same documents and settings, or start without the state.",
    )


def _check_position(position: Position, global_batch: int, blocks: Sequence[int]) -> None:
    rows = sum(source.rows_read for source in position.sources)
    require(
        rows == position.step * global_batch,
        "loader state, step",
        f"{position.step} steps of {global_batch} rows are not the {rows} rows read",
        _REMEDY,
    )
    for number, (source, count) in enumerate(zip(position.sources, blocks, strict=True)):
        require(
            source.block < count,
            "loader state, block",
            f"source {number} has {count} blocks, and this is number {source.block}",
            _REMEDY,
        )

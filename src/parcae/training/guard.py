"""What to do when numbers go wrong: skip a bad step, notice spikes, give up with a diagnosis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

SPIKE_DEVIATIONS = 6.0
SPIKE_COUNTS_AS = 3.0
"""Deviations by which a spike moves what is usual."""
SMOOTHING = 0.98
STEPS_BEFORE_SPIKES = 50
"""At the start the loss falls too fast for its mean to say what is usual."""
EXPLODED = 100.0


@dataclass
class Guard:
    """Counts over a run; plain numbers, so that a checkpoint can hold them."""

    bad_steps_in_a_row: int
    bad: int = 0
    skipped: int = 0
    spikes: int = 0
    seen: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def state(self) -> dict[str, Any]:
        state = asdict(self)
        del state["bad_steps_in_a_row"]
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        for name in self.state():
            setattr(self, name, state[name])

    def accepts(self, loss: float, gradient_norm: float) -> bool:
        """Whether the step may be taken."""
        if math.isfinite(loss) and math.isfinite(gradient_norm):
            self.bad = 0
            return True
        self.bad += 1
        self.skipped += 1
        return False

    @property
    def is_hopeless(self) -> bool:
        """Too many steps in a row without a finite loss or gradient."""
        return self.bad >= self.bad_steps_in_a_row

    def is_spike(self, loss: float) -> bool:
        """Whether an accepted loss stands far above its running mean.

        A spike counts as far less than it is, so that it hardly makes the next one look usual, but
        a loss that stays up is usual after a while.
        """
        deviation = loss - self.mean
        usual = max(math.sqrt(self.variance), 1e-3 * abs(self.mean))
        spike = self.seen >= STEPS_BEFORE_SPIKES and deviation > SPIKE_DEVIATIONS * usual
        weight = max(1 - SMOOTHING, 1 / (self.seen + 1))
        if spike:
            deviation = SPIKE_COUNTS_AS * usual
        self.mean += weight * deviation
        self.variance = (1 - weight) * (self.variance + weight * deviation**2)
        self.seen += 1
        self.spikes += spike
        return spike


def diagnose(
    now: Mapping[str, Any] | None, before: Mapping[str, Any] | None, lr: Mapping[str, float]
) -> str:
    """Name the suspect, from telemetry at the last good weights and at the run's beginning."""
    rates = ", ".join(f"{name} {value:.3g}" for name, value in lr.items())
    if now is None:
        return f"No loop to suspect; the learning rate ({rates}) is the first thing to lower."
    radius, norm = now["spectral_radius"], now["state_norm"]
    if radius is None or norm is None or not math.isfinite(norm):
        return (
            "The state itself is no longer finite at full depth: the loop has exploded. "
            "Use the diagonal injection with the prelude norm, or a lower learning rate "
            f"({rates})."
        )
    if radius > 1:
        return (
            f"The loop's linear part expands: spectral radius {radius:.3f}, state norm {norm:.3g}. "
            "Use the diagonal injection, whose radius stays below 1, or a lower learning rate "
            f"({rates})."
        )
    # Without an earlier look, the first loop's state says what would be usual.
    start = (now["state_norms"][0] if before is None else before["state_norm"]) or 0.0
    if norm > EXPLODED * max(start, 1e-9):
        return (
            f"The state norm grew from {start:.3g} to {norm:.3g} although the linear part does not "
            f"expand (spectral radius {radius:.3f}): what is injected has grown. "
            "Use the prelude norm, or a lower learning rate "
            f"({rates})."
        )
    return (
        f"The loop looks sound (spectral radius {radius:.3f}, state norm {norm:.3g}), so suspect "
        f"the learning rate ({rates}): lower it, or warm it up."
    )

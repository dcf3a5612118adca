"""Bad numbers: skip a step that is not finite, count loss spikes, stop with a diagnosis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from parcae.files import number

StepVerdict = Literal["ok", "spike", "skip"]

SPIKE_DEVIATIONS = 6.0
SPIKE_CLIP_DEVIATIONS = 3.0
"""Standard deviations by which a spike changes the running mean."""
LOSS_EMA_DECAY = 0.98
STEPS_BEFORE_SPIKES = 50
"""Before that the loss falls too fast for a running mean to describe it."""
STATE_GROWTH_LIMIT = 100.0
"""Growth of the state's norm since the start of a run that is named as the cause."""


@dataclass
class Guard:
    """Counts over a run, as plain numbers that a checkpoint stores."""

    max_nonfinite_steps: int
    consecutive_bad_steps: int = 0
    skipped: int = 0
    spikes: int = 0
    steps_seen: int = 0
    loss_mean: float = 0.0
    loss_variance: float = 0.0

    def state(self) -> dict[str, Any]:
        state = asdict(self)
        del state["max_nonfinite_steps"]
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        for name in self.state():
            setattr(self, name, number(state[name]))

    def record(self, loss: float, gradient_norm: float) -> StepVerdict:
        """Count a step; "skip" if it must not be taken, "spike" if its loss is far above the mean.

        Call it once for every step.
        """
        if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
            self.consecutive_bad_steps += 1
            self.skipped += 1
            return "skip"
        self.consecutive_bad_steps = 0
        return "spike" if self._add_loss(loss) else "ok"

    @property
    def has_diverged(self) -> bool:
        """Too many steps in a row without a finite loss or gradient."""
        return self.consecutive_bad_steps >= self.max_nonfinite_steps

    def _add_loss(self, loss: float) -> bool:
        """Add a finite loss to the running mean and variance; returns whether it is a spike.

        A spike enters the running mean clipped, so that it hardly hides the next one, while a loss
        that stays high becomes the new mean.
        """
        deviation = loss - self.loss_mean
        scale = max(math.sqrt(self.loss_variance), 1e-3 * abs(self.loss_mean))
        spike = self.steps_seen >= STEPS_BEFORE_SPIKES and deviation > SPIKE_DEVIATIONS * scale
        weight = max(1 - LOSS_EMA_DECAY, 1 / (self.steps_seen + 1))
        if spike:
            deviation = SPIKE_CLIP_DEVIATIONS * scale
        self.loss_mean += weight * deviation
        self.loss_variance = (1 - weight) * (self.loss_variance + weight * deviation**2)
        self.steps_seen += 1
        self.spikes += spike
        return spike


def diagnose(
    now: Mapping[str, Any] | None, before: Mapping[str, Any] | None, lr: Mapping[str, float]
) -> str:
    """The likely cause, from telemetry at the last good weights and at the start of the run."""
    rates = ", ".join(f"{name} {value:.3g}" for name, value in lr.items())
    if now is None:
        return f"The model has no loop; lower the learning rate ({rates})."
    norm = now["state_norm"]
    radius = now.get("spectral_radius", math.nan)  # not defined where A depends on the input
    if radius is None or norm is None or not math.isfinite(norm):
        return (
            "The state is not finite at full depth: the loop has diverged. "
            "Use the diagonal injection with the prelude norm, or a lower learning rate "
            f"({rates})."
        )
    if radius > 1:
        return (
            f"The loop's linear part expands: spectral radius {radius:.3f}, state norm {norm:.3g}. "
            "Use the diagonal injection, whose radius stays below 1, or a lower learning rate "
            f"({rates})."
        )
    # Without earlier telemetry, the state after the first loop is the reference.
    start = (now["state_norms"][0] if before is None else before["state_norm"]) or 0.0
    is_defined = not math.isnan(radius)
    if norm > STATE_GROWTH_LIMIT * max(start, 1e-9):
        cause = ": A, which depends on the input, or"
        if is_defined:
            cause = f" although the linear part does not expand (spectral radius {radius:.3f}):"
        return (
            f"The state norm grew from {start:.3g} to {norm:.3g}{cause} the injected input has "
            "grown. "
            "Use the prelude norm, or a lower learning rate "
            f"({rates})."
        )
    about = f"spectral radius {radius:.3f}, " if is_defined else ""
    return (
        f"The loop is stable ({about}state norm {norm:.3g}): lower the "
        f"learning rate ({rates}), or warm it up."
    )

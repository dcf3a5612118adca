"""The functional forms of the laws: a floor plus decaying terms.

    training        E + X N(mu)^-x + Y D^-y
    chinchilla      E + A N^-alpha + B D^-beta
    exponential     L_inf + Z exp(-z T)              test-time forms, one fit per run
    shifted-power   L_inf + Z (1 + T)^-z
    power           L_inf + Z T^-z
    pure-power      Z T^-z
    unified         training + Z exp(-z T / mu), or with mu^gamma, or without mu

Every term is exp(a - r u) with a the log of its amplitude, r its rate and u a feature of the points
(log N, log D, T, log T, T / mu), so one implementation serves all laws and their gradients.
Positive parameters are optimised as their logarithms. All arrays are batched: coordinates have the
shape [parameters, rows], where a row is a random start or a bootstrap sample; losses have the shape
[rows, points].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from parcae.laws.model_runs import Points

TINY = 1e-300
"""Lower bound of a parameter before its logarithm is taken."""
Feature = Callable[[Points], np.ndarray]


@dataclass(frozen=True)
class Decay:
    """amplitude * exp(-rate * feature); with the feature log(v) the power law v^-rate."""

    amplitude: str
    rate: str
    feature: Feature
    is_centred: bool
    """Whether the amplitude is parameterised at the centre of the points: True for N and D, whose
    zero is 20 orders of magnitude away, False for T, which is measured near zero."""
    exponent: str | None = None
    """Name of gamma, if the rate of a run is rate * mean_loops^-gamma."""

    @property
    def parameters(self) -> tuple[str, ...]:
        names = (self.amplitude, self.rate)
        return names if self.exponent is None else (*names, self.exponent)


@dataclass(frozen=True)
class Law:
    """A functional form with named parameters."""

    name: str
    formula: str
    floor: str | None
    decays: tuple[Decay, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        floor = () if self.floor is None else (self.floor,)
        return (*floor, *(name for decay in self.decays for name in decay.parameters))

    @property
    def exponents(self) -> tuple[str, ...]:
        """Parameters that may be negative, and are not optimised as logarithms."""
        return tuple(decay.exponent for decay in self.decays if decay.exponent)

    def coordinates(self, values: Mapping[str, float | np.ndarray]) -> np.ndarray:
        """Coordinates [parameters, rows]: logarithms of the positive parameters."""
        columns = [
            np.atleast_1d(np.asarray(values[name], dtype=float))
            if name in self.exponents
            else np.log(np.maximum(np.atleast_1d(np.asarray(values[name], dtype=float)), TINY))
            for name in self.parameters
        ]
        return np.stack(np.broadcast_arrays(*columns))

    def values(self, coordinates: np.ndarray) -> dict[str, np.ndarray]:
        """Parameter values by name, one per row: the inverse of `coordinates`."""
        with np.errstate(over="ignore"):
            return {
                name: row.copy() if name in self.exponents else np.exp(row)
                for name, row in zip(self.parameters, coordinates, strict=True)
            }

    def predict(self, values: Mapping[str, float | np.ndarray], at: Points) -> np.ndarray:
        """Losses [rows, points], or [points] if every value is a single number."""
        single = all(np.ndim(values[name]) == 0 for name in self.parameters)
        with np.errstate(over="ignore", invalid="ignore"):  # an infinite rate: its term is 0
            losses, _ = self.bind(at).forward(self.coordinates(values))
        return losses[0] if single else losses

    def bind(self, at: Points, *, standardised: bool = False) -> BoundLaw:
        """The law at given points, for many rows of coordinates."""
        return BoundLaw(self, at, standardised)


class BoundLaw:
    """A law at given points.

    Standardised coordinates belong to the features (u - centre) / scale, in which all directions
    are about equally steep; `to_plain` and `from_plain` convert exactly.
    """

    def __init__(self, law: Law, at: Points, standardised: bool) -> None:
        self.law = law
        self.terms = []
        first = 0 if law.floor is None else 1
        for decay in law.decays:
            self.terms.append(_Term(decay, first, at, standardised))
            first += len(decay.parameters)

    def forward(self, theta: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Losses [rows, points] and their terms, each [rows, points]."""
        terms = [term.forward(theta) for term in self.terms]
        losses = terms[0].copy() if len(terms) == 1 else terms[0] + terms[1]
        for more in terms[2:]:
            losses += more
        if self.law.floor is not None:
            losses += np.exp(theta[0])[:, None]
        return losses, terms

    def backward(
        self, theta: np.ndarray, terms: list[np.ndarray], weights: np.ndarray
    ) -> np.ndarray:
        """The gradient [parameters, rows] of sum(weights * losses); overwrites `terms`."""
        gradient = np.empty_like(theta)
        if self.law.floor is not None:
            gradient[0] = np.exp(theta[0]) * weights.sum(1)
        for term, values in zip(self.terms, terms, strict=True):
            values *= weights
            gradient[term.rows] = term.backward(theta, values)
        return gradient

    def derivatives(self, theta: np.ndarray, terms: list[np.ndarray]) -> list[np.ndarray]:
        """Derivatives of the losses: one array [rows, points] per parameter."""
        floor = (
            [] if self.law.floor is None else [np.exp(theta[0])[:, None] * np.ones_like(terms[0])]
        )
        return floor + [
            derivative
            for term, values in zip(self.terms, terms, strict=True)
            for derivative in term.derivatives(theta, values)
        ]

    def to_plain(self, theta: np.ndarray) -> np.ndarray:
        plain = theta.copy()
        for term in self.terms:
            term.to_plain(plain)
        return plain

    def from_plain(self, plain: np.ndarray) -> np.ndarray:
        theta = plain.copy()
        with np.errstate(over="ignore", invalid="ignore"):
            for term in self.terms:
                term.from_plain(theta)
        return theta


class _Term:
    """exp(a - r u) over rows and points, where u = (feature - centre) / scale."""

    def __init__(self, decay: Decay, first: int, at: Points, standardised: bool) -> None:
        feature = decay.feature(at)
        self.rows = slice(first, first + len(decay.parameters))
        self.centre = float(feature.mean()) if standardised and decay.is_centred else 0.0
        spread = float(feature.std()) if standardised else 1.0
        self.scale = spread if spread > 0 else 1.0
        self.feature = (feature - self.centre) / self.scale
        self.log_loops = None
        self.log_centre = 0.0
        if decay.exponent:
            logs = np.log(at.mean_loops)
            self.log_centre = float(logs.mean()) if standardised else 0.0
            self.log_loops = logs - self.log_centre
        self._basis = np.stack([np.ones_like(self.feature), -self.feature])

    def forward(self, theta: np.ndarray) -> np.ndarray:
        own = theta[self.rows]
        if self.log_loops is None:
            logs = np.array([own[0], np.exp(own[1])]).T @ self._basis
        else:
            logs = own[0][:, None] - self._decline(own)
        return np.exp(logs, out=logs)

    def backward(self, theta: np.ndarray, weighted: np.ndarray) -> np.ndarray:
        """Sums over the points of the derivatives; `weighted` is weights times values."""
        own = theta[self.rows]
        if self.log_loops is None:
            sums = (weighted @ self._basis.T).T
            sums[1] *= np.exp(own[1])
            return sums
        declining = self._decline(own) * weighted
        return np.array([weighted.sum(1), -declining.sum(1), declining @ self.log_loops])

    def derivatives(self, theta: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
        own = theta[self.rows]
        if self.log_loops is None:
            return [values, -values * np.exp(own[1])[:, None] * self.feature]
        declining = self._decline(own) * values
        return [values, -declining, declining * self.log_loops]

    def _decline(self, own: np.ndarray) -> np.ndarray:
        """Rate times feature, with the rate at each point's mean_loops."""
        return np.exp(own[1][:, None] - own[2][:, None] * self.log_loops) * self.feature

    def to_plain(self, theta: np.ndarray) -> None:
        own = theta[self.rows]  # a view
        own[1] -= np.log(self.scale)
        own[0] += np.exp(own[1]) * self.centre
        if self.log_loops is not None:
            own[1] += own[2] * self.log_centre

    def from_plain(self, theta: np.ndarray) -> None:
        own = theta[self.rows]
        if self.log_loops is not None:
            own[1] -= own[2] * self.log_centre
        own[0] -= np.exp(own[1]) * self.centre
        own[1] += np.log(self.scale)


def _log_params(at: Points) -> np.ndarray:
    return np.log(at.effective_params)


def _log_tokens(at: Points) -> np.ndarray:
    return np.log(at.tokens)


def _loops(at: Points) -> np.ndarray:
    return at.test_loops


def _log_loops(at: Points) -> np.ndarray:
    return np.log(at.test_loops)


def _log_one_more_loop(at: Points) -> np.ndarray:
    return np.log1p(at.test_loops)


def _relative_loops(at: Points) -> np.ndarray:
    return at.test_loops / at.mean_loops


COLUMN: Mapping[Feature, str] = {_log_params: "effective_params", _log_tokens: "tokens"}
"""The table column of a feature; test_loops for all others."""

_TRAINING_TERMS = (Decay("X", "x", _log_params, True), Decay("Y", "y", _log_tokens, True))

TRAINING = Law("training", "E + X N(μ)^-x + Y D^-y", "E", _TRAINING_TERMS)
CHINCHILLA = Law(
    "chinchilla",
    "E + A N^-α + B D^-β",
    "E",
    (Decay("A", "alpha", _log_params, True), Decay("B", "beta", _log_tokens, True)),
)


def _test_time(name: str, formula: str, feature: Feature, floor: str | None = "L_inf") -> Law:
    return Law(name, formula, floor, (Decay("Z", "z", feature, False),))


EXPONENTIAL = _test_time("exponential", "L∞ + Z exp(-z T)", _loops)
SHIFTED_POWER = _test_time("shifted-power", "L∞ + Z (1+T)^-z", _log_one_more_loop)
POWER = _test_time("power", "L∞ + Z T^-z", _log_loops)
PURE_POWER = _test_time("pure-power", "Z T^-z", _log_loops, floor=None)
TEST_TIME = (EXPONENTIAL, SHIFTED_POWER, POWER, PURE_POWER)


def _unified(name: str, decay: str, last: Decay) -> Law:
    return Law(name, f"{TRAINING.formula} + {decay}", "E", (*_TRAINING_TERMS, last))


UNIFIED = _unified("unified", "Z exp(-z T / μ)", Decay("Z", "z", _relative_loops, is_centred=False))
UNIFIED_GAMMA = _unified(
    "unified-gamma", "Z exp(-z T μ^-γ)", Decay("Z", "z", _loops, False, exponent="gamma")
)
UNIFIED_PLAIN = _unified("unified-plain", "Z exp(-z T)", Decay("Z", "z", _loops, is_centred=False))
CONDITIONINGS = (UNIFIED_GAMMA, UNIFIED, UNIFIED_PLAIN)

LAWS: Mapping[str, Law] = {
    law.name: law for law in (TRAINING, CHINCHILLA, *TEST_TIME, *CONDITIONINGS)
}

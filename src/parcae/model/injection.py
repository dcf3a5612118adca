"""How the prelude's output e enters every loop: the linear part of the dynamical system.

One loop computes h_t = Blocks(x_t) with

    x_t = A_bar h_{t-1} + B_bar e                                        (the LTI part, eq. 1)

and the choice of A_bar decides whether the state can blow up (the paper's stability table):

    injection        A_bar                        B_bar      rho(A_bar)   by construction
    diagonal         ZOH(Diag(-exp(log_A)))       Euler(B)   < 1          stable
    addition         I                            I          = 1          marginally stable
    concatenation    W_1 of W = [W_1 W_2]         W_2        anything     unstable

`prepare(e)` computes once per forward what is the same in all loops: the discretisation and B e.
`mix(h, ...)` is the rest, in every loop. Injections from outside the package are subclasses of
`Injection`, registered by `parcae.register_injection`; see docs/extending.md. A built-in one is a
class here and a line in `registry.INJECTIONS`.
"""

from __future__ import annotations

import math
import traceback
from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parcae.config import ConfigError, ModelConfig
from parcae.model.precision import wide
from parcae.registry import INJECTIONS

Stability = Literal["stable", "marginally stable", "unstable", "not guaranteed"]

INITIAL_DECAY = math.sqrt(1 / 5)
_MAX_LOG_RATE = 20.0
"""exp(-exp(20)) is zero in every float format; a cap keeps its gradient from becoming inf * 0."""


class Injection(nn.Module, ABC):
    """Base class of x = A_bar h + B_bar e, with which every loop begins.

    A subclass creates its parameters in `__init__`, calling `super().__init__(config)` first, and
    defines `prepare` and `mix`. Everything else has a default: initial values, the matrices (from
    which spectral radius and telemetry follow) and the count of FLOPs. AdamW optimises the
    parameters, where the optimiser is `muon-adamw`.
    """

    stability: Stability = "not guaranteed"
    """What the parameterisation guarantees, whatever values it learns."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width = config.width
        """d_e: channels of e."""
        self.state_width = config.core_block.width
        """d_h: channels of h."""

    @abstractmethod
    def prepare(self, e: Tensor) -> tuple[Any, Tensor]:
        """(transition, drive) from e [B, S, d_e], once per forward.

        `transition` is A_bar in the form `mix` needs, a tensor that does not depend on e, or None
        where `mix` needs none. `drive` [B, S, any] is usually B_bar e; an A_bar that depends on e
        is a part of it.
        """

    @abstractmethod
    def mix(self, h: Tensor, transition: Any, drive: Tensor) -> Tensor:
        """x = A_bar h + drive [B, S, d_h], from the state h [B, S, d_h], in every loop."""

    def forward(self, e: Tensor) -> tuple[Tensor, Tensor]:
        """`prepare`, with the hooks of the module."""
        return self.prepare(e)

    def init_weights(self, std: float, generator: torch.Generator) -> None:
        """Set every parameter. The default: matrices N(0, std^2), vectors zero.

        `std` is sqrt(2 / 5 d_e), the scale of the model's other projections.
        """
        for parameter in self.parameters():
            if parameter.ndim >= 2:
                nn.init.normal_(parameter, std=std, generator=generator)
            else:
                nn.init.zeros_(parameter)

    @cached_property
    def depends_on_input(self) -> bool:
        """Whether dx/dh depends on e or h, so that there is no A_bar that holds for every input.

        Found from the graph of derivatives, so it does not depend on the parameters' values.
        """
        e = torch.zeros(1, 2, self.width, **self._like()).requires_grad_()
        h = torch.zeros(1, 2, self.state_width, **self._like()).requires_grad_()
        with torch.enable_grad():
            x = self.mix(h, *self.prepare(e))
            (slope,) = torch.autograd.grad(x.sum(), h, create_graph=True, allow_unused=True)
            if slope is None or not slope.requires_grad:
                return False
            return any(
                of is not None for of in torch.autograd.grad(slope.sum(), (e, h), allow_unused=True)
            )

    def transition_matrix(self) -> Tensor | None:
        """A_bar, dense [d_h, d_h]; None, not defined, where it depends on the input.

        The default applies the injection to unit vectors. One that is not linear in h may return
        its linearisation.
        """
        if self.depends_on_input:
            return None
        h = torch.eye(self.state_width, **self._like())[None]
        prepared = self.prepare(h.new_zeros(1, self.state_width, self.width))
        return (self.mix(h, *prepared) - self.mix(torch.zeros_like(h), *prepared))[0].T

    def input_matrix(self) -> Tensor:
        """B_bar, dense [d_h, d_e]; by default from unit vectors, with h = 0."""
        e = torch.eye(self.width, **self._like())[None]
        h = e.new_zeros(1, self.width, self.state_width)
        x = self.mix(h, *self.prepare(e)) - self.mix(h, *self.prepare(torch.zeros_like(e)))
        return x[0].T

    @torch.no_grad()
    def matrix_entries(self) -> tuple[int, int]:
        """Matrix entries that a token is multiplied with: once per forward, and in every loop.

        FLOPs are counted from them (see `model/flops.py`). The default counts the matrix products
        that `prepare` and `mix` execute for one more token.
        """
        (once, each_loop), (twice, each_loop_twice) = self._product_flops(1), self._product_flops(2)
        return (twice - once) // 2, (each_loop_twice - each_loop) // 2

    @torch.no_grad()
    def spectral_radius(self) -> float:
        """Largest |eigenvalue| of A_bar; NaN where it is not defined."""
        matrix = self.transition_matrix()
        if matrix is None:
            return math.nan
        eigenvalues = torch.linalg.eigvals(matrix.cpu().double())
        return eigenvalues.abs().max().item()

    def _product_flops(self, tokens: int) -> tuple[int, int]:
        """FLOPs of the matrix products in `prepare` and in `mix`."""
        from torch.utils.flop_counter import FlopCounterMode

        e = torch.zeros(1, tokens, self.width, **self._like())
        h = torch.zeros(1, tokens, self.state_width, **self._like())
        with FlopCounterMode(display=False) as preparing:
            prepared = self.prepare(e)
        with FlopCounterMode(display=False) as mixing:
            self.mix(h, *prepared)
        return preparing.get_total_flops(), mixing.get_total_flops()

    def _like(self) -> dict[str, Any]:
        """Device and type of the parameters."""
        parameter = next(self.parameters(), torch.empty(0))
        return {"device": parameter.device, "dtype": parameter.dtype}


def log_softplus(x: Tensor) -> Tensor:
    """log(log(1 + e^x)), finite for every finite x: for very negative x softplus(x) is e^x."""
    left = x < -15.0
    return torch.where(left, x, F.softplus(x.masked_fill(left, 0.0)).log())


def decay_rate(log_A: Tensor, dt_bias: Tensor) -> Tensor:
    """-log(A_bar) = step * exp(log_A), the product taken as a sum of logarithms.

    Multiplied directly, a step that underflows to 0 times an exp(log_A) that overflows is NaN.
    """
    log_rate = log_A.to(wide(log_A.dtype)) + log_softplus(dt_bias.to(wide(dt_bias.dtype)))
    return log_rate.clamp(max=_MAX_LOG_RATE).exp()


def zoh_euler(log_A: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The paper's choice: A_bar = exp(step A), B_bar = step B. Returns (A_bar, gain of B)."""
    return (-decay_rate(log_A, dt_bias)).exp(), F.softplus(dt_bias.to(wide(dt_bias.dtype)))


def zoh(log_A: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Zero-order hold for both: B_bar = (step A)^-1 (exp(step A) - 1) step B."""
    rate = decay_rate(log_A, dt_bias)
    small = rate < 1e-4  # (1 - e^-r) / r by its series, where the quotient would lose digits
    safe = rate.masked_fill(small, 1.0)
    shrink = torch.where(small, 1 - rate / 2, -torch.expm1(-safe) / safe)
    return (-rate).exp(), F.softplus(dt_bias.to(wide(dt_bias.dtype))) * shrink


DISCRETISATIONS = {"zoh-euler": zoh_euler, "zoh": zoh}


class DiagonalInjection(Injection):
    """A = Diag(-exp(log_A)) < 0, discretised with a positive step: A_bar lies in (0, 1).

    Rounded to a float format, extreme parameters give exactly 0 or 1.
    """

    stability = "stable"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.discretise = DISCRETISATIONS[config.discretisation]
        self.log_A = nn.Parameter(torch.empty(self.state_width))
        self.dt_bias = nn.Parameter(torch.empty(self.state_width))
        self.B = nn.Parameter(torch.empty(self.state_width, self.width))

    def init_weights(self, std: float, generator: torch.Generator) -> None:
        """Decay sqrt(1/5); B the identity, or orthogonal if it is not square."""
        step = -math.log(INITIAL_DECAY)
        nn.init.zeros_(self.log_A)
        nn.init.constant_(self.dt_bias, math.log(math.expm1(step)))  # softplus of it is the step
        if self.state_width == self.width:
            nn.init.eye_(self.B)
        else:
            nn.init.orthogonal_(self.B, generator=generator)

    def prepare(self, e: Tensor) -> tuple[Tensor, Tensor]:
        decay, gain = self.discretise(self.log_A, self.dt_bias)
        return decay.to(e.dtype), gain.to(e.dtype) * F.linear(e, self.B)

    def mix(self, h: Tensor, transition: Tensor, drive: Tensor) -> Tensor:
        return torch.addcmul(drive, transition, h)

    def decay(self) -> Tensor:
        """The diagonal of A_bar, in float32."""
        return self.discretise(self.log_A, self.dt_bias)[0]

    def transition_matrix(self) -> Tensor:
        return torch.diag(self.decay())

    def input_matrix(self) -> Tensor:
        return self.discretise(self.log_A, self.dt_bias)[1][:, None] * self.B

    def matrix_entries(self) -> tuple[int, int]:
        return self.state_width * self.width, 0

    @torch.no_grad()
    def spectral_radius(self) -> float:
        return self.decay().max().item()


class ConcatenationInjection(Injection):
    """x = W [h; e] of recurrent depth models. W e does not change over loops and is hoisted."""

    stability = "unstable"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.W = nn.Parameter(torch.empty(self.state_width, self.state_width + self.width))

    def prepare(self, e: Tensor) -> tuple[Tensor, Tensor]:
        return self.transition_matrix(), F.linear(e, self.input_matrix())

    def mix(self, h: Tensor, transition: Tensor, drive: Tensor) -> Tensor:
        return F.linear(h, transition).to(h.dtype) + drive  # autocast would round the state

    def transition_matrix(self) -> Tensor:
        return self.W[:, : self.state_width]

    def input_matrix(self) -> Tensor:
        return self.W[:, self.state_width :]

    def matrix_entries(self) -> tuple[int, int]:
        return self.state_width * self.width, self.state_width * self.state_width


class AdditionInjection(Injection):
    """x = h + e."""

    stability = "marginally stable"

    def prepare(self, e: Tensor) -> tuple[Tensor, Tensor]:
        return e.new_ones(1), e

    def mix(self, h: Tensor, transition: Tensor, drive: Tensor) -> Tensor:
        return h + drive

    def transition_matrix(self) -> Tensor:
        return torch.eye(self.width)

    def input_matrix(self) -> Tensor:
        return torch.eye(self.width)

    def matrix_entries(self) -> tuple[int, int]:
        return 0, 0

    def spectral_radius(self) -> float:
        return 1.0


def build_injection(config: ModelConfig) -> Injection:
    injection = INJECTIONS[config.injection](config)
    if type(injection).__module__ != __name__:
        _check(injection, config)
    return injection


def _check(injection: Any, config: ModelConfig) -> None:
    """ConfigError unless `prepare` and `mix` of a registered injection return what they should."""
    name = f"model.injection: {config.injection!r}: {type(injection).__name__}"
    if not isinstance(injection, Injection):
        raise ConfigError(f"{name} is not an injection. Subclass parcae.Injection.")
    method = "prepare"
    try:
        with torch.enable_grad():
            e = torch.zeros(1, 2, injection.width, **injection._like()).requires_grad_()
            h = torch.zeros(1, 2, injection.state_width, **injection._like())
            transition, drive = _checked_pair(injection.prepare(e), e, f"{name}.prepare returns")
            method = "mix"
            x = injection.mix(h, transition, drive)
    except ConfigError:
        raise
    except Exception as error:
        here, *below = traceback.extract_tb(error.__traceback__)
        file = (below or [here])[0].filename  # that of the method, which may fail inside PyTorch
        frame = [frame for frame in (here, *below) if frame.filename == file][-1]
        raise ConfigError(
            f"{name}.{method} fails: {type(error).__name__}: {error}. See {frame.filename}, line "
            f"{frame.lineno}."
        ) from error
    if not isinstance(x, Tensor) or x.shape != h.shape:
        raise ConfigError(
            f"{name}.mix returns {_describe(x)}. Expected: the shape of h, [batch, sequence, d_h]."
        )
    _ = injection.depends_on_input  # while nothing is sharded


def _checked_pair(prepared: Any, e: Tensor, returns: str) -> tuple[Tensor | None, Tensor]:
    if not isinstance(prepared, tuple) or len(prepared) != 2:
        raise ConfigError(f"{returns} no pair. Return (transition, drive).")
    transition, drive = prepared
    if not isinstance(drive, Tensor) or drive.ndim != 3 or drive.shape[:2] != e.shape[:2]:
        raise ConfigError(
            f"{returns} a drive of {_describe(drive)}. Expected: a tensor [batch, sequence, "
            "channels]."
        )
    if transition is None:
        return None, drive
    if not isinstance(transition, Tensor):
        raise ConfigError(
            f"{returns} a transition of {_describe(transition)}. Expected: a tensor that does not "
            "depend on e, or None."
        )
    if (
        transition.requires_grad
        and torch.autograd.grad(transition.abs().sum(), e, allow_unused=True, retain_graph=True)[0]
        is not None
    ):
        raise ConfigError(
            f"{returns} a transition that depends on e. All sequences share it: put what depends "
            "on e into drive, and return None."
        )
    return transition, drive


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"shape {list(value.shape)} for 1 sequence of 2 tokens"
    return f"type {type(value).__name__}"

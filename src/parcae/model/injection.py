"""How the prelude's output e enters every loop: the linear part of the dynamical system.

One loop computes h_t = Blocks(x_t) with

    x_t = A_bar h_{t-1} + B_bar e                                        (the LTI part, eq. 1)

and the choice of A_bar decides whether the state can blow up (the paper's stability table):

    injection        A_bar                        B_bar      rho(A_bar)   by construction
    diagonal         ZOH(Diag(-exp(log_A)))       Euler(B)   < 1          stable
    addition         I                            I          = 1          marginally stable
    concatenation    W_1 of W = [W_1 W_2]         W_2        anything     unstable

`prepare(e)` does once per forward what no loop changes: it discretises, and multiplies B e.
`mix(h, ...)` is what is left for each loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parcae.config import ModelConfig

Stability = Literal["stable", "marginally stable", "unstable"]

_MAX_LOG_RATE = 20.0
"""exp(-exp(20)) is zero in every float format; a cap keeps its gradient from becoming inf * 0."""


class Injection(nn.Module, ABC):
    """x = A_bar h + B_bar e. Subclasses say what A_bar and B_bar are."""

    stability: Stability
    """What the parameterisation guarantees, whatever values it learns."""

    @abstractmethod
    def prepare(self, e: Tensor) -> tuple[Tensor, Tensor]:
        """(transition, drive): A_bar in the form `mix` wants, and B_bar e [B, S, d_h]."""

    @abstractmethod
    def mix(self, h: Tensor, transition: Tensor, drive: Tensor) -> Tensor:
        """x = A_bar h + drive."""

    @abstractmethod
    def transition_matrix(self) -> Tensor:
        """A_bar, dense [d_h, d_h]."""

    @abstractmethod
    def input_matrix(self) -> Tensor:
        """B_bar, dense [d_h, d_e]."""

    @torch.no_grad()
    def spectral_radius(self) -> float:
        """Largest |eigenvalue| of A_bar."""
        eigenvalues = torch.linalg.eigvals(self.transition_matrix().cpu().double())
        return eigenvalues.abs().max().item()


def log_softplus(x: Tensor) -> Tensor:
    """log(log(1 + e^x)), finite for every finite x: far to the left softplus(x) is e^x itself."""
    left = x < -15.0
    return torch.where(left, x, F.softplus(x.masked_fill(left, 0.0)).log())


def decay_rate(log_A: Tensor, dt_bias: Tensor) -> Tensor:
    """-log(A_bar) = step * exp(log_A), the product taken as a sum of logarithms.

    Multiplied directly, a step that underflows to 0 times an exp(log_A) that overflows is NaN.
    """
    log_rate = log_A.float() + log_softplus(dt_bias.float())
    return log_rate.clamp(max=_MAX_LOG_RATE).exp()


def zoh_euler(log_A: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The paper's choice: A_bar = exp(step A), B_bar = step B. Returns (A_bar, gain of B)."""
    return (-decay_rate(log_A, dt_bias)).exp(), F.softplus(dt_bias.float())


def zoh(log_A: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Zero-order hold for both: B_bar = (step A)^-1 (exp(step A) - 1) step B."""
    rate = decay_rate(log_A, dt_bias)
    small = rate < 1e-4  # (1 - e^-r) / r by its series, where the quotient would lose digits
    safe = rate.masked_fill(small, 1.0)
    shrink = torch.where(small, 1 - rate / 2, -torch.expm1(-safe) / safe)
    return (-rate).exp(), F.softplus(dt_bias.float()) * shrink


DISCRETISATIONS = {"zoh-euler": zoh_euler, "zoh": zoh}


class DiagonalInjection(Injection):
    """A = Diag(-exp(log_A)) < 0, discretised with a positive step: A_bar lies in (0, 1).

    Rounded to a float format, extreme parameters give exactly 0 or 1.
    """

    stability = "stable"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.core_block.width
        self.discretise = DISCRETISATIONS[config.discretisation]
        self.log_A = nn.Parameter(torch.empty(width))
        self.dt_bias = nn.Parameter(torch.empty(width))
        self.B = nn.Parameter(torch.empty(width, config.width))

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

    @torch.no_grad()
    def spectral_radius(self) -> float:
        return self.decay().max().item()


class ConcatenationInjection(Injection):
    """x = W [h; e] of recurrent depth models. W e does not change over loops and is hoisted."""

    stability = "unstable"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.state_width = config.core_block.width
        self.W = nn.Parameter(torch.empty(self.state_width, self.state_width + config.width))

    def prepare(self, e: Tensor) -> tuple[Tensor, Tensor]:
        return self.transition_matrix(), F.linear(e, self.input_matrix())

    def mix(self, h: Tensor, transition: Tensor, drive: Tensor) -> Tensor:
        return F.linear(h, transition) + drive

    def transition_matrix(self) -> Tensor:
        return self.W[:, : self.state_width]

    def input_matrix(self) -> Tensor:
        return self.W[:, self.state_width :]


class AdditionInjection(Injection):
    """x = h + e."""

    stability = "marginally stable"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width = config.width

    def prepare(self, e: Tensor) -> tuple[Tensor, Tensor]:
        return e.new_ones(1), e

    def mix(self, h: Tensor, transition: Tensor, drive: Tensor) -> Tensor:
        return h + drive

    def transition_matrix(self) -> Tensor:
        return torch.eye(self.width)

    def input_matrix(self) -> Tensor:
        return torch.eye(self.width)

    def spectral_radius(self) -> float:
        return 1.0


INJECTIONS: dict[str, type[Injection]] = {
    "diagonal": DiagonalInjection,
    "concatenation": ConcatenationInjection,
    "addition": AdditionInjection,
}


def build_injection(config: ModelConfig) -> Injection:
    return INJECTIONS[config.injection](config)  # pyright: ignore[reportCallIssue]

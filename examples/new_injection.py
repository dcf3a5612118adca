"""A new injection in one file: pairs of channels rotate and decay, with complex eigenvalues.

python examples/new_injection.py --out runs/rotation
parcae train recipes/demo.toml --import examples/new_injection.py --model.injection rotation
parcae generate runs/rotation "def " --import examples/new_injection.py
"""

import argparse

import torch
from torch import nn

import parcae
from parcae.model import flops


@parcae.register_injection("rotation")
class RotationInjection(parcae.Injection):
    stability = "stable"  # every |eigenvalue| is a decay, below 1

    def __init__(self, config):
        super().__init__(config)
        self.log_rate = nn.Parameter(torch.empty(self.state_width // 2))
        self.angle = nn.Parameter(torch.empty(self.state_width // 2))
        self.B = nn.Parameter(torch.empty(self.state_width, self.width))

    def init_weights(self, std, generator):
        nn.init.zeros_(self.log_rate)  # decay exp(-1)
        nn.init.uniform_(self.angle, -0.5, 0.5, generator=generator)  # radians per loop
        nn.init.orthogonal_(self.B, generator=generator)

    def prepare(self, e):
        decay = torch.exp(-torch.exp(self.log_rate))
        rotation = torch.stack([decay * self.angle.cos(), decay * self.angle.sin()])
        return rotation.to(e.dtype), e @ self.B.T

    def mix(self, h, transition, drive):
        (cos, sin), (a, b) = transition, h.chunk(2, dim=-1)
        return torch.cat([cos * a - sin * b, sin * a + cos * b], dim=-1) + drive


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="runs/rotation", help="run (default: runs/rotation)")
    parser.add_argument("--steps", type=int, default=50, help="optimiser steps (default: 50)")
    args = parser.parse_args()

    model, budget = {"injection": "rotation"}, {"steps": args.steps}
    result = parcae.train("smoke", out=args.out, model=model, budget=budget)
    trained = parcae.open_checkpoint(args.out)
    cost = flops.training_flops_per_token(trained.model.config)
    radius = trained.model.loop.core.injection.spectral_radius()
    print(f"{cost:.3g} FLOPs per token, spectral radius {radius:.3f}")
    print(f"validation loss by loops: {result.losses}")
    engine = parcae.Engine(trained.model, trained.tokenizer)
    print("".join(piece.text for piece in engine.stream("def ", max_new_tokens=32)))


if __name__ == "__main__":
    main()

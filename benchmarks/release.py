"""Decoding and training beside the authors' reference release, interleaved in one run.

    git clone https://github.com/SandyResearch/parcae FOLDER
    python benchmarks/release.py FOLDER [--only decode] [--only train] [--threads 2]

Both have the same weights; before anything is timed, their logits, greedy tokens, loss and
gradients are compared. Needs transformers (pip install -e .[hf]), from which the release takes its
cache.

    decode   parcae-140m with random weights and tokens in the cache: the release's own cached
             generation, and ours with float32 and int8 matrices, with 1 and 16 sequences
    train    a step of train_step.py: forward, backward and a fused AdamW step on the same tokens
             and depths. The release runs as it is, with freed memory kept, and compiled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import decode
import parcae
import train_step
from parcae.infer.batch import Batch, Span
from parcae.infer.cache import Cache
from parcae.infer.network import AnyNetwork, open_network
from parcae.machine import keep_freed_memory
from parcae.model.depth import Depths
from parcae.model.looped import LoopedModel
from parcae.model.release_format import our_name

ROWS = (1, 16)
LOOPS = 8
RELEASE_STEPS = {
    "release": train_step.How("theirs", keeps_freed_memory=False),
    "release, freed memory kept": train_step.How("theirs"),
    "release, compiled, freed memory kept": train_step.How("theirs", compiled=True),
    "release, bfloat16 autocast, freed memory kept": train_step.How("theirs_in_bfloat16"),
}
STEPS = (
    *RELEASE_STEPS,
    "ours, eager",
    "ours, compiled",
    "ours, bfloat16, compiled",
)
TOLERANCE = 1e-4
"""Largest difference, relative to the largest value, that 20 layers in float32 may cause."""


def settings(config: parcae.ModelConfig) -> dict[str, Any]:
    """Arguments of the release's configuration for one of our models."""
    outer, core, loop = config.block, config.core_block, config.loop
    return {
        "block_size": config.context_length,
        "vocab_size": config.vocab_size,
        "padded_vocab_size": config.vocab_size,
        "n_embd": outer.width,
        "intermediate_size": outer.mlp_width,
        "num_attention_heads": outer.heads,
        "num_key_value_heads": outer.kv_heads,
        "recurrent_embedding_dimension": core.width,
        "recurrent_intermediation_embedding_dimension": core.mlp_width,
        "recurrent_num_attention_heads": core.heads,
        "n_layers_in_prelude": config.prelude_layers,
        "n_layers_in_recurrent_block": config.core_layers,
        "n_layers_in_coda": config.coda_layers,
        "injection_type": "diagonal",
        "mlp_class_name": "BaseMLP",
        "nonlin_name": "ReLU2",
        "norm_class_name": "RMSNorm",
        "norm_eps": config.norm_eps,
        "qk_norm": config.qk_norm,
        "prelude_norm": config.prelude_norm,
        "tie_embeddings": config.tied_embeddings,
        "init_strategy": "scaled-zero",
        "init_orthogonal": True,
        "skip_initialization": True,
        "state_init": "zero",
        "mean_recurrence": int(loop.mean_loops),
        "mean_backprop_depth": loop.gradient_loops,
        "sampling_scheme": "poisson-truncated-full",
        "recurrent_iteration_method": "per-sequence",
    }


def open_release(folder: Path, model: LoopedModel) -> Any:
    """The release's model, with the weights of ours."""
    sys.path.insert(0, str(folder))
    try:
        configuration = import_module("parcae_lm.models.parcae.config")
        modelling = import_module("receval.models.parcae")
    except ImportError as problem:
        raise SystemExit(f"{folder}: the release cannot be imported: {problem}") from None
    release = modelling.ModelingParcae(configuration.ParcaeConfig(**settings(model.config)))
    ours = model.state_dict()
    ours.setdefault("head.weight", ours["embed.weight"])
    weights = {
        key: table if key == "freqs_cis" else ours[str(our_name(key))]
        for key, table in release.state_dict().items()
    }
    release.load_state_dict(weights)
    return release


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def check(what: str, difference: float) -> None:
    if not difference < TOLERANCE:
        raise SystemExit(f"{what}: ours and the release's differ by {difference:.1e}")
    print(f"{what}: equal up to {difference:.1e}")


class ReleaseDecoding:
    """The release with the same prompts in its cache, which stays as long as it is."""

    def __init__(self, release: Any, prompts: Tensor, loops: int) -> None:
        self.release, self.loops = release, loops
        self.tokens = torch.arange(len(prompts))[:, None]
        self.cache = release.create_cache(num_steps=loops)
        self._forward(prompts)

    def _forward(self, tokens: Tensor) -> Tensor:
        call = self.release.forward_for_generation
        return call(tokens, num_steps=self.loops, past_key_values=self.cache)["logits"][:, -1]

    def logits(self) -> Tensor:
        logits = self._forward(self.tokens)
        for part in (self.cache.key_cache, self.cache.value_cache):
            for entries in part.values():  # by position
                entries.popitem()
        self.cache._seen_tokens -= 1
        return logits

    def greedy(self) -> Tensor:
        return self.logits().argmax(1)


def read_prompts(network: AnyNetwork, prompts: Tensor, loops: int) -> Cache:
    """Our cache with the prompts, and room for a token each."""
    rows, context = prompts.shape
    cache = network.model.cache()
    cache.reserve(rows, context + 1, loops)
    for row, prompt in enumerate(prompts.tolist()):
        batch = Batch([Span(row, 0, context)], prompt, network.model.device)
        network.forward(batch, cache, [loops], predict=[context - 1])
    return cache


@torch.no_grad()
def decoders(
    folder: Path, model: LoopedModel, context: int
) -> dict[str, tuple[Callable[[], object], int]]:
    """For each name a function that adds a token to every sequence, and their number."""
    release = open_release(folder, model).eval()
    prompts = torch.randint(model.config.vocab_size, (max(ROWS), context))
    functions: dict[str, tuple[Callable[[], object], int]] = {}
    network = open_network(model, "float32", "auto")
    cache = read_prompts(network, prompts, LOOPS)
    for rows in ROWS:
        theirs = ReleaseDecoding(release, prompts[:rows], LOOPS)
        spans = [Span(row, context) for row in range(rows)]
        batch = Batch(spans, list(range(rows)), model.device)
        logits = network.forward(batch, cache, [LOOPS] * rows).logits
        check(f"logits of {rows} sequences", difference(logits, theirs.logits()))
        equal = int((logits.argmax(1) == theirs.greedy()).sum())
        print(f"greedy tokens: {equal} of {rows} equal")
        functions[f"release, {rows}"] = (theirs.greedy, rows)
    for weights in ("float32", "int8"):
        network = open_network(model, weights, "auto")
        for rows in ROWS:
            run = decode.decode_pass(network, cache, rows, LOOPS, context)
            functions[f"ours, {weights}, {rows}"] = (run, rows)
    return functions


def compare_decoding(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    keep_freed_memory()
    torch.manual_seed(0)
    model = parcae.create("parcae-140m")
    assert isinstance(model, LoopedModel)
    decode.filled(model)
    functions = decoders(folder, model, arguments.context)
    limit = decode.Limit(model, LOOPS, arguments.context)
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    taken = decode.measure(functions, limit, arguments.seconds, clock)
    print(f"parcae-140m, {LOOPS} loops, context {arguments.context}, per token; {limit}")
    print(f"{'sequences':22s} {'ms, minimum':>11s} {'median':>8s} {'by minima':>11s}"
          f" {'by medians':>11s}")  # fmt: skip
    for rows in ROWS:
        base = taken[f"release, {rows}"]
        for name in (name for name in taken if name.endswith(f", {rows}")):
            least, median = min(taken[name]), statistics.median(taken[name])
            ratios = min(base) / least, statistics.median(base) / median
            print(f"{name:22s} {1e3 * least:11.2f} {1e3 * median:8.2f}"
                  f" {ratios[0]:10.2f}x {ratios[1]:10.2f}x")  # fmt: skip
    return {name: {"seconds": times} for name, times in taken.items()}


class ReleaseStep(train_step.Step):
    """A step of the release's model, on the tokens of all steps."""

    def __init__(self, folder: Path, shape: train_step.Shape, how: train_step.How) -> None:
        super().__init__(shape, how._replace(compiled=False))
        assert isinstance(self.model, LoopedModel)
        decode.filled(self.model)
        self.release = open_release(folder, self.model).train()
        self.release._sample_batch_depths = torch.compiler.disable(lambda *_: self.depths)
        self.forward = torch.compile(self.release) if how.compiled else self.release
        self.optimiser = torch.optim.AdamW(self.release.parameters(), lr=1e-4, fused=True)

    def loss(self, depths: Depths) -> Tensor:
        self.depths = torch.tensor(depths.no_grad_loops), torch.tensor(depths.gradient_loops)
        return self.forward(self.tokens, labels=self.targets)["loss"]

    def theirs(self, depths: Depths) -> None:
        self.run(self.loss(depths))

    def theirs_in_bfloat16(self, depths: Depths) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.loss(depths)
        self.run(loss)

    def compare(self, depths: Depths) -> None:
        """Compare the loss and every gradient with ours."""
        loss = self.loss(depths)
        ours = self.model(self.tokens, self.targets, loops=depths, state=self.state).loss
        check("loss of a training step", difference(ours.detach(), loss.detach()))
        loss.backward()
        ours.backward()
        gradients: dict[str, Any] = {name: one.grad for name, one in self.model.named_parameters()}
        differences = [
            difference(gradients[str(our_name(name))], theirs.grad)
            for name, theirs in self.release.named_parameters()
        ]
        check("its gradients", max(differences))


def serve(
    folder: Path, name: str, shape: train_step.Shape, clock: train_step.Clock, pipe: Connection
) -> None:
    if name not in RELEASE_STEPS:
        train_step.serve(name, shape, clock, pipe)
        return
    clock.set_threads()
    train_step.take_turns(ReleaseStep(folder, shape, RELEASE_STEPS[name]), shape, clock, pipe)


def compare_training(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    shape, clock = train_step.Shape(), train_step.Clock(arguments.cpu_time, arguments.threads)
    torch.manual_seed(0)
    ReleaseStep(folder, shape, RELEASE_STEPS["release"]).compare(train_step.draws(shape)[0])
    names = [name for name in STEPS if not (arguments.no_compile and "compiled" in name)]
    result = train_step.time_steps(
        names, shape, clock, arguments.repetitions, partial(serve, folder)
    )
    train_step.print_steps(result, shape)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="a clone of the release")
    parser.add_argument("--only", choices=("decode", "train"))
    parser.add_argument("--seconds", type=float, default=60, help="of decoding")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=5, help="of each training step")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="with one thread: its CPU time")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.cpu_time and arguments.threads != 1:
        parser.error("--cpu-time needs --threads 1")
    folder = arguments.folder.resolve()
    for needed in ("parcae_lm/models/parcae/parcae.py", "receval/models/parcae.py"):
        if not (folder / needed).is_file():
            parser.error(f"{folder} is not a clone of the release: it has no {needed}")
    torch.set_num_threads(arguments.threads)
    print(f"{decode.cpu_name()}, {arguments.threads} threads")
    results = {}
    if arguments.only != "train":
        results["decode"] = compare_decoding(folder, arguments)
    if arguments.only != "decode":
        results["train"] = compare_training(folder, arguments)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

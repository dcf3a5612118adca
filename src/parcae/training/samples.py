"""What a model writes after several numbers of loops, for the report and the curious."""

from __future__ import annotations

from typing import TypedDict

from parcae.config import ConfigError
from parcae.data.tokenizer import Tokenizer
from parcae.infer.engine import Engine
from parcae.infer.sampling import BrokenLogits
from parcae.model.frame import LanguageModel
from parcae.training.settings import Recipe

DEPTHS = (1, 2, 4, 8)


class Sample(TypedDict):
    depth: int
    prompt: str
    text: str


def draw_samples(model: LanguageModel, tokenizer: Tokenizer, recipe: Recipe) -> list[Sample]:
    """The same prompt, seed and noise at each depth, so only the loops differ.

    A depth at which the model blows up, or for which memory is short, has no sample; the run is
    finished all the same. Of a prompt over the context the end is kept.
    """
    looped = recipe.model.architecture == "looped"
    depths = sorted({*DEPTHS, recipe.model.loop.nominal_loops}) if looped else [1]
    samples: list[Sample] = []
    engine = Engine(model, rows=1)
    for prompt in recipe.run.sample_prompts:
        ids = [tokenizer.bos, *tokenizer.encode(prompt)][-recipe.model.context_length :]
        for depth in depths:
            try:
                made = engine.generate(
                    ids,
                    new_tokens=recipe.run.sample_tokens,
                    loops=depth,
                    temperature=0.8,
                    top_k=50,
                    seed=recipe.run.seed,
                    stop_tokens=(tokenizer.bos,),
                )
            except (BrokenLogits, ConfigError):
                continue
            text = tokenizer.decode(made.tokens)
            samples.append({"depth": depth, "prompt": prompt, "text": text})
    return samples

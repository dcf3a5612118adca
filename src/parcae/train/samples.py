"""What a model writes after several numbers of loops, for the report and the curious."""

from __future__ import annotations

from typing import TypedDict

from parcae.data.tokenizer import Tokenizer
from parcae.infer.generate import generate
from parcae.infer.sampling import BrokenLogits
from parcae.model.frame import LanguageModel
from parcae.train.settings import Recipe

DEPTHS = (1, 2, 4, 8)


class Sample(TypedDict):
    depth: int
    prompt: str
    text: str


def draw_samples(model: LanguageModel, tokenizer: Tokenizer, recipe: Recipe) -> list[Sample]:
    """The same prompt, seed and noise at each depth, so only the loops differ.

    A depth at which the model blows up has no sample; the run is finished all the same.
    """
    looped = recipe.model.architecture == "looped"
    depths = sorted({*DEPTHS, recipe.model.loop.nominal_loops}) if looped else [1]
    samples: list[Sample] = []
    for prompt in recipe.run.sample_prompts:
        ids = [tokenizer.bos, *tokenizer.encode(prompt)]
        for depth in depths:
            try:
                tokens = generate(
                    model,
                    ids,
                    new_tokens=recipe.run.sample_tokens,
                    depths=depth,
                    temperature=0.8,
                    top_k=50,
                    seed=recipe.run.seed,
                    stop=(tokenizer.bos,),
                )
            except BrokenLogits:
                continue
            samples.append({"depth": depth, "prompt": prompt, "text": tokenizer.decode(tokens)})
    return samples

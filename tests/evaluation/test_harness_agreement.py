"""Log-likelihoods against lm-evaluation-harness's own encoding and cutting, for any model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evaluation_fixtures import score_all
from parcae.config import ConfigError
from parcae.evaluation.hf_scorer import HFScorer
from parcae.evaluation.perplexity import read_passages
from parcae.evaluation.prompts import continuations
from parcae.evaluation.scorer import Scorer

api = pytest.importorskip("lm_eval.api.model", reason="the extra eval is not installed")
transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

REQUESTS = [
    ("the cat sat", " on a mat"),
    ("the cat", " sat"),
    ("", "one dog"),
    ("in light ", "rain"),
    ("the cat sat on ", "a mat"),
    ("saw\n  ", "that one"),
    ("the cat sat on a mat " * 12, "and saw"),
]


class Theirs(api.TemplateLM):
    """The harness's template, with the plainest model behind it."""

    def __init__(self, tokenise, predict, prefix: int, context: int) -> None:
        super().__init__()
        self.tokenise, self.predict, self.prefix, self.context = tokenise, predict, prefix, context

    @property
    def eot_token_id(self) -> int:
        return self.prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any):
        return self.tokenise(string, add_special_tokens is not False)

    def _loglikelihood_tokens(self, requests, **_: Any):
        found = []
        for _, before, after in requests:
            read = (before + after)[-(self.context + 1) :][:-1]
            with torch.no_grad():
                logits = self.predict(torch.tensor([read]))[0, -len(after) :].log_softmax(-1)
            wanted = torch.tensor(after)
            value = logits.gather(1, wanted[:, None]).sum().item()
            found.append((value, bool((logits.argmax(-1) == wanted).all())))
        return found

    def loglikelihood_rolling(self, requests, disable_tqdm=False): ...

    def generate_until(self, requests, disable_tqdm=False): ...


def ours(scorer: Scorer) -> list[tuple[float, bool]]:
    prompts = [continuations(context, [text], scorer) for context, text in REQUESTS]
    answers = [answer for (answer,) in score_all(scorer, prompts)]
    return [(-one.nats[0].sum().item(), one.is_greedy()[0]) for one in answers]


def assert_alike(scorer: Scorer, theirs: Theirs) -> None:
    asked = [SimpleNamespace(args=one) for one in REQUESTS]
    wanted = theirs.loglikelihood(asked, disable_tqdm=True)
    for request, (a, greedy), (b, also) in zip(REQUESTS, ours(scorer), wanted, strict=True):
        assert a == pytest.approx(b, abs=1e-4), request
        assert greedy == also


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Of letters, but an n takes the space after it: a token can reach beyond a context's end."""
    tokenizers = pytest.importorskip("tokenizers")
    pieces = ["<|bos|>", "<|eos|>", *" \nacdefghilmnorstuw", "n "]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("n", " ")]))
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("puts_bos", [False, True], ids=["like gpt2", "like llama"])
def test_transformers_models_start_with_the_prefix_of_their_tokenizer(puts_bos, arguments: Path):
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(arguments), bos_token="<|bos|>", eos_token="<|eos|>"
    )
    if puts_bos:
        processors = pytest.importorskip("tokenizers").processors
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
        )
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_positions=32, n_embd=32, n_layer=2, n_head=2
    )
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    scorer = HFScorer(model, tokenizer)
    assert scorer.prefix == ((0,) if puts_bos else ())
    spanning = scorer.encode("the cat sat on a mat")
    parts = scorer.encode("the cat sat on")
    assert spanning[: len(parts)] != parts  # the case that is easily got wrong

    def tokenise(text: str, special: bool) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=special)

    assert_alike(scorer, Theirs(tokenise, lambda ids: model(ids).logits, 0, 32))


def test_parcae_models_start_with_bos(scorer, small_model):
    def tokenise(text: str, special: bool) -> list[int]:
        return [scorer.bos] * special + scorer.encode(text)

    def predict(ids):
        return small_model(ids, loops=1, state="zero").logits

    assert_alike(scorer, Theirs(tokenise, predict, scorer.bos, scorer.context_length))


def test_a_text_without_a_token_before_it_is_an_error(scorer):
    with pytest.raises(ConfigError, match="no token with another one before it"):
        continuations("", [""], scorer)


def test_a_line_break_before_the_last_word_counts(tmp_path):
    path = tmp_path / "lambada.jsonl"
    path.write_text('{"context": "saw the", "continuation": "\\n\\nrecorder"}\n')
    assert read_passages(path) == [("saw the", "\n\nrecorder")]

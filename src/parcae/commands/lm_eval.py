"""`parcae lm-eval`: lm-evaluation-harness's own command, with our models known to it.

The harness has no place where other packages could announce their models, so its command is started
from here, after the name `parcae` is registered. Every word is passed on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

NAME = "lm-eval"


def register(subparsers: argparse._SubParsersAction) -> None:
    subparsers.add_parser(
        NAME,
        add_help=False,
        help="lm-evaluation-harness, with --model parcae --model_args path=CHECKPOINT,loops=8",
    )


def pass_on(words: Sequence[str]) -> int:
    from parcae.config import ConfigError

    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        raise ConfigError(
            "lm-eval: the harness is not installed: pip install 'parcae[eval]'."
        ) from None
    import parcae.evaluation.harness  # noqa: F401  (registers the name)
    from parcae.infer.sampling import BrokenLogits

    before, sys.argv = sys.argv, ["lm_eval", *words]
    try:
        cli_evaluate()
    except BrokenLogits as error:
        raise ConfigError(f"lm-eval: {error}") from None
    finally:
        sys.argv = before
    return 0

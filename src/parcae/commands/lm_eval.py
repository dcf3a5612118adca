"""`parcae lm-eval`: the command of lm-evaluation-harness, with the model type `parcae`.

The harness has no plugin mechanism for models, so its command is started from here, after `parcae`
is registered. All arguments are passed on.
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
        help="run lm-evaluation-harness with --model parcae --model_args path=CHECKPOINT,loops=8",
    )


def pass_on(arguments: Sequence[str]) -> int:
    from parcae.config import ConfigError

    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        raise ConfigError("lm-eval: not installed. Run: pip install -e '.[eval]'") from None
    import parcae.evaluation.harness  # noqa: F401  (registers the model type)
    from parcae.infer.sampling import NonFiniteLogits

    original, sys.argv = sys.argv, ["lm_eval", *arguments]
    try:
        cli_evaluate()
    except NonFiniteLogits as error:
        raise ConfigError(f"lm-eval: {error}") from None
    finally:
        sys.argv = original
    return 0

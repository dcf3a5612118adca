"""`parcae serve`: an OpenAI-compatible API and a web page for trained models."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from pathlib import Path

from parcae.device import DEVICE_HELP
from parcae.serving.settings import ServerSettings

KEY_VARIABLE = "PARCAE_API_KEY"


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="serve models with an OpenAI-compatible API and a web page",
        epilog="SIGTERM or Ctrl-C finishes the texts that have begun; a second one ends at once. "
        f"An API key may also be given in the environment variable {KEY_VARIABLE}.",
    )
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="a model folder, a run or a checkpoint, as PATH or NAME=PATH; demo is the run of "
        "`make demo`",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on; other than loopback only with an API key (default: 127.0.0.1)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=8000,
        metavar="N",
        help="port to listen on; 0 takes a free one (default: 8000)",
    )
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file with API keys, one per line (default: none)",
    )
    parser.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name by which clients reach the server besides localhost; may be repeated "
        "(default: none)",
    )
    parser.add_argument("--device", default="auto", metavar="NAME", help=DEVICE_HELP)
    parser.add_argument(
        "--weight-dtype",
        default="float32",
        choices=("float32", "int8", "bfloat16"),
        help="storage format of weight matrices (default: float32)",
    )
    parser.add_argument(
        "--cache-dtype",
        choices=("float32", "bfloat16"),
        help="storage format of keys and values; bfloat16 takes half the memory of float32 "
        "(default: float32 on a CPU, else the model's)",
    )
    parser.add_argument(
        "--cache",
        default="full",
        metavar="POLICY",
        help="which loops share keys and values: full, last:K, first:K or shared (default: full)",
    )
    limits = parser.add_argument_group("limits and sizes")
    for field in fields(ServerSettings):
        help = field.metadata["help"]
        limits.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=float if "float" in str(field.type) else int,
            default=field.default,
            metavar="N",
            help=help if "default:" in help else f"{help} (default: {field.default:g})",
        )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from parcae import console
    from parcae.config import ConfigError

    try:
        from parcae.serving.server import serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"serve: {error.name} is not installed. Run: pip install -e '.[serve]'"
        ) from None

    def announce(url: str) -> None:
        console.print_text(f"Serving on {url} (API at {url}/v1). Ctrl-C stops.")

    serve(
        *arguments.models,
        host=arguments.host,
        port=arguments.port,
        api_keys=_read_keys(arguments.api_key_file),
        allowed_hosts=arguments.allowed_host,
        settings=ServerSettings(
            **{field.name: getattr(arguments, field.name) for field in fields(ServerSettings)}
        ),
        on_start=announce,
        device=arguments.device,
        weight_dtype=arguments.weight_dtype,
        cache_dtype=arguments.cache_dtype,
        cache=arguments.cache,
    )
    return 0


def _read_keys(path: Path | None) -> list[str]:
    from parcae.config import require
    from parcae.files import FileError, reading

    keys = [os.environ.get(KEY_VARIABLE, "")]
    if path is not None:
        try:
            with reading(path, pipe=True):
                lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            raise FileError(f"{path}: not UTF-8. Write one key per line.") from None
        require(any(line.strip() for line in lines), str(path), "no key", "Write one per line.")
        keys += lines
    return [key.strip() for key in keys if key.strip()]

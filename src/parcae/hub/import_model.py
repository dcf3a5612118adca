"""Copy a published model into a model folder of this package.

    parcae.import_model("SandyResearch/parcae-140m", "models/parcae-140m")

The source is a folder, or a repository of the Hugging Face hub, in the format of the reference
release, of `parcae export`, or our own. No code of the source is run: weights are read from
safetensors, or with `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from parcae.config import ConfigError
from parcae.files import LARGEST_JSON, FileError, atomic_folder, check_new, open_file
from parcae.model import CONFIG_FILE, INDEX_FILE
from parcae.model.store import read_model, save
from parcae.runs.checkpoints import verify_model_folder
from parcae.runs.layout import CHECKPOINTS_FOLDER, TOKENIZER_FILE, TOKENIZER_FILES

WEIGHT_FILES = ("*.safetensors", INDEX_FILE, "pytorch_model.bin")
FILES = (CONFIG_FILE, *WEIGHT_FILES, TOKENIZER_FILE, "merges.txt")
OWNER = "SandyResearch"
SIZES = ("140m", "370m", "770m", "1.3b")
"""The models of the paper's authors, OWNER/parcae-SIZE; their cards also use other names."""


def import_model(
    source: str | Path, folder: str | Path, *, revision: str | None = None, token: str | None = None
) -> Path:
    """Write a folder or hub repository as a model folder that `parcae.load` reads; returns it.

    `revision`: a branch, tag or commit of the repository. `token`: of a private repository; by
    default the one `hf auth login` stored.
    """
    folder = Path(folder)
    check_new(folder)
    if Path(source).is_dir():
        return _convert(Path(source), folder)
    with tempfile.TemporaryDirectory(prefix="parcae-import-") as downloads:
        return _convert(download_model(str(source), Path(downloads), revision, token), folder)


def download_model(
    repository: str, folder: Path, revision: str | None = None, token: str | None = None
) -> Path:
    """The files of a model repository that are needed to load it, in `folder`."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise FileError(
            f"{repository}: no such folder, and not a repository (OWNER/NAME). Check the path."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    try:
        snapshot_download(
            repository,
            revision=revision,
            token=token,
            local_dir=folder,
            allow_patterns=list(FILES),
        )
    except RepositoryNotFoundError:
        raise FileError(
            f"{repository}: no such repository on the hub. {_hint(repository)}"
        ) from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FileError(
            f"{repository}: no such folder, and it cannot be downloaded from the hub ({reason})."
        ) from None
    return folder


def _hint(repository: str) -> str:
    """What to try instead of a name that does not exist."""
    owner, name = repository.split("/")
    meant = [size for size in SIZES if name.lower().endswith(size)]
    if owner == OWNER and meant:
        return f"The repository is {OWNER}/parcae-{meant[0]}."
    return "Check the name; a private one needs `hf auth login`."


def _convert(source: Path, folder: Path) -> Path:
    if not (source / CONFIG_FILE).exists():
        remedy = "Give a folder with a model."
        if (source / CHECKPOINTS_FOLDER).is_dir():
            remedy = "It is a run: commands take it as it is, `parcae export` converts it."
        raise FileError(f"{source}: no {CONFIG_FILE}. {remedy}")
    verify_model_folder(source)
    try:
        model = read_model(source)
    except ConfigError as error:
        raise FileError(f"{source}: {error}") from None
    tokenizer_files: dict[str, bytes] = {}
    for name in (*TOKENIZER_FILES, "vocab.json"):
        if (source / name).is_file():
            with open_file(source / name, LARGEST_JSON) as stream:
                tokenizer_files[name] = stream.read()
    with atomic_folder(folder) as new:
        save(model, new)
        for name, content in tokenizer_files.items():
            (new / name).write_bytes(content)
    return folder

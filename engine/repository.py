"""From a model's name to a local copy of it that has been checked before a weight is read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solgen.engine.adapters.overlay import Overlay
from solgen.engine.components import CLASSES, WEIGHTED, check_component, num_blocks, num_heads, prompt_limit
from solgen.engine.json_file import read_object
from solgen.engine.pipeline import transformer_name
from solgen.engine.shards import headers_digest, read_headers
from solgen.errors import InputError, SetupError
from solgen.presets.schema import Model, Task

INDEX = "modular_model_index.json"

SIZES = ("canvas_short_edge", "canvas_max_pixels", "reference_image_short_edge")
"""Numbers of pixels that an index may hold."""


@dataclass(frozen=True)
class Repository:
    """A checked local copy of a model.

    Attributes:
        path: Folder with the index.
        source: Name or path the user gave.
        folders: Sub-folder of every component the task needs.
        digests: SHA-256 of the weight headers by component.
        overlay: Adapters for the task's transformer, applied while it loads.
    """

    path: Path
    source: str
    folders: dict[str, Path]
    digests: dict[str, str]
    overlay: Overlay | None = None

    def num_blocks(self, task: Task) -> int:
        """Transformer blocks of the task's model."""
        return num_blocks(self.folders[transformer_name(task)])

    def num_heads(self, task: Task) -> int:
        """Attention heads of the task's model."""
        return num_heads(self.folders[transformer_name(task)])

    def prompt_limit(self) -> int:
        """Tokens the conditioner reads at most."""
        return prompt_limit(self.folders["text_encoder"])


def open_repository(model: Model, task: Task) -> Repository:
    """Find a model and check what the task needs of it; a local path makes no network call.

    Args:
        model: Source and revision.
        task: Decides between `transformer` and `transformer_ref`.

    Raises:
        InputError: for a missing folder or a broken file, named.
        SetupError: if the Hub or its cache cannot provide a file.
    """
    if model.source == "demo":
        from solgen.presets.demo import demo_model_path

        path = demo_model_path()
    elif Path(model.source).expanduser().is_dir():
        path = Path(model.source).expanduser()
    elif model.source.count("/") == 1 and not model.source.startswith((".", "/", "~")):
        path = _download(model, task)
    else:
        raise InputError(f"--model {model.source}: no such folder, and not a Hub name of the form owner/name")
    folders = {name: path / folder for name, folder in _component_folders(_read_index(path), task).items()}
    for name, folder in folders.items():
        if not folder.is_dir():
            raise InputError(f"{folder} is missing ({name} of {model.source}); download the model again")
    headers = {name: read_headers(folder) for name, folder in folders.items() if name in WEIGHTED}
    for name, folder in folders.items():
        tensors = {key: entry for header in headers.get(name, {}).values() for key, entry in header.items()}
        check_component(name, folder, {key: tuple(entry["shape"]) for key, entry in tensors.items()})
    digests = {name: headers_digest(headers[name]) for name in WEIGHTED if name in headers}
    return Repository(path, model.source, folders, digests)


def _read_index(path: Path) -> dict[str, Any]:
    if not (path / INDEX).is_file():
        raise InputError(f"{path} has no {INDEX}; expected a MiniMax-H3 repository in diffusers format")
    index = read_object(path / INDEX)
    for name in SIZES:
        if name in index and not (type(index[name]) is int and index[name] > 0):
            raise InputError(f"{path / INDEX}: {name} is {index[name]!r}, expected a number of pixels")
    return index


def _component_folders(index: dict[str, Any], task: Task) -> dict[str, str]:
    """Sub-folder of every component of a task; what else the index lists is left alone."""
    other = transformer_name("t2va" if task == "ref2va" else "ref2va")
    return {name: _subfolder(name, index.get(name), task) for name in CLASSES if name != other}


def _subfolder(name: str, entry: Any, task: Task) -> str:
    """Check one entry of the index: library, class, and where to load it from.

    Raises:
        InputError: naming the component.
    """
    if not (isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], dict)):
        raise InputError(f"{INDEX} does not list {name}, which {task} needs; expected a MiniMax-H3 repository")
    found = entry[2].get("type_hint") or entry[:2]
    if found not in [known.split(".") for known in CLASSES[name]]:
        raise InputError(f"{INDEX}: {name} is {found}, expected {CLASSES[name][0]}; solgen runs MiniMax-H3 alone")
    folder = entry[2].get("subfolder") or name
    if not isinstance(folder, str):
        raise InputError(f"{INDEX}: the subfolder of {name} is {folder!r}, expected a folder's name")
    return folder


def _download(model: Model, task: Task) -> Path:
    """Fetch what the task needs from the Hub, or from its cache with HF_HUB_OFFLINE=1."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    name = model.source
    try:
        index = Path(hf_hub_download(name, INDEX, revision=model.revision))
        folders = _component_folders(_read_index(index.parent), task).values()
        patterns = [INDEX, *(f"{folder}/*" for folder in folders)]
        return Path(snapshot_download(name, revision=model.revision, allow_patterns=patterns))
    except GatedRepoError as error:
        raise SetupError(
            f"{name} is gated; accept its licence at https://huggingface.co/{name} and run hf auth login"
        ) from error
    except RepositoryNotFoundError as error:
        raise InputError(
            f"no model {name} on the Hub, or it is private; check the name or run hf auth login"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise SetupError(
            f"{name} is not complete in the Hub cache and the Hub cannot be reached; "
            "download it with network access, or unset HF_HUB_OFFLINE"
        ) from error
    except EntryNotFoundError as error:
        raise InputError(f"{name} has no {INDEX}; expected a MiniMax-H3 repository in diffusers format") from error
    except (HfHubHTTPError, OSError) as error:
        raise SetupError(f"cannot download {name}: {str(error).splitlines()[0]}") from error

"""The embedded demo model: a complete MiniMax-H3-shaped repository built on first use, without a network."""

import hashlib
import os
import secrets
import shutil
from pathlib import Path

from solgen.errors import SetupError

_PACKAGE = Path(__file__).parent
_INDEX = "modular_model_index.json"


def demo_model_path() -> Path:
    """Return the folder of the demo model: the trained weights of the package, without them `built_model_path()`."""
    if (_PACKAGE / "weights" / _INDEX).is_file():
        return _PACKAGE / "weights"
    return built_model_path()


def built_model_path() -> Path:
    """Return the folder of the random model, building it in the user's cache if it is missing (5 s, 22 MiB).

    Several processes may call it at once. The folder's name holds a hash of the code that builds it, so that
    other code builds another folder.

    Raises:
        SetupError: if the cache cannot be written or the folder has lost its index.
    """
    folder = _cache_root() / f"demo-model-{_source_hash()}"
    if not folder.is_dir():
        try:
            _publish(folder)
        except OSError as error:
            raise SetupError(
                f"cannot write the demo model to {folder}: {error.strerror or error}; "
                "set SOLGEN_CACHE to a writable folder"
            ) from error
    if not (folder / _INDEX).is_file():
        raise SetupError(f"{folder} has lost its {_INDEX}; delete that folder, the next run builds it anew")
    return folder


def _cache_root() -> Path:
    if own := os.environ.get("SOLGEN_CACHE"):
        return Path(own).expanduser().resolve()
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(shared).expanduser().resolve() / "solgen"


def _source_hash() -> str:
    digest = hashlib.sha256()
    for source in sorted(_PACKAGE.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


def _publish(folder: Path) -> None:
    """Build beside `folder` and rename, so that the name never shows a half-built model."""
    draft = folder.with_name(f".{folder.name}-{os.getpid()}-{secrets.token_hex(4)}")
    draft.mkdir(parents=True)
    try:
        from solgen.presets.demo.build import build

        build(draft)
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was first
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)

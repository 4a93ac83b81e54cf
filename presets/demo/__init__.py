"""The embedded demo model: a complete MiniMax-H3-shaped repository built on first use, without a network."""

import hashlib
import os
import secrets
import shutil
from pathlib import Path

_PACKAGE = Path(__file__).parent
_INDEX = "modular_model_index.json"


def demo_model_path() -> Path:
    """Return the folder of the demo model, building it in the user's cache when it is not there (about 5 s, 21 MiB).

    Safe to call from several processes at once. The folder's name carries a hash of the code that builds it.

    Raises:
        RuntimeError: if the cache cannot be written.
    """
    if (_PACKAGE / "weights" / _INDEX).is_file():
        return _PACKAGE / "weights"
    folder = _cache_root() / f"demo-model-{_source_hash()}"
    if not (folder / _INDEX).is_file():
        try:
            _publish(folder)
        except OSError as error:
            raise RuntimeError(
                f"cannot write the demo model to {folder}: {error.strerror or error}; "
                "set SOLGEN_CACHE to a writable folder"
            ) from error
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
    from solgen.presets.demo.build import build

    draft = folder.with_name(f".{folder.name}-{os.getpid()}-{secrets.token_hex(4)}")
    draft.mkdir(parents=True)
    try:
        build(draft)
        draft.rename(folder)
    except OSError:
        if not (folder / _INDEX).is_file():  # otherwise another process was first
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)

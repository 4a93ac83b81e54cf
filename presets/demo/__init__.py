"""The embedded demo model: a complete repository in MiniMax-H3's shape, trained by `solgen train demo`."""

import json
from pathlib import Path
from typing import Any


def demo_model_path() -> Path:
    """Folder of the model, in diffusers format."""
    return Path(__file__).parent / "weights"


def demo_transformer() -> dict[str, Any]:
    """Arguments of its transformer, as `MiniMaxH3Transformer3DModel` takes them."""
    config = json.loads((demo_model_path() / "transformer" / "config.json").read_text(encoding="utf-8"))
    return {key: value for key, value in config.items() if not key.startswith("_")}

"""Where llmctl keeps what it owns: LLMCTL_HOME, if set, holds everything; else the platform's folders are used."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """Folder of lasting data (the model store). It need not exist yet."""
    chosen = os.environ.get("LLMCTL_HOME")
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return platformdirs.user_data_path("llmctl", appauthor=False)


def cache_dir() -> Path:
    """Folder of data that can be made again at any time. It need not exist yet."""
    if os.environ.get("LLMCTL_HOME"):
        return home() / "cache"
    import platformdirs

    return platformdirs.user_cache_path("llmctl", appauthor=False)


def config_dir() -> Path:
    """Folder of llmctl.toml. It need not exist yet."""
    if os.environ.get("LLMCTL_HOME"):
        return home()
    import platformdirs

    return platformdirs.user_config_path("llmctl", appauthor=False)

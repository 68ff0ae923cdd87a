"""Where this project keeps what it can make again: traces, calibrations, indices of tar files."""

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """``$DIT_CACHE``, else ``dit`` in the user's cache folder. Not necessarily there yet."""
    if "DIT_CACHE" in os.environ:
        return Path(os.environ["DIT_CACHE"])
    usual = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or usual) / "dit"

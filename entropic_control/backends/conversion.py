"""Models converted once and kept: what a conversion makes of a GGUF file, in the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from entropic_control.errors import ModelError


def cache_directory() -> Path:
    """Where converted models are kept: $ENTROPIC_CACHE, or the user's cache directory."""
    own = os.environ.get("ENTROPIC_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "entropic-control"


def converted(gguf: Path, make: Callable[[Path, Path], None], suffix: str = "") -> Path:
    """The directory that holds what `make` makes of a GGUF file; made if it is not there yet.

    Parameters
    ----------
    gguf : path
        The model. Another file of that name, or a newer one, is converted anew.
    make : function
        Takes the file and an empty directory, and fills that.
    suffix : str
        Tells conversions of one file apart.

    Raises
    ------
    ModelError
        If the cache cannot be written.
    """
    status = gguf.stat()
    key = f"{gguf.resolve()} {status.st_size} {status.st_mtime_ns}".encode()
    name = f"{gguf.stem}-{hashlib.sha256(key).hexdigest()[:12]}{suffix}"
    target = cache_directory() / "models" / name
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=".partial-"))
    except OSError as error:
        raise ModelError(
            f"{gguf} could not be converted: {error}; set ENTROPIC_CACHE to a directory that can be "
            f"written"
        ) from error
    try:
        make(gguf, partial)
        partial.rename(target)
    except OSError as error:
        if not target.is_dir():  # else another process was faster
            raise ModelError(f"{gguf} could not be converted: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target

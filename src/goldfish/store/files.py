"""Files that appear whole: written under a temporary name, then renamed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from goldfish.errors import StoreError


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file so that, even after a crash, a reader sees the old one or all of the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    data = content.encode() if isinstance(content, str) else content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StoreError(f"{path} cannot be written: {error}.") from error

"""Goldfish's own words in the log of the Flower process that it runs in."""

from __future__ import annotations

import logging


def show() -> None:
    """Write what Goldfish logs to standard error, with the time; once is enough."""
    logger = logging.getLogger("goldfish")
    if logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)

"""Engines that run a federation; all of them behind :class:`goldfish.types.Federation`."""

from __future__ import annotations

from goldfish.federation.in_process import InProcess

__all__ = ["InProcess"]

"""Parameters as admission leaves them: every default filled in."""

from __future__ import annotations

from typing import Any

OFF: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "seed": 7,
}
"""Greedy, with every filter and penalty off."""

"""Spoiled files by the thousand; `make fuzz` runs a million."""

from __future__ import annotations

from pathlib import Path

import fuzz_gguf
import pytest


def test_the_seeds_are_good(tmp_path: Path) -> None:
    for file in fuzz_gguf.seeds():
        (tmp_path / "m.gguf").write_bytes(file.data)
        assert fuzz_gguf.open_whole(tmp_path / "m.gguf") == "good"


def test_ten_thousand_spoiled_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcomes = fuzz_gguf.fuzz(10_000, 0, tmp_path)
    assert outcomes["refused"] > 8_000
    assert outcomes["good"] > 500

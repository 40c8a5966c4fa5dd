"""Build the tools of llama.cpp that the comparison runs, from the sources that the `llama-cpp-python` sdist carries.

    python bench/peers/build_llama_cpp.py [--isa native|avx2] [--jobs N] [--version 0.3.36] [--folder FOLDER]

Prints the folder of the binaries. Run again, it builds only what is not there yet. Needs pip, CMake and a C++
compiler; takes about 15 minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "0.3.36"
FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace-peers"
TOOLS = ("llama-bench", "llama-batched-bench", "llama-server")
"""In the order in which they are built."""

COMMON = (
    *("CMAKE_BUILD_TYPE=Release", "BUILD_SHARED_LIBS=OFF", "GGML_OPENMP=ON", "LLAMA_OPENSSL=OFF"),
    *("LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF", "LLAMA_BUILD_APP=OFF", "LLAMA_USE_PREBUILT_UI=OFF"),
)
ISAS = {
    "native": ("GGML_NATIVE=ON",),
    "avx2": (
        *("GGML_NATIVE=OFF", "GGML_SSE42=ON", "GGML_AVX=ON", "GGML_AVX2=ON", "GGML_BMI2=ON", "GGML_FMA=ON"),
        *("GGML_F16C=ON", "GGML_AVX_VNNI=OFF", "GGML_AVX512=OFF"),
    ),
}

_LOADS_TILES = "    _tile_loadconfig(&tc);\n"
_BARRIER = '    __asm__ volatile("" : : "r"(&tc) : "memory");\n'


def binaries(isa: str, folder: Path = FOLDER) -> Path:
    """Where the tools built for `isa` are, or would be."""
    return folder / f"llama.cpp-{isa}" / "bin"


def built_from(isa: str, folder: Path = FOLDER) -> str:
    """What the tools were built from, in words; OSError where they were not."""
    return (binaries(isa, folder) / "VERSION").read_text().strip()


def fetch(version: str, folder: Path) -> Path:
    """The sources of llama.cpp, downloaded and unpacked unless they are there, as a folder."""
    sources = folder / f"llama_cpp_python-{version}" / "vendor" / "llama.cpp"
    if not sources.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            pip = (sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python")
            _run(*pip, "--dest", scratch, f"llama-cpp-python=={version}")
            with tarfile.open(next(Path(scratch).glob("*.tar.gz"))) as archive:
                archive.extractall(folder, filter="data")
    _keep_tile_config(sources / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp")
    return sources


def build(sources: Path, isa: str, folder: Path, jobs: int) -> None:
    """Configure and build `TOOLS` under `folder`; afterwards `built_from` answers."""
    at = binaries(isa, folder).parent
    _run("cmake", "-S", str(sources), "-B", str(at), *(f"-D{option}" for option in (*COMMON, *ISAS[isa])))
    for tool in TOOLS:
        _run("cmake", "--build", str(at), "--parallel", str(jobs), "--target", tool)
    said = f"from the sdist of llama-cpp-python {sources.parents[1].name.rpartition('-')[2]}, {isa} instructions"
    (binaries(isa, folder) / "VERSION").write_text(said + "\n")


def _keep_tile_config(file: Path) -> None:
    """GCC 12 declares that `_tile_loadconfig` reads 8 bytes of its 64 and drops the stores to the rest; with AMX the
    tools would then die at their first tile instruction."""
    text = file.read_text()
    if _LOADS_TILES in text and _BARRIER not in text:
        file.write_text(text.replace(_LOADS_TILES, _BARRIER + _LOADS_TILES))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--isa", choices=tuple(ISAS), default="native")
    ask.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    ask.add_argument("--version", default=VERSION, help="of llama-cpp-python")
    ask.add_argument("--folder", type=Path, default=FOLDER)
    args = ask.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    build(fetch(args.version, args.folder), args.isa, args.folder, args.jobs)
    print(binaries(args.isa, args.folder))


if __name__ == "__main__":
    main()

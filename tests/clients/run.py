"""Clients that are too much for CI, against a live server: `python tests/clients/run.py MODEL`, or `make clients`.

openai for Node, LiteLLM, LangChain's ChatOpenAI, and lm-eval-harness, each from its package, into build/clients. Node
and npm must be there. MODEL is a file or a name whose chat template has tools. Ends with 1 where one fails.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "clients"
PACKAGES = ("litellm>=1.110", "langchain-openai>=1.7", "lm-eval[api]>=0.4.13")


@contextmanager
def served(model: str) -> Iterator[str]:
    """The address of `headrace serve MODEL`."""
    command = [sys.executable, "-m", "headrace", "serve", model, "--port", "0", "--context", "4096"]
    command += ["--log-level", "warning"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = next((line for line in server.stdout if line.startswith("ready: ")), "")
            found = re.search(r"http://[^/]+", line)
            if found is None:
                raise SystemExit("the server did not start")
            yield found[0]
        finally:
            server.terminate()


def python() -> str:
    """An environment with the Python clients."""
    folder = BUILD / "venv"
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    subprocess.run([folder / "bin" / "pip", "install", "--quiet", *PACKAGES], check=True)
    return str(folder / "bin" / "python")


def node() -> Path:
    """A folder with the Node client."""
    BUILD.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "openai_node.mjs"):
        shutil.copy(HERE / name, BUILD)
    subprocess.run(["npm", "install", "--silent", "--no-fund", "--no-audit"], cwd=BUILD, check=True)
    return BUILD / "openai_node.mjs"


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        raise SystemExit(__doc__)
    with_python, with_node, told = python(), node(), BUILD / "loglikelihoods.json"
    with served(arguments[0]) as url:
        with urllib.request.urlopen(f"{url}/v1/models") as answer:
            model = json.load(answer)["data"][0]["id"]
        commands = {
            "openai for Node": ["node", str(with_node), url, model],
            "LiteLLM": [with_python, str(HERE / "litellm_client.py"), url, model],
            "LangChain": [with_python, str(HERE / "langchain_client.py"), url, model],
            "lm-eval-harness": [with_python, str(HERE / "harness.py"), url, model, str(told)],
        }
        failed = [name for name, command in commands.items() if subprocess.run(command).returncode]
    if "lm-eval-harness" not in failed:
        same = [sys.executable, str(HERE / "same_loglikelihoods.py"), arguments[0], str(told)]
        failed += ["its log-likelihoods"] if subprocess.run(same).returncode else []
    print(f"failed: {', '.join(failed)}" if failed else "every client held")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Write a GGUF file as a Hugging Face folder in bfloat16, for engines that read no GGUF.

    python -m bench.peers.gguf_to_hf FILE.gguf FOLDER

Needs the `test` extra (transformers, gguf, accelerate).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(file: Path, folder: Path) -> None:
    """transformers dequantizes; the traces that it keeps of that would stop it from saving."""
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    vars(model).update(hf_quantizer=None, is_quantized=False)
    vars(model).pop("quantization_method", None)
    vars(model.config).pop("quantization_config", None)
    model.generation_config.do_sample = True  # else sampling defaults of the file are refused
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("file", type=Path)
    ask.add_argument("folder", type=Path)
    args = ask.parse_args()
    convert(args.file, args.folder)


if __name__ == "__main__":
    main()

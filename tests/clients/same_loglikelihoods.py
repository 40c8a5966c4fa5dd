"""Are the log-likelihoods that lm-eval-harness computed over HTTP those of the Python API? MODEL FILE as arguments."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from headrace import LLM, SamplingParams


def main() -> None:
    model, file = sys.argv[1:]
    told = json.loads(Path(file).read_text(encoding="utf-8"))
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    with LLM(model, context=4096, past_load=False) as llm:
        for one in told:
            whole = llm.tokenizer.encode(one["context"] + one["continuation"], add_bos=False)
            context = len(llm.tokenizer.encode(one["context"], add_bos=False))
            positions = llm.generate(whole, params)[0].prompt_logprobs or []
            own = sum(next(iter(position.values())).logprob for position in positions[context:] if position)
            assert own == one["loglikelihood"], (one, own)
    print(f"lm-eval-harness: {len(told)} log-likelihoods are those of the Python API, to the last bit")


if __name__ == "__main__":
    main()

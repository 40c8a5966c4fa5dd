# Every command beyond the README's two. Run inside a virtual environment with '.[test,dev]' installed.
.PHONY: check test golden golden-compare fuzz bench clean

check:            ## linter, types, layers
	ruff check && ruff format --check && mypy && pytest tests/pure

test:             ## the whole suite
	pytest

golden:           ## write tests/golden/*.json from transformers (FILES="a.gguf b.gguf"), minutes per file
	python tests/golden/make.py $(FILES)

golden-compare:   ## every logit of Headrace against transformers, at every position (FILES="a.gguf b.gguf")
	python tests/golden/compare.py $(FILES)

fuzz:             ## a million mutated GGUF files (COUNT=..., SEED=...)
	python tests/fuzz/fuzz_gguf.py --count $(or $(COUNT),1000000) --seed $(or $(SEED),0)

bench:            ## what continuous batching brings on this machine (MODEL=...), minutes
	python bench/batching.py $(or $(MODEL),smollm2-135m)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

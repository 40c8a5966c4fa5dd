# Every command beyond the README's two. Run inside a virtual environment with '.[test,dev]' installed.
.PHONY: build check test sanitize amx-emulated golden golden-compare fuzz fuzz-http fuzz-grammars bench policies shared-prefix kv-waste perplexity kv-formats agreement soak leaving clients constrained over-http streams peers clean

build:            ## the kernels into the source tree, for working on them without installing
	cmake -S . -B build/dev -Dnanobind_DIR=$$(python -m nanobind --cmake_dir) -DPython_EXECUTABLE=$$(which python)
	cmake --build build/dev --parallel 2 && cp build/dev/_core*.so src/headrace/native/

check:            ## linter, types, layers
	ruff check && ruff format --check && mypy && pytest tests/pure

test:             ## the whole suite
	pytest

sanitize:         ## the tests of operations on kernels built with the address and undefined-behaviour sanitizers
	cmake -S . -B build/sanitize -DHEADRACE_SANITIZE=ON -Dnanobind_DIR=$$(python -m nanobind --cmake_dir) \
	  -DPython_EXECUTABLE=$$(which python)
	cmake --build build/sanitize --parallel 2
	rm -rf build/sanitize/src && cp -r src build/sanitize/src && cp build/sanitize/_core*.so build/sanitize/src/headrace/native/
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
	  PYTHONPATH=build/sanitize/src pytest tests/native tests/exact/test_tiny.py \
	  --deselect tests/native/test_threads.py::test_threads_that_the_system_refuses_are_an_error  # needs little address space

amx-emulated:     ## the same tests with the kernels for AMX among the others, on tile instructions in plain C++ (needs AVX-512)
	cmake -S . -B build/amx -DHEADRACE_EMULATE_TILES=ON -Dnanobind_DIR=$$(python -m nanobind --cmake_dir) \
	  -DPython_EXECUTABLE=$$(which python)
	cmake --build build/amx --parallel 2
	rm -rf build/amx/src && cp -r src build/amx/src && cp build/amx/_core*.so build/amx/src/headrace/native/
	PYTHONPATH=build/amx/src pytest tests/native tests/exact/test_tiny.py

golden:           ## write tests/golden/*.json from transformers (FILES="a.gguf b.gguf"), minutes per file
	python tests/golden/make.py $(FILES)

golden-compare:   ## every logit of Headrace against transformers, at every position (FILES="a.gguf b.gguf")
	python tests/golden/compare.py $(FILES)

fuzz:             ## a million mutated GGUF files (COUNT=..., SEED=...)
	python tests/fuzz/fuzz_gguf.py --count $(or $(COUNT),1000000) --seed $(or $(SEED),0)

fuzz-http:        ## 100,000 bodies of every kind against a live server (COUNT=..., SEED=..., MODEL=...), then schemathesis; needs '.[fuzz]'
	python -m tests.fuzz.fuzz_http --count $(or $(COUNT),100000) --seed $(or $(SEED),0) $(if $(MODEL),--model $(MODEL))

fuzz-grammars:    ## mutated schemas, regular expressions and grammars (MODEL=....gguf, COUNT=..., SEED=...), minutes
	python -m tests.fuzz.fuzz_grammars $(MODEL) --count $(or $(COUNT),20000) --seed $(or $(SEED),0)

bench:            ## what continuous batching brings on this machine (MODEL=...), minutes
	python bench/batching.py $(or $(MODEL),smollm2-135m)

policies:         ## continuous, dynamic and static batching on a recorded hour (MODEL=..., TRACE=....csv), 10 to 60 minutes
	python bench/policies.py $(or $(MODEL),smollm2-135m) $(TRACE) --json policies.json --plot policies.png

shared-prefix:    ## requests that share a long prefix, beside llama-server and vLLM (MODEL=....gguf); bench/peers/README.md
	python -m bench.shared_prefix $(MODEL) --json shared-prefix.json

kv-waste:         ## how much KV memory is allocated and holds nothing, on a recorded hour (MODEL=..., TRACE=....csv), minutes
	python bench/kv_waste.py $(or $(MODEL),smollm2-135m) $(TRACE)

perplexity:       ## what the number formats cost on TEXT (MODELS="a.gguf ..."), beside the float32 reference; an hour
	python bench/perplexity.py $(TEXT) $(MODELS) --reference

kv-formats:       ## what small keys and values cost on TEXT (MODELS="a.gguf ..."), ten minutes per file; then how fast they are
	python bench/kv_formats.py $(TEXT) $(MODELS)
	python bench/kv_speed.py $(MODELS)

agreement:        ## greedy answers beside the float32 reference's (MODELS="a.gguf ..."), a minute per file
	python bench/agreement.py $(MODELS)

soak:             ## ten thousand short requests: is resident memory flat? (MODEL=...)
	python bench/soak.py $(or $(MODEL),smollm2-135m)

leaving:          ## clients that leave at every bad moment, over HTTP (MODEL=..., MINUTES=30): is everything given back?
	python -m bench.leaving $(or $(MODEL),smollm2-135m) --minutes $(or $(MINUTES),30)

clients:          ## openai for Node, LiteLLM, LangChain and lm-eval-harness against a live server (MODEL=....gguf with tools); needs node
	python tests/clients/run.py $(MODEL)

constrained:      ## what a grammar costs beside the same work without (MODELS="a.gguf ..."), minutes
	python bench/constrained.py $(or $(MODELS),smollm2-135m)

over-http:        ## what HTTP costs beside the Python API, the engine in a thread or a process (MODEL=...), minutes
	python -m bench.over_http $(or $(MODEL),smollm2-135m)

streams:          ## 200 streams for 5 minutes, a fifth of the clients leaving (MODEL=..., MINUTES=...)
	python -m bench.streams $(or $(MODEL),smollm2-135m) --minutes $(or $(MINUTES),5)

peers:            ## Headrace beside other engines (MODELS="a.gguf ..."); bench/peers/README.md
	python -m bench.peers $(MODELS)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

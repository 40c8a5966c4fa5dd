"""The HTTP server: OpenAI's API over `AsyncLLM`. Reads and judges bodies, writes answers; knows no arrays, no plans."""

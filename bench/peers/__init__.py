"""Headrace beside other engines: the same files, threads and machine. `python -m bench.peers --help`; README.md."""

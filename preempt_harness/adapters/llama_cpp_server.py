"""A llama.cpp server by the package `xllamacpp`, as a process that the adapter can start.

    python llama_cpp_server.py MODEL.gguf PORT NUM_TOKENS MAX_NUM_SEQS

Run by path with any interpreter that has `xllamacpp`; it imports nothing else and is no part of the
harness. The server has MAX_NUM_SEQS slots, but 8 at most; they share one KV cache of NUM_TOKENS
tokens.
"""

import signal
import sys

import xllamacpp

_MAX_SLOTS = 8


def main(arguments: list[str]) -> None:
    """Serve until the process is ended."""
    model, port, num_tokens, max_num_seqs = arguments
    num_slots = min(int(max_num_seqs), _MAX_SLOTS)
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = int(port)
    params.n_ctx = int(num_tokens)
    params.n_parallel = num_slots
    params.kv_unified = True
    params.cont_batching = True
    params.endpoint_metrics = True
    params.warmup = False
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.n_threads_http = num_slots + 2
    params.cache_ram_mib = 0
    server = xllamacpp.Server(params)  # ends when it is collected
    print("listening on", server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main(sys.argv[1:])

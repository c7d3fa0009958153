"""llama.cpp by the package `xllamacpp`, for `engine_cpu`: answers runs, one line each.

    python llama_cpp_peer.py MODEL.gguf NUM_THREADS NUM_SLOTS SLOT_TOKENS OUTPUT_TOKENS

Run by path with any interpreter that has `xllamacpp`; it imports nothing else of this repository.
Reads a line of JSON, the prompts as lists of token ids, submits all at once and answers with a line
of JSON: the seconds and the number of output tokens. NUM_SLOTS requests run at once, each in a KV
cache of SLOT_TOKENS.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import xllamacpp


def main(arguments: list[str]) -> None:
    """Serve until the input ends."""
    model, *numbers = arguments
    num_threads, num_slots, slot_tokens, output_tokens = map(int, numbers)
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = num_slots * slot_tokens
    params.n_parallel = num_slots
    params.cont_batching = True
    params.cpuparams.n_threads = num_threads
    params.cpuparams_batch.n_threads = num_threads
    params.n_threads_http = num_slots + 2
    params.cache_ram_mib = 0
    params.verbosity = -1
    params.n_batch = params.n_ubatch = 2048
    server = xllamacpp.Server(params)  # ends when it is collected

    def complete(prompt: list[int]) -> int:
        answer = server.handle_completions(
            {
                "prompt": prompt,
                "max_tokens": output_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "cache_prompt": False,
            }
        )
        return int(answer["usage"]["completion_tokens"])

    print("ready", flush=True)
    for line in sys.stdin:
        prompts = json.loads(line)
        with ThreadPoolExecutor(len(prompts)) as pool:
            started = time.perf_counter()
            counts = list(pool.map(complete, prompts))
            seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, "output_tokens": sum(counts)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

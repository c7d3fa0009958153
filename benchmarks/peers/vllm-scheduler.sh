# vLLM's scheduler on a CPU: the wheel alone, and what its imports need. Argument: the
# environment's python.
set -eu
"$1" -m pip install -q -e . pytest-timeout pytest-xdist
"$1" -m pip install -q --no-deps vllm==0.33.0
"$1" -m pip install -q torch==2.13.0 "transformers<5.25" cachetools msgspec cloudpickle pyzmq \
    prometheus-client psutil pydantic openai openai-harmony partial-json-parser pybase64 cbor2 \
    blake3 xxhash py-cpuinfo einops gguf diskcache lark depyf sentencepiece setproctitle fastapi \
    aiohttp pillow uvloop opentelemetry-api prometheus-fastapi-instrumentator regex protobuf \
    xgrammar apache-tvm-ffi llguidance

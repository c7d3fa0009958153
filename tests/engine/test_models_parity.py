"""Every family computes what transformers computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import (
    Driver,
    family_configs,
    greedy,
    make_runner,
    random_tokens,
    save_checkpoint,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")

# Both sides are float32 with other orders of summation; measured at most 1e-5 on logits of
# magnitude 6, so this leaves a factor of ten and is far below any error of the mathematics.
_TOLERANCE = 1e-4


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("family", list(family_configs()))
def test_logits_and_greedy_tokens_equal_those_of_transformers(
    family: str, deterministic: bool, tmp_path: Path
) -> None:
    reference = save_checkpoint(family_configs()[family], tmp_path)
    driver = Driver(make_runner(tmp_path, deterministic=deterministic))
    prompts = {f"p{n}": random_tokens(n, seed=n) for n in (1, 5, 23)}

    # Logits of every position, computed as a chunk, a decode and another chunk.
    tokens = random_tokens(40, seed=0)
    key = driver.add("chunked", tokens)
    rows = driver.run({key: 13}) + driver.run({key: 14}) + driver.run({key: 40})
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(np.stack(rows), expected, rtol=0, atol=_TOLERANCE)

    ours = greedy(driver, prompts, num_tokens=8)
    for name, prompt in prompts.items():
        output = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert ours[name] == output[0, len(prompt) :].tolist(), name


def test_bfloat16_stays_close_to_float32(tmp_path: Path) -> None:
    save_checkpoint(family_configs()["qwen3"], tmp_path)
    tokens = random_tokens(20, seed=0)
    rows = []
    for dtype in ("float32", "bfloat16"):
        driver = Driver(make_runner(tmp_path, dtype=dtype))
        rows.append(np.stack(driver.run({driver.add("a", tokens): 20})))
    # bfloat16 keeps 8 bits: single operations err by 0.4 %, two layers by a few times that.
    error = np.abs(rows[0] - rows[1]).max() / np.abs(rows[0]).max()
    assert 0 < error < 0.1

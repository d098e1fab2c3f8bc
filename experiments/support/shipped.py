"""What ships with the project, and where it lies.

Layer: experiments.
"""

import pathlib

_HERE = pathlib.Path(__file__).parents[1]

CHECKPOINT = _HERE / "checkpoints" / "tiny_qwen3_moe"
PROMPTS = CHECKPOINT / "prompts.json"
GOLDEN = _HERE.parent / "tests" / "golden" / "tiny_qwen3_moe_portable.json"
DECODE_STEPS = 16
DEEPSEEK_V4 = _HERE / "checkpoints" / "tiny_deepseek_v4"

"""What ships with the project, and where it lies.

Layer: experiments.
"""

import pathlib

_HERE = pathlib.Path(__file__).parents[1]
_CHECKPOINTS = _HERE / "checkpoints"

# Trained: what a user compares first.
CHECKPOINT = _CHECKPOINTS / "small_qwen3_moe"
PROMPTS = CHECKPOINT / "prompts.json"
DECODE_STEPS = 16

# Weights drawn from a seed, the same on every machine and done in seconds: what
# tests and golden fingerprints are made of.
TINY = _CHECKPOINTS / "tiny_qwen3_moe"
TINY_DEEPSEEK_V4 = _CHECKPOINTS / "tiny_deepseek_v4"
TINY_PROMPTS = TINY / "prompts.json"
GOLDEN = _HERE.parent / "tests" / "golden" / "tiny_qwen3_moe_portable.json"

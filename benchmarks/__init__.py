"""asyncllm measured beside other engines, and its own cost without a model."""

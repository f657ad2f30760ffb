"""For tests of asyncllm and of what is built on it: tiny models, the shadow runner, strategies."""

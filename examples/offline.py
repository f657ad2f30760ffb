"""Many prompts at once without asyncio: the blocking API, with a progress bar."""

import sys

from asyncllm import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"

with LLM(MODEL) as llm:
    prompts = [f"{n} plus {n} is" for n in range(1, 33)]
    completions = llm.generate(prompts, SamplingParams(max_tokens=6, temperature=0))

for prompt, completion in zip(prompts, completions, strict=True):
    print(f"{prompt}{completion.text!r}")

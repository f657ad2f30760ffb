"""From a request to token ids: tokenizer and chat template."""

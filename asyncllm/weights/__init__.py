"""Where checkpoints come from: Hub, folders, safetensors, GGUF."""

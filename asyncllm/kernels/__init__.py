"""One operation a file: Triton kernel, launcher and plain-torch reference."""

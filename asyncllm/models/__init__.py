"""One file per architecture, and their registry."""

"""Which request computes what, in which blocks: pure state, no torch, no clock."""

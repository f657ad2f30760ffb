"""Runners: they take plans and answer with sampled tokens."""

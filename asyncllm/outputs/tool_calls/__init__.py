"""Tool calls in a model's text, found while the text comes: one file a format, and what they share."""

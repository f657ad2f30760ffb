"""From tokens to meaning: detokenizer and stop matcher."""

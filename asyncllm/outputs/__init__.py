"""From tokens to meaning: detokenizer, stop matcher, constraints, tool calls, reasoning."""

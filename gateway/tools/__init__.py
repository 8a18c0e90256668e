"""Tool calls and thinking: what a model writes becomes parts of an answer, and grammars that force a call. No HTTP, no tokens."""

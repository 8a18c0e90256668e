"""The text that the demo models learn from: a made-up catalogue, relevance questions about it, and descriptions of its products."""

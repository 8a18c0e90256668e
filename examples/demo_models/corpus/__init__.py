"""Training text of the demo models: an invented catalogue, relevance questions about it, and descriptions of its products."""

"""Vision towers, and the decoder that takes their embeddings."""

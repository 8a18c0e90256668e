"""Parts that the composition root creates together, from the settings."""

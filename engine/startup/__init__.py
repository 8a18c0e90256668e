"""What is done once, before an engine is ready."""

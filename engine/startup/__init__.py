"""Work that is done once, before an engine is ready."""

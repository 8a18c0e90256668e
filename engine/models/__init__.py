"""The models an engine serves: one dense decoder with flags, its configuration, its weights."""

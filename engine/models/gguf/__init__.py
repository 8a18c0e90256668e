"""GGUF files: their tensors, and the configuration and the tokeniser that their metadata describe."""

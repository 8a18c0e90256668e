"""Text to token ids and back: everything that the engine must never see."""

"""Discovery of engines. Each source follows one entry of the setting ``engines`` and retries for ever."""

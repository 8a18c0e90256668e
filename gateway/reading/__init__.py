"""Reading of request bodies to token ids: one pure function per endpoint, used on the event loop and in worker processes."""

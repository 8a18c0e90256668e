"""Bodies of requests to token ids: one pure function for each endpoint, the same on the event loop and in a worker process."""

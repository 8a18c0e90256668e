"""The worker processes that read request bodies, and the queue before them."""

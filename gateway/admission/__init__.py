"""Whether a request is let in: the requests in flight, and the quotas of its key."""

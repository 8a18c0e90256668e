"""One key-value store for what a gateway keeps between requests: in its own memory, or in Redis, which all gateways share."""

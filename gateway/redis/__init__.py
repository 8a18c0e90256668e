"""Redis, which gateways share results and limits through, and without which each goes on alone."""

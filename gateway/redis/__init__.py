"""Redis, through which gateways share results and limits. Each gateway works alone while Redis is away."""

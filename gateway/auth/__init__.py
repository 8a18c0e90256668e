"""Who may use the gateway: keys that are valid now, and the tenants behind them."""
